"""Faults of the optimizer step: what is reduced and by what it is divided, which ranks take part, and how the kernel
updates its state.

Each replaces seams of the reference by a mistake that a library made (`shardproof.faults.logical` has the tools).
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from shardproof import probe
from shardproof.faults.logical import nothing, override, through_bf16
from shardproof.faults.partitions import expert_elements

if TYPE_CHECKING:
    from shardproof.oracle.inputs import Operation
    from shardproof.reference.checkpoint import Content, Logical
    from shardproof.reference.kernels import Hyper
    from shardproof.reference.numerics import Array
    from shardproof.reference.state import Shards
    from shardproof.reference.system import Ranks


def unscaled_bucket(ranks: Ranks) -> None:
    """Scale another buffer than the one that is reduced: the sum over ranks is never divided."""
    override(ranks.trainer, "divisor", lambda shards: 1)


def experts_averaged_over_their_own(ranks: Ranks) -> None:
    """Divide the experts' gradients by the number of ranks that have the same experts, not by all."""

    def reduce(shards: Shards, gradients: Array) -> Array:
        average: Array = original(shards, gradients)
        factor = average.dtype.type(ranks.session.placement.expert_parallel)
        return np.where(expert_elements(ranks, shards), average * factor, average)

    original = override(ranks.trainer, "reduce", reduce)


def _split(ranks: Ranks) -> set[str]:
    names: set[str] = ranks.trainer.split()
    return names


def absent_stepped_again(ranks: Ranks) -> None:
    """Step a parameter that has no gradient in a step with the gradient that it had before."""
    before: dict[int, Array] = {}

    def update() -> None:
        trainer, catalogue = ranks.trainer, ranks.session.catalogue
        idle = trainer.idle
        gradients = [shards.main_grad for shards in ranks.session.shards]
        for number, shards in enumerate(ranks.session.shards):
            assert shards.main_grad is not None
            absent = catalogue.belongs_to(idle, shards.layout.shard_element)
            before[number] = np.where(absent, before.get(number, shards.main_grad), shards.main_grad)
            shards.main_grad = before[number]
        trainer.idle = frozenset(idle - ranks.session.steps.keys())
        original()
        trainer.idle = idle
        for shards, gradient in zip(ranks.session.shards, gradients, strict=True):
            shards.main_grad = gradient

    original = override(ranks.trainer, "update", update)


def detached_shards(ranks: Ranks) -> None:
    """Wrap the shards of tensor-parallel parameters so that they no longer require a gradient."""
    ranks.session.with_gradient = [p for p in ranks.session.with_gradient if p.fqn not in _split(ranks)]


def marks_lost(ranks: Ranks) -> None:
    """Lose the marks of tensor-parallel parameters when they are rebuilt: the norm counts one coordinate's shards."""
    override(ranks.trainer, "split", set)


def resolved_while_frozen(ranks: Ranks) -> None:
    """Resolve the dtype of reductions at first use: what is frozen then is reduced in bf16 after it is unfrozen."""

    def reduce(shards: Shards, gradients: Array) -> Array:
        average: Array = original(shards, gradients)
        later = {p.fqn for p in ranks.session.of_build.parameters if p.trainable == "later"}
        chosen = ranks.session.catalogue.belongs_to(later, shards.layout.shard_element)
        return np.where(chosen, through_bf16(average), average)

    original = override(ranks.trainer, "reduce", reduce)


def orphans_stepped(ranks: Ranks) -> None:
    """Construct the optimizer before tensor parallelism replaces the parameters: steps update those that were."""

    def update() -> None:
        before = [shards.stepped.copy() for shards in ranks.session.shards]
        original()
        for shards, values in zip(ranks.session.shards, before, strict=True):
            chosen = ranks.session.catalogue.belongs_to(_split(ranks), shards.layout.shard_element)
            shards.stepped = np.where(chosen, values, shards.stepped)

    original = override(ranks.trainer, "update", update)


def replicated_from_own_seeds(ranks: Ranks) -> None:
    """Initialise parameters that tensor parallelism replicates from a seed of each coordinate's own."""

    def build() -> None:
        original()
        session = ranks.session
        whole = {p.fqn for p in session.catalogue.params} - _split(ranks)
        keys = np.concatenate([session.catalogue.keys[p.fqn] for p in session.catalogue.params])
        for shards in session.shards:
            drawn = np.append(probe.initial_values(keys, session.of_build.seed + shards.tp_index), np.float32(0))
            if shards.tp_index == 0:
                continue
            layout = shards.layout
            own = session.catalogue.belongs_to(whole, layout.shard_element)
            values = drawn[layout.shard_element].astype(shards.stepped.dtype)
            shards.stepped = np.where(own, values, shards.stepped)
            if shards.model is not None:
                everywhere = session.catalogue.belongs_to(whole, layout.element)
                shards.model = np.where(everywhere, drawn[layout.element].astype(shards.model.dtype), shards.model)

    original = override(ranks.session, "build", build)


