"""One optimizer step of all simulated ranks: forward, backward, reduction, unscaling, clipping, update.

Each method is one stage, and each is a seam at which a logical fault of `faults.catalogue` replaces it. Every
change of dtype on the way of a gradient goes through `cast_to_stage`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf

import numpy as np

from shardproof.entry import resolve
from shardproof.models import is_idle
from shardproof.oracle.inputs import Operation
from shardproof.program import FORWARDS
from shardproof.reference.blueprint import gradients
from shardproof.reference.chained import waiting
from shardproof.reference.extra_state import after_a_step
from shardproof.reference.kernels import Hyper, update
from shardproof.reference.muon import step_matrices
from shardproof.reference.numerics import DTYPE, Array
from shardproof.reference.quantised import dequantised
from shardproof.reference.schedule import advanced
from shardproof.reference.state import Session, Shards
from shardproof.reference.streams import after_a_forward

STAGES = ("compute", "accumulate", "reduce", "tp", "main_grad", "state")


class Trainer:
    """Steps a session.

    `total_norm` is the gradient norm of the last step, None without clipping. `accumulating`: the first microbatch of a
    step has been, and the others are to come. `forwards`: the microbatches that ran last. `idle`: the parameters that
    have no gradient in this step. `waiting`: those of optimizers that leave it out.
    `directions`: those that Muon stepped matrices in last, whole.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self.total_norm: float | None = None
        self.accumulating, self.forwards = False, range(0)
        self.idle: frozenset[str] = frozenset()
        self.waiting: frozenset[str] = frozenset()
        self.directions: dict[str, Array] = {}

    @np.errstate(all="ignore")
    def step(self, op: Operation) -> None:
        """All microbatches, the reduction and the optimizer's step; with `overflow` one gradient is infinite.
        `accumulate` and `compute_gradients` end before the optimizer's step, `apply_gradients` takes it."""
        if op.kind in FORWARDS:
            self.compute(op)
        if op.kind in ("step", "overflow", "apply_gradients"):
            self.apply(op)

    def compute(self, op: Operation) -> None:
        """Forward and backward passes, and the reduction where none is left to come."""
        microbatches = range(self.session.inputs.microbatches)
        if self.accumulating:
            microbatches = microbatches[1:]
        else:
            self.zero_grads()
            self.count_forwards()
        self.idle = self.without_gradient(op)
        self.accumulating = op.kind == "accumulate"
        self.forwards = microbatches[:1] if self.accumulating else microbatches
        scale = self.session.scaler.scale if self.session.scaler else 1.0
        self.forward()
        if self.session.opaque and self.forwards.start == 0:
            self.session.opaque = after_a_step(self.session.opaque, op.iteration)
        every = self.session.placement.grad_sync == "every"
        for microbatch in self.forwards:
            self.draw()
            self.backward(op, microbatch, scale)
            if every:
                self.synchronise()
        if not every and not self.accumulating:
            self.synchronise()
        if not self.accumulating:
            self.sum_over_tp()
            self.finish_gradients(scale)

    def without_gradient(self, op: Operation) -> frozenset[str]:
        """The parameters that no forward of a step uses, where they then have no gradient."""
        if self.session.inputs.zero_gradients:
            return frozenset()
        microbatches = range(self.session.inputs.microbatches)
        return frozenset(
            p.fqn
            for p in self.session.with_gradient
            if p.spec.idle and all(is_idle(p.spec.idle, op.iteration, microbatch) for microbatch in microbatches)
        )

    def apply(self, op: Operation) -> None:
        """The optimizer's step on reduced gradients, unless one of them overflowed."""
        self.directions = {}
        if op.kind != "overflow":
            self.clip()
        skips = self.together([self.should_skip(self.overflowed(names)) for names in self.session.chain])
        self.waiting = waiting(self.session.chain, skips)
        if not all(skips):
            # FusedAdam makes its masters of the parameters in its first step, rounded to what it stores
            if not self.session.steps:
                self.session.settle(masters=True)
            self.update()
            self.publish()
            self.session.settle(masters=True)
            self.session.settle(masters=False)
            self.session.quantise()
            self.advance_schedule()
        self.update_scale(any(skips))

    def zero_grads(self) -> None:
        """Forget the last step's gradients."""
        for shards in self.session.shards:
            shards.accumulated = shards.reduced = shards.main_grad = None

    def count_forwards(self) -> None:
        """Integer buffers count the training steps' first forwards."""
        for buffer in self.session.of_build.buffers:
            if buffer.dtype == "int64":
                self.session.buffers[buffer.fqn] = self.session.buffers[buffer.fqn] + 1

    def forward(self) -> None:
        """Gather the parameters and cast them to the compute dtype."""
        for shards in self.session.shards:
            shards.computed = self.cast_to_stage("compute", self.gather(shards), shards.stages.compute)
            if shards.weights is not None:
                self.read_weights(shards)

    def read_weights(self, shards: Shards) -> None:
        """Let forwards see what is kept in fp8 as that says."""
        assert shards.weights is not None
        assert shards.computed is not None
        read = shards.gathered(dequantised(shards.weights)).astype(shards.computed.dtype)
        own = self.session.catalogue.belongs_to(self.session.recipes, shards.layout.element)
        shards.computed = np.where(own, read, shards.computed)

    def draw(self) -> None:
        """Draw the masks of one microbatch's dropout."""
        if self.session.streams:
            self.session.streams = after_a_forward(self.session.streams, self.session.model)

    def gather(self, shards: Shards) -> Array:
        """The whole parameters in storage dtype, as every rank has them for its forward, (R, S, n)."""
        return shards.gathered(shards.stepped) if shards.model is None else shards.model

    def backward(self, op: Operation, microbatch: int, scale: float) -> None:
        """Add one microbatch's gradients, in compute dtype, to every rank's accumulated ones."""
        for shards in self.session.shards:
            values = self._contributions(op, microbatch, shards) * np.float32(scale)
            if op.kind == "overflow" and microbatch == 0:
                values[-1, shards.layout.element == self._first_with_gradient()] = inf
            gradient = values.astype(DTYPE[shards.stages.compute]).reshape(
                self.session.mesh.dp_replicate, self.session.mesh.dp_shard, -1
            )
            self.accumulate(shards, gradient)

    def _contributions(self, op: Operation, microbatch: int, shards: Shards) -> Array:
        """Every data-parallel rank's gradient, fp32, shape (dp, n)."""
        session = self.session
        names = tuple(p.fqn for p in session.with_gradient)
        idle = tuple(p.fqn for p in session.with_gradient if is_idle(p.spec.idle, op.iteration, microbatch))
        step = (op.iteration, microbatch)
        return gradients(shards.blueprint, names, idle, step, session.mesh.dp, session.placement.expert_parallel)

    def _first_with_gradient(self) -> int:
        first = next(param for param in self.session.with_gradient if param.spec.numel)
        return self.session.catalogue.offset[first.fqn]

    def accumulate(self, shards: Shards, gradient: Array) -> None:
        """Add a microbatch's gradient, shape (R, S, n), to the buffer in accumulate dtype."""
        gradient = gradient.astype(DTYPE[shards.stages.accumulate], copy=False)
        total = gradient if shards.accumulated is None else shards.accumulated + gradient
        shards.accumulated = self.cast_to_stage("accumulate", total, shards.stages.accumulate)

    def synchronise(self) -> None:
        """Reduce what has accumulated and add it to what was reduced before."""
        for shards in self.session.shards:
            assert shards.accumulated is not None
            reduced = self.reduce(shards, shards.accumulated.astype(DTYPE[shards.stages.reduce], copy=False))
            shards.accumulated = None
            if shards.model is None:
                reduced = reduced.astype(DTYPE[shards.stages.main_grad], copy=False)
            shards.reduced = reduced if shards.reduced is None else shards.reduced + reduced

    def reduce(self, shards: Shards, gradients: Array) -> Array:
        """Average over all data-parallel ranks, keep each rank's own share: (R, S, n) → (R, S, m)."""
        scattered = self.reduce_scatter(gradients)[:, shards.layout.order]
        summed = self.cast_to_stage("reduce", self.all_reduce(scattered), shards.stages.reduce)
        average: Array = summed / summed.dtype.type(self.divisor(shards))
        return average

    def divisor(self, shards: Shards) -> int:
        """By what a sum over all data-parallel ranks is divided: their number."""
        return self.session.mesh.dp

    def reduce_scatter(self, gradients: Array) -> Array:
        """Sum over the shard ranks of each replica: (R, S, n) → (R, n)."""
        summed: Array = gradients.sum(axis=1, dtype=gradients.dtype)
        return summed

    def all_reduce(self, scattered: Array) -> Array:
        """Sum over the replicas and give each its copy: (R, S, m) → (R, S, m)."""
        if len(scattered) == 1:
            return scattered
        summed: Array = scattered.sum(axis=0, dtype=scattered.dtype)
        return np.repeat(summed[None], len(scattered), axis=0)

    def sum_over_tp(self) -> None:
        """Add up the gradients of which every tensor-parallel rank has a part, as of norms under sequence parallelism
        (megatron/core/distributed/finalize_model_grads.py; DTensor makes them whole by itself)."""
        partial = {p.fqn for p in self.session.with_gradient if p.spec.partial}
        if not partial or self.session.mesh.tp == 1:
            return
        catalogue = self.session.catalogue
        total = np.zeros((self.session.mesh.dp_replicate, catalogue.padding + 1), np.float32)
        masks = [catalogue.belongs_to(partial, shards.layout.shard_element) for shards in self.session.shards]
        for shards, mask in zip(self.session.shards, masks, strict=True):
            assert shards.reduced is not None
            total[:, shards.layout.shard_element[mask]] += shards.reduced[:, mask]
        for shards, mask in zip(self.session.shards, masks, strict=True):
            assert shards.reduced is not None
            shards.reduced = shards.reduced.copy()
            whole = total[:, shards.layout.shard_element[mask]]
            shards.reduced[:, mask] = self.cast_to_stage("tp", whole, shards.stages.reduce)

    def finish_gradients(self, scale: float) -> None:
        """Cast the reduced gradients to what the optimizer takes and undo the loss scale."""
        for shards in self.session.shards:
            assert shards.reduced is not None
            gradient = shards.reduced.astype(DTYPE[shards.stages.main_grad], copy=False)
            if scale != 1.0:
                gradient = gradient * gradient.dtype.type(1 / scale)
            shards.main_grad = self.cast_to_stage("main_grad", gradient, shards.stages.main_grad)

    def cast_to_stage(self, stage: str, values: Array, dtype: str) -> Array:
        """Values at one of `STAGES` in the dtype its contract declares."""
        assert stage in STAGES
        return values.astype(DTYPE[dtype], copy=False)

    def overflowed(self, names: frozenset[str]) -> list[Array]:
        """For each of the session's shards, which ranks see a gradient of these parameters that is not finite: (R, S)
        booleans."""
        if self.session.scaler is None:
            return []
        return [
            np.logical_not(np.isfinite(self._of(names, shards, shards.main_grad)).all(axis=2))
            for shards in self.session.shards
            if shards.main_grad is not None
        ]

    def _of(self, names: frozenset[str], shards: Shards, values: Array) -> Array:
        """What ranks own of one of several optimizers, (R, S, m); zeros for the others."""
        if len(self.session.chain) == 1:
            return values
        own = self.session.catalogue.belongs_to(names, shards.layout.shard_element)
        masked: Array = np.where(own, values, values.dtype.type(0))
        return masked

    def together(self, skips: Sequence[bool]) -> Sequence[bool]:
        """Decides which optimizers of a chain skip a step after an overflow: if one skips, the whole chain skips."""
        return [any(skips)] * len(skips)

    def should_skip(self, overflowed: Sequence[Array]) -> bool:
        """Whether the step is left out: on every rank, if any of them saw an overflow."""
        return any(ranks.any() for ranks in overflowed)

    def clip(self) -> None:
        """Scale all gradients so that their global norm is at most the bound, by the system's rule."""
        rule = self.session.inputs.clip
        self.total_norm = None
        if rule is None:
            return
        dtypes = {s.stages.main_grad for s in self.session.shards} if self.session.with_gradient else set()
        squares = self.combined([self.squares(names) for names in self.session.chain])
        for names, own in zip(self.session.chain, squares, strict=True):
            self.total_norm, coefficient = resolve(rule.rule.reference)(own, dtypes, rule)
            for shards in self.session.shards if coefficient is not None else ():
                assert shards.main_grad is not None
                scaled = (shards.main_grad.astype(np.float32) * coefficient).astype(shards.main_grad.dtype)
                if len(squares) > 1:
                    mine = self.session.catalogue.belongs_to(names, shards.layout.shard_element)
                    scaled = np.where(mine, scaled, shards.main_grad)
                shards.main_grad = scaled

    def squares(self, names: frozenset[str]) -> float:
        """The sum of the squares of an optimizer's gradients, each counted once."""
        total = 0.0
        for shards in self.session.shards:
            assert shards.main_grad is not None
            once = self._of(names, shards, shards.main_grad)[0].astype(np.float64)
            if shards.tp_index:
                once = once[self.session.catalogue.belongs_to(self.split(), shards.layout.shard_element)]
            total += float(np.square(once).sum())
        return total

    def combined(self, squares: Sequence[float]) -> Sequence[float]:
        """The squares of the norm that each optimizer of a chain clips by, from those of their own: all of them."""
        return [sum(squares)] * len(squares)

    def split(self) -> set[str]:
        """The parameters marked as split by tensor parallelism; every coordinate has a copy of the others."""
        return {p.fqn for p in self.session.catalogue.params if p.spec.tp_dim is not None}

    def update(self) -> None:
        """Step every parameter that has a gradient, all ranks of a cohort at once.

        A cohort is the parameters of one group that have taken equally many steps: one kernel call. Where some
        parameter of a group and dtype has no momentum yet, torch's foreach SGD treats all of them one by one, and
        in half precision `Tensor.mul_` rounds otherwise than `_foreach_mul_` (torch/optim/sgd.py, 2.13).
        """
        cohorts: dict[tuple[int, int], list[str]] = {}
        fresh: set[tuple[int, str]] = set()
        stepping = {
            p.fqn: self.session.parameter(p.fqn).stages.stepped
            for p in self.session.with_gradient
            if p.fqn not in self.idle and p.fqn not in self.waiting
        }
        for index, group in enumerate(self.session.groups):
            for name in group.names:
                if name in stepping:
                    if name not in self.session.steps:
                        fresh.add((index, stepping[name]))
                    cohorts.setdefault((index, self.session.steps.get(name, 0)), []).append(name)
        for shards in self.session.shards:
            if shards.host is not None and shards.offloaded is not None:
                shards.stepped = np.where(shards.offloaded, shards.host, shards.stepped)
        for (index, steps), names in cohorts.items():
            hyper = self.session.groups[index].hyper
            if hyper.kind == "muon":
                for shards in self.session.shards:
                    self.begin_moments(shards)
                self.directions |= step_matrices(self.session, hyper, names)
                continue
            for shards in self.session.shards:
                alone = hyper.kind == "sgd" and hyper.impl == "foreach" and (index, shards.stages.stepped) in fresh
                own = replace(hyper, impl="forloop") if alone else hyper
                self.update_cohort(shards, own, steps + 1, frozenset(names))
        for shards in self.session.shards:
            if shards.host is not None and shards.offloaded is not None:
                shards.host = np.where(shards.offloaded, shards.stepped, shards.host)
        for names in cohorts.values():
            for name in names:
                self.advance_step(name)
        self.count_idle()

    def count_idle(self) -> None:
        """FusedAdam counts steps by group and not by parameter: one without a gradient is counted, with moments."""
        by_group = [g for g in self.session.groups if g.hyper.impl == "multi_tensor" and g.hyper.kind != "sgd"]
        counted = [name for group in by_group for name in group.names if name in self.idle]
        for name in counted:
            self.advance_step(name)
        if counted:
            for shards in self.session.shards:
                self.begin_moments(shards)

    def advance_step(self, name: str) -> None:
        """Count one step of a parameter."""
        self.session.steps[name] = self.session.steps.get(name, 0) + 1

    def update_cohort(self, shards: Shards, hyper: Hyper, step: int, names: frozenset[str]) -> None:
        """Step number `step` of those of `names` that lie in `shards`."""
        if not any(slot.param.fqn in names for slot in shards.layout.slots):
            return
        positions = shards.layout.positions(names)
        assert shards.main_grad is not None
        if "host" in self.session.places.values():
            raise ValueError(f"a kernel on the device is given state on the host: {self.session.places}")
        self.begin_moments(shards)
        arrays = {"stepped": shards.stepped, "grad": shards.main_grad, **shards.moments}
        flat = {k: _take(v, positions) for k, v in arrays.items()}
        param, grad = flat.pop("stepped"), flat.pop("grad")
        state = {} if step == 1 and hyper.kind == "sgd" else flat
        stepper = self.session.inputs.stepper
        if shards.blueprint.on_host is None or stepper.impl == stepper.host_impl:
            update(hyper, param, grad, state, step)
        else:
            on_host = _take(np.repeat(shards.blueprint.on_host[None], len(shards.stepped), 0), positions)
            self._update_with_both(hyper, on_host, (param, grad, state), step)
        shards.stepped = _put(shards.stepped, positions, param)
        for role, values in state.items():
            scaled = role in self.session.scaled_roles(shards)
            kept = values if scaled else self.cast_to_stage("state", values, shards.stages.moment(role))
            shards.moments[role] = _put(shards.moments[role], positions, kept)

    def begin_moments(self, shards: Shards) -> None:
        """Make the moments that are not there yet."""
        for role in self.session.moment_roles:
            if role not in shards.moments:
                shards.moments[role] = self.empty_moment(shards, role)

    def empty_moment(self, shards: Shards, role: str) -> Array:
        """A moment before its first step: zeros, as many as each rank owns, (R, S, m)."""
        return np.zeros(shards.stepped.shape, DTYPE[self.session.working_dtype(shards, role)])

    def _update_with_both(
        self, hyper: Hyper, on_host: Array, tensors: tuple[Array, Array, dict[str, Array]], step: int
    ) -> None:
        """One step in place by the device's kernel, and by the host's where `on_host`, (n,), says so."""
        param, grad, state = tensors
        host_param, host_state = param.copy(), {role: values.copy() for role, values in state.items()}
        update(hyper, param, grad, state, step)
        update(replace(hyper, impl=self.session.inputs.stepper.host_impl), host_param, grad, host_state, step)
        np.copyto(param, host_param, where=on_host)
        for role, values in state.items():
            np.copyto(values, host_state[role], where=on_host)

    def publish(self) -> None:
        """In flat buffers: round the stepped shards to storage dtype and all-gather them into the parameters."""
        trainable = frozenset(self.session.trainable)
        for shards in self.session.shards:
            if shards.model is None:
                continue
            full = shards.gathered(self.rounded_to_storage(shards))
            if shards.layout.positions(trainable) is not None:
                chosen = self.session.catalogue.belongs_to(trainable, shards.layout.element)
                full = np.where(chosen, full, shards.model)
            shards.model = full

    def rounded_to_storage(self, shards: Shards) -> Array:
        """What was stepped, (R, S, m), in storage dtype."""
        if not shards.alike.half_away:
            return shards.stepped.astype(DTYPE[shards.stages.storage], copy=False)
        bits = shards.stepped.view(np.uint32)
        return ((bits + np.uint32(0x8000)) >> np.uint32(16)).astype(np.uint16).view(DTYPE["bf16"])

    def advance_schedule(self) -> None:
        """Move every group's learning rate one step on, if there is a schedule."""
        if self.session.schedule is None:
            return
        share = self.session.inputs.share
        self.session.schedule = advanced(self.session.schedule, self.session.groups, share)

    def update_scale(self, skipped: bool) -> None:
        """Shrink the loss scale after an overflow, double it after enough steps without one."""
        scaler, rule = self.session.scaler, self.session.inputs.scale
        if scaler is None or rule is None:
            return
        resolve(rule.rule.reference)(scaler, rule, skipped)


def _take(values: Array, positions: Array | None) -> Array:
    """Chosen positions of every replica's flattened shards as one contiguous 1-D array."""
    if positions is None:
        return values.reshape(-1)
    return values.reshape(len(values), -1)[:, positions].reshape(-1)


def _put(values: Array, positions: Array | None, chosen: Array) -> Array:
    """The inverse of `_take`: `values` with the chosen positions replaced."""
    if positions is None:
        return chosen.reshape(values.shape)
    values.reshape(len(values), -1)[:, positions] = chosen.reshape(len(values), -1)
    return values