def padding_summed(ranks: Ranks) -> None:
    """Walk a buffer of gathered weights without counting padding: what lies there is added to the next weight."""

    def gather(shards: Shards) -> Array:
        full: Array = original(shards).copy()
        buckets, parts = shards.layout.buckets, shards.layout.order.shape[0]
        for bucket, after in pairwise(buckets):
            padding = bucket.share * parts - bucket.numel
            full[:, :, after.start : after.start + min(padding, after.numel)] += full.dtype.type(1)
        return full

    original = override(ranks.trainer, "gather", gather)


class Multiplied(float):
    """A beta whose powers are multiplied up in fp32."""

    def __pow__(self, exponent: Any, modulus: None = None) -> Any:
        power = np.float32(1)
        for _ in range(exponent):
            power *= np.float32(self)
        return float(power)


def beta_powers_multiplied(ranks: Ranks) -> None:
    """Multiply up the powers of the betas from call to call, in fp32, instead of raising them to the step."""

    def update_cohort(shards: Shards, hyper: Hyper, step: int, names: frozenset[str]) -> None:
        multiplied = replace(hyper, beta1=Multiplied(hyper.beta1), beta2=Multiplied(hyper.beta2))
        original(shards, multiplied, step, names)

    original = override(ranks.trainer, "update_cohort", update_cohort)


def state_through_the_parameter(ranks: Ranks) -> None:
    """Round moments to the parameter's dtype before a kernel stores them in fp32."""

    def update_cohort(shards: Shards, hyper: Hyper, step: int, names: frozenset[str]) -> None:
        original(shards, hyper, step, names)
        storage = shards.storage_shard.dtype
        for role, values in shards.moments.items():
            shards.moments[role] = values.astype(storage).astype(values.dtype)

    original = override(ranks.trainer, "update_cohort", update_cohort)


def initialising_load_decays(ranks: Ranks) -> None:
    """Create the optimizer's state, for a load to fill, by a step without gradients: it decays what was loaded."""

    def restore_model(logical: Logical, content: Content) -> None:
        original(logical, content)
        session = ranks.session
        for group in session.groups if not session.steps else ():
            kept = np.float32(1 - group.hyper.lr * group.hyper.weight_decay)
            for shards in session.shards:
                own = session.catalogue.belongs_to(group.names, shards.layout.shard_element)
                shards.stepped = np.where(own, shards.stepped * kept, shards.stepped).astype(shards.stepped.dtype)
                if shards.model is not None:
                    own = session.catalogue.belongs_to(group.names, shards.layout.element)
                    shards.model = np.where(own, shards.model * kept, shards.model).astype(shards.model.dtype)

    original = override(ranks.loader, "restore_model", restore_model)


def state_of_global_shape(ranks: Ranks) -> None:
    """Allocate a shard's moments with the shape of the whole tensor."""

    def empty_moment(shards: Shards, role: str) -> Array:
        own: Array = original(shards, role)
        return np.zeros((*own.shape[:2], shards.layout.element.size), own.dtype)

    original = override(ranks.trainer, "empty_moment", empty_moment)


def equal_dtypes_demanded(ranks: Ranks) -> None:
    """Refuse a gradient of another dtype than the parameter's, as one variant of a kernel does."""

    def update_cohort(shards: Shards, hyper: Hyper, step: int, names: frozenset[str]) -> None:
        if shards.stages.reduce != shards.stages.stepped:
            raise TypeError(f"expected a gradient of {shards.stages.stepped}, got {shards.stages.reduce}")
        original(shards, hyper, step, names)

    original = override(ranks.trainer, "update_cohort", update_cohort)


def collectives_out_of_order(ranks: Ranks) -> None:
    """Build the groups in an order of each rank's own, and measure the norm with one collective a group."""

    def clip() -> None:
        count = len(ranks.session.groups)
        orders = [[(number + rank) % count for number in range(count)] for rank in range(ranks.session.mesh.dp)]
        for first, *others in zip(*orders, strict=True):
            if set(others) - {first}:
                raise RuntimeError(f"rank 0 reduces the norm of group {first}, the others those of {others}: none ends")
        original()

    original = override(ranks.trainer, "clip", clip)


def averaged_over_contributors(ranks: Ranks) -> None:
    """Divide a gradient by the number of ranks that had one, not by that of all ranks."""
    found = _Contributors(ranks)

    def reduce(shards: Shards, gradients: Array) -> Array:
        average: Array = original(shards, gradients)
        factor = average.dtype.type(ranks.session.mesh.dp / len(found.by_rank))
        return np.where(found.elements(shards), average * factor, average)

    original = override(ranks.trainer, "reduce", reduce)


def stepped_by_contributors(ranks: Ranks) -> None:
    """Leave out of a rank's step what it had no gradient of itself, as if none had come out of the reduction."""
    found = _Contributors(ranks)

    def update() -> None:
        before = [shards.stepped.copy() for shards in ranks.session.shards]
        original()
        for shards, values in zip(ranks.session.shards, before, strict=True):
            without = np.isin(np.arange(ranks.session.mesh.dp), sorted(found.by_rank), invert=True)
            own = found.elements(shards)[None] & without.reshape(*shards.stepped.shape[:2], 1)
            shards.stepped = np.where(own, values, shards.stepped)

    original = override(ranks.trainer, "update", update)


class _Contributors:
    """Which data-parallel ranks had a gradient of the parameters that only some ranks use (`ParamSpec.idle`), in the
    step that is under way."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.by_rank: set[int] = set()
        self.original = override(ranks.trainer, "compute", self.compute)

    def compute(self, op: Operation) -> None:
        inputs, dp = self.ranks.session.inputs, self.ranks.session.mesh.dp
        users = {probe.lone_rank(op.iteration, microbatch, dp) for microbatch in range(inputs.microbatches)}
        self.by_rank = {user for user in users if user is not None} or set(range(dp))
        self.original(op)

    def elements(self, shards: Shards) -> npt.NDArray[np.bool_]:
        """The elements of those parameters in what ranks own, (S, m)."""
        names = {p.fqn for p in self.ranks.session.catalogue.params if p.spec.idle == "others"}
        return self.ranks.session.catalogue.belongs_to(names, shards.layout.shard_element)


def parts_not_summed(ranks: Ranks) -> None:
    """Leave every tensor-parallel rank its own part of a norm's gradient."""
    override(ranks.trainer, "sum_over_tp", nothing)


def extra_microbatches_lost(ranks: Ranks) -> None:
    """Reduce what ranks have after the first microbatch: what one of them alone has then is lost."""

    def backward(op: Operation, microbatch: int, scale: float) -> None:
        if microbatch == 0:
            original(op, microbatch, scale)

    original = override(ranks.trainer, "backward", backward)


def overflow_of_each_optimizer(ranks: Ranks) -> None:
    """Let each optimizer of a chain leave out a step for an overflow of its own gradients alone."""
    override(ranks.trainer, "together", lambda skips: skips)


def norm_of_each_optimizer(ranks: Ranks) -> None:
    """Let each optimizer of a chain clip by the norm of its own gradients."""
    override(ranks.trainer, "combined", lambda squares: squares)


def rate_of_the_first_group(ranks: Ranks) -> None:
    """Hand the kernel the learning rate of the first param group, whichever group it steps."""

    def update_cohort(shards: Shards, hyper: Hyper, step: int, names: frozenset[str]) -> None:
        original(shards, replace(hyper, lr=ranks.session.groups[0].hyper.lr), step, names)

    original = override(ranks.trainer, "update_cohort", update_cohort)


def last_block_without_correction(ranks: Ranks) -> None:
    """Forget the correction of the moments for their first steps in the last block of a kernel, a quarter of the
    shard."""

    def update_cohort(shards: Shards, hyper: Hyper, step: int, names: frozenset[str]) -> None:
        before = shards.stepped.copy(), {role: values.copy() for role, values in shards.moments.items()}
        original(shards, hyper, step + 1000, names)
        uncorrected = shards.stepped
        shards.stepped, shards.moments = before
        original(shards, hyper, step, names)
        tail = shards.stepped.shape[-1] - shards.stepped.shape[-1] // 4
        shards.stepped = np.concatenate([shards.stepped[..., :tail], uncorrected[..., tail:]], axis=-1)

    original = override(ranks.trainer, "update_cohort", update_cohort)
