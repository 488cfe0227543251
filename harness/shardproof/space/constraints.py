"""Constraints: which combinations of axis values the space leaves out, each with its written reason.

A constraint is a rule over a whole scenario; nobody declares which axes it reads. `tabulate` finds them by
running the rule on a scenario that notes every field read, and turns the rule into a truth table over those
axes. The tables are what covering arrays are built from and what coverage is counted against. What a system
refuses (`System.refusal`) is not a constraint: it is run, and its verdict is `unsupported`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from shardproof.axes_read import explore
from shardproof.errors import HarnessError
from shardproof.loading import as_loaded, grows, shrinks, with_other
from shardproof.models import model_spec, storage_dtype
from shardproof.oracle.contract import KINDS, OF_THE_RUN, steps_on_gpu, twin_device
from shardproof.oracle.kernels_table import POSITION_DEPENDENT
from shardproof.program import TAKES, changes, does, load_mesh, moves
from shardproof.protocol.accepts import Constraint
from shardproof.protocol.registry import contract_of, system_named
from shardproof.scenario import Mesh, Optimizer, Scenario

if TYPE_CHECKING:  # numpy is for walks: `list`, and a file that states one scenario, start without it
    from shardproof.space.feasible import Bools

TABLE_LIMIT = 400_000


@dataclass(frozen=True)
class Table:
    """A rule over the axes it reads: `allowed[i, j, …]` for the i-th value of the first axis, and so on."""

    id: str
    reason: str
    axes: tuple[str, ...]
    allowed: Bools

    @property
    def excluded(self) -> int:
        """How many combinations of the axes' values the rule takes out."""
        return int(self.allowed.size - self.allowed.sum())


def _has_tp(model: str) -> bool:
    return any(p.spec.tp_dim is not None for p in model_spec(model).params)


def _divides_tp(mesh: Mesh) -> bool:
    return mesh.tp > 1


def _tp_change_without_effect(s: Scenario) -> bool:
    target = 2 if s.load == "tp_change" else Mesh.parse(s.load).tp if "x" in s.load else 1
    return target > 1 and not _has_tp(s.model)


def _says_who(model: str) -> bool:
    """Whether a model decides itself which ranks use what, or counts what every rank draws."""
    spec = model_spec(model)
    return any(p.spec.idle in ("others", "first") for p in spec.params) or any(m.draws for m in spec.modules)


def _trivial_divisor(s: Scenario) -> bool:
    if not s.reshard_after_forward.isdecimal():
        return False
    target = load_mesh(s) if moves(s) else None
    part = int(s.reshard_after_forward)
    sizes = [s.mesh.dp_shard, *([target.dp_shard] if target else [])]
    return any(size % part or part in (1, size) for size in sizes)


def _repeats_dtype(s: Scenario) -> bool:
    policy = s.dtype
    compute = policy.param or policy.storage
    return (
        policy.param == policy.storage
        or policy.reduce == compute
        or policy.output == compute
        or policy.master == policy.storage
    )


def _calculated_dtypes(s: Scenario) -> set[str]:
    """The dtypes in which the optimizer kernels of a scenario compute parameters and moments."""
    contract = contract_of(s)
    return {contract.calculates_in(s, spec) for spec in KINDS}


def _with_masters(s: Scenario) -> tuple[bool, ...]:
    """Which kinds of parameters have a separate master."""
    contract = contract_of(s)
    return tuple(contract.master(s, storage_dtype(s.dtype, spec)) is not None for spec in KINDS)


def _has_eps_below_fp16(ask: Optimizer) -> bool:
    return ask.kind != "sgd" and ask.impl != "fused" and ask.eps < 2.0**-14


def _adds_decay(ask: Optimizer) -> bool:
    """Whether weight decay is added to something that is not finite where the parameter is not."""
    return ask.kind != "adamw" or ask.impl == "multi_tensor"


def _has_matrices_only(model: str) -> bool:
    return all(len(p.spec.shape) == 2 and p.spec.numel for p in model_spec(model).unique_params)


def _has_rare(model: str) -> bool:
    return model_spec(model).has_rare


def _takes_tensor_lr(s: Scenario) -> bool:
    ask = s.optimizer
    return ask.kind != "sgd" and ask.impl == "fused" and ask.schedule in ("none", "halve")


def _kernel_constraints() -> Iterator[Constraint]:
    """One constraint a reason of `POSITION_DEPENDENT`."""
    for number, reason in enumerate(dict.fromkeys(POSITION_DEPENDENT.values())):
        kernels = frozenset(key for key, value in POSITION_DEPENDENT.items() if value == reason)

        def uses(s: Scenario, kernels: frozenset[tuple[str, str, str]] = kernels) -> bool:
            ask = s.optimizer
            if (ask.kind, ask.impl) not in {key[:2] for key in kernels} or steps_on_gpu(s):
                return False
            return any((ask.kind, ask.impl, dtype) in kernels for dtype in _calculated_dtypes(s))

        yield Constraint(f"kernel-{number}", reason, uses)


CONSTRAINTS: tuple[Constraint, ...] = (
    Constraint(
        "load-mesh",
        "the load relation has no answer for this mesh within world 8",
        lambda s: moves(s) and load_mesh(s) is None,
    ),
    Constraint(
        "load-unused",
        "the program never goes to the load mesh: another relation than `same` would repeat a scenario",
        lambda s: s.load != "same" and not moves(s),
        repeats=True,
    ),
    Constraint(
        "checkpoint-unused",
        "the program saves nothing: another checkpoint format than the plainest would repeat a scenario",
        lambda s: not does(s, *TAKES) and s.checkpoint != system_named(s.system).accepts.plainest_checkpoint,
        repeats=True,
    ),
    Constraint(
        "tp-nothing",
        "tensor parallelism has nothing to shard: no parameter of the model has a tp dim",
        lambda s: s.fact("mesh", _divides_tp) and not s.fact("model", _has_tp),
        repeats=True,
    ),
    Constraint(
        "tp-change-nothing",
        "the load mesh changes tp, and no parameter of the model has a tp dim",
        _tp_change_without_effect,
        repeats=True,
    ),
    Constraint(
        "reshard-divisor",
        "an integer reshard_after_forward divides dp_shard of every mesh and is neither 1 (false) nor dp_shard (true)",
        _trivial_divisor,
    ),
    Constraint(
        "reshard-zero1",
        "zero1 keeps whole parameters: there is nothing to reshard after forward",
        lambda s: s.reshard_after_forward != "true" and s.sharding != "fully_shard",
        repeats=True,
    ),
    Constraint(
        "sync-single",
        "with one microbatch, reducing after every one is reducing after the last",
        lambda s: s.grad_sync == "every" and s.microbatches == 1,
        repeats=True,
    ),
    Constraint(
        "uneven-single",
        "ranks have different numbers of microbatches if there are two ranks, and two microbatches",
        lambda s: s.grad_sync == "uneven" and (s.microbatches == 1 or s.mesh.dp == 1),
        repeats=True,
    ),
    Constraint(
        "uneven-gather",
        "where a forward gathers parameters, or hands tokens to experts elsewhere, every rank has to have it: their "
        "numbers of microbatches are equal",
        lambda s: s.grad_sync == "uneven" and (s.sharding == "fully_shard" or s.expert_parallel > 1),
    ),
    Constraint(
        "uneven-model",
        "the model has parameters that one rank alone uses, or that each first microbatch leaves out, or draws random "
        "numbers in every forward: which ranks have a forward is said twice",
        lambda s: s.grad_sync == "uneven" and _says_who(s.model),
    ),
    Constraint(
        "overflow-scale",
        "an overflowing step is skipped only under a loss scale",
        lambda s: not s.optimizer.loss_scale and does(s, "overflow"),
    ),
    Constraint(
        "unfreeze-nothing",
        "the program unfreezes, and the model marks no parameter `later`",
        lambda s: does(s, "unfreeze", "add_group") and not model_spec(s.model).has_later,
        repeats=True,
    ),
    Constraint(
        "later-never",
        "the model marks parameters `later`, and the program never unfreezes",
        lambda s: not does(s, "unfreeze", "add_group") and model_spec(s.model).has_later,
        repeats=True,
    ),
    Constraint(
        "accumulation-single",
        "the program stops in the middle of gradient accumulation, which takes two microbatches",
        lambda s: s.microbatches == 1 and does(s, "accumulate"),
    ),
    Constraint(
        "schedule-nothing",
        "the program loads the learning-rate schedule alone, and there is none",
        lambda s: s.optimizer.schedule == "none" and does(s, "load_schedule_only"),
    ),
    Constraint(
        "group-schedule",
        "a group joins the optimizer after the schedule was made, of which torch's schedules know nothing",
        lambda s: s.optimizer.schedule != "none" and does(s, "add_group"),
    ),
    Constraint(
        "master-sharding",
        "separate master parameters belong to zero1: per-parameter sharding steps on the storage itself",
        lambda s: s.dtype.master is not None and s.sharding == "fully_shard" and not contract_of(s).sharded_masters,
    ),
    Constraint(
        "stages-sharding",
        "param and output dtypes are MixedPrecisionPolicy's: zero1 computes in the storage dtype",
        lambda s: bool(s.dtype.param or s.dtype.output) and s.sharding != "fully_shard",
    ),
    Constraint(
        "dtype-repeats",
        "the policy names a stage's dtype that the stage before it already has: it would repeat a scenario",
        _repeats_dtype,
        repeats=True,
    ),
    Constraint(
        "offload-fraction",
        "per-parameter sharding offloads everything or nothing: fractions belong to zero1",
        lambda s: 0 < s.offload.fraction < 1 and s.sharding == "fully_shard",
    ),
    Constraint(
        "replicate-instances",
        "without sharding there is nothing that dp_replicate and dp_shard divide between them: one of them is 1",
        lambda s: s.sharding == "replicate" and s.mesh.dp_shard > 1 and s.mesh.dp_replicate > 1,
        repeats=True,
    ),
    Constraint(
        "experts-nothing",
        "expert parallelism has nothing to share out: no parameter of the model is an expert's",
        lambda s: s.expert_parallel > 1 and not any(p.spec.ep_dim is not None for p in model_spec(s.model).params),
        repeats=True,
    ),
    Constraint(
        "experts-load-mesh",
        "expert parallelism must divide the data-parallel ranks of the load mesh too",
        lambda s: (
            s.expert_parallel > 1
            and moves(s)
            and (target := load_mesh(s)) is not None
            and target.dp % s.expert_parallel != 0
        ),
    ),
    Constraint(
        "fp16-eps",
        "Adam's eps below 2^-14 vanishes in fp16: moments underflow, values become NaN, and nothing is left to compare",
        lambda s: s.fact("optimizer", _has_eps_below_fp16) and "fp16" in _calculated_dtypes(s),
    ),
    Constraint(
        "capturable-device",
        "capturable is a switch of torch.optim's Adam and AdamW, for tensors on a GPU: device=cuda, without offload",
        lambda s: s.optimizer.capturable and (s.optimizer.kind == "sgd" or twin_device(s) != "cuda"),
    ),
    Constraint(
        "rare-decay",
        "weight decay in the gradient, or in FusedAdam's update, makes NaN of an infinite parameter, whose sign and "
        "payload no kernel promises",
        lambda s: s.fact("optimizer", _adds_decay) and s.fact("model", _has_rare),
    ),
    Constraint(
        "cycle-momentum",
        "OneCycleLR gives SGD a momentum: without one it would be another optimizer from then on",
        lambda s: s.optimizer.schedule == "onecycle" and s.optimizer.kind == "sgd" and s.optimizer.momentum == 0,
    ),
    Constraint(
        "muon-matrices",
        "Muon steps matrices: a model for it has nothing but parameters of two dims that hold elements",
        lambda s: s.optimizer.kind == "muon" and not s.fact("model", _has_matrices_only),
    ),
    Constraint(
        "muon-impl",
        "Muon has one implementation, which steps one matrix after the other",
        lambda s: s.optimizer.kind == "muon" and s.optimizer.impl != Optimizer().impl,
    ),
    Constraint(
        "tensor-lr",
        "a learning rate that is a tensor is given to torch's fused Adam, which takes it as the number that it holds, "
        "under no schedule that calculates with it in fp32",
        lambda s: s.optimizer.tensor_lr and not _takes_tensor_lr(s),
    ),
    *_kernel_constraints(),
)


def _same_run_constraints() -> Iterator[Constraint]:
    """A constraint for each property of a contract, such as the clipping rule, that must stay the same for a whole run
    although axes change at a load."""
    for promise in OF_THE_RUN:

        def other(s: Scenario, promise: str = promise) -> bool:
            if not changes(s):
                return False
            contract = contract_of(s)
            return bool(getattr(contract, promise)(s) != getattr(contract, promise)(as_loaded(s)))

        reason = f"for the ranks that load, the optimizer or what surrounds its step would be another one ({promise})"
        yield Constraint(f"load-{promise}", reason, other)


def _unused(axis: str, called: str) -> Constraint:
    """What says that `load_AXIS` is the saving ranks' own value, or is read by no rank."""
    load_axis = f"load_{axis}"

    def excludes(s: Scenario) -> bool:
        after = getattr(s, load_axis)
        return after is not None and (not moves(s) or after == getattr(s, axis))

    return Constraint(
        f"load-{axis}-unused",
        f"the program never goes to other ranks, or they have the saving ranks' {called}: {load_axis} would repeat a "
        "scenario",
        excludes,
        repeats=True,
    )


_OF_LOAD = (
    _unused("dtype", "dtypes"),
    _unused("model", "model"),
    Constraint(
        "load-model-other",
        "the model of the ranks that load has one module more than the saving ranks' (NAME+one), or one fewer",
        lambda s: s.load_model is not None and s.model != s.load_model and not (grows(s) or shrinks(s)),
    ),
    Constraint(
        "load-optimizer-unused",
        "the program never goes to other ranks, or they have the saving ranks' optimizer: load_optimizer would repeat "
        "a scenario",
        lambda s: (
            s.load_optimizer is not None and (not moves(s) or with_other(s.optimizer, s.load_optimizer) == s.optimizer)
        ),
        repeats=True,
    ),
    Constraint(
        "load-optimizer-state",
        "SGD and Muon keep other state than Adam, which none of them could load",
        lambda s: s.load_optimizer is not None and s.optimizer.kind in ("sgd", "muon"),
    ),
    _unused("options", "options"),
    Constraint(
        "load-version-unused",
        "the program never goes to other ranks, or they have the saving ranks' release: load_version would repeat a "
        "scenario",
        lambda s: s.load_version != "same" and (not moves(s) or as_loaded(s).version == s.version),
        repeats=True,
    ),
    Constraint(
        "load-masters",
        "with the dtypes of the load a parameter would have a master, or none, unlike where it was saved",
        lambda s: changes(s) and _with_masters(s) != _with_masters(as_loaded(s)),
    ),
    *_same_run_constraints(),
)
"""What ranks that load with dtypes of their own must not be."""


def constraints_of(system: str) -> tuple[Constraint, ...]:
    """The constraints of a system's scenarios: those of all, and its own."""
    return (*CONSTRAINTS, *system_named(system).accepts.constraints)


def constraints_of_load(system: str) -> tuple[Constraint, ...]:
    """What holds beside them where ranks load with dtypes, or a release, of their own."""
    return (*_OF_LOAD, *map(_of_load, constraints_of(system)))


def _of_load(constraint: Constraint) -> Constraint:
    """The same constraint on the ranks that load, where they have dtypes or a release of their own."""

    def excludes(scenario: Scenario) -> bool:
        return changes(scenario) and not constraint.excludes(scenario) and constraint.excludes(as_loaded(scenario))

    return Constraint(
        f"{constraint.id}-load", f"after the load: {constraint.reason}", excludes, repeats=constraint.repeats
    )


def impossible(scenario: Scenario) -> Constraint | None:
    """The first constraint under which `scenario` cannot be run at all, or None."""
    return next((c for c in constraints_on(scenario) if not c.repeats and c.excludes(scenario)), None)


def constraints_on(scenario: Scenario) -> tuple[Constraint, ...]:
    """The constraints that a scenario is subject to."""
    own = constraints_of(scenario.system)
    return (*own, *constraints_of_load(scenario.system)) if changes(scenario) else own


def tabulate(
    rule_id: str,
    reason: str,
    excludes: Callable[[Scenario], object],
    base: Scenario,
    values: Mapping[str, Sequence[Any]],
) -> Table | None:
    """The truth table of a rule over the axes of `values` that it reads; None if it excludes nothing there.

    Args:
        rule_id, reason: kept in the table.
        excludes: the rule; anything but None and False excludes.
        base: gives the axes that `values` lacks.
        values: the different typed values of each axis.

    Raises:
        HarnessError: the rule raises, or reads so many axes that its table would exceed `TABLE_LIMIT` entries.
    """
    import numpy as np

    from shardproof.space.feasible import crossed

    read: set[str] = set()
    excluded: list[dict[str, list[int]]] = []
    try:
        for chosen, found in explore(excludes, base, values):
            if not chosen.keys() <= read:
                read |= chosen.keys()
                _require_table(read, values)
            if found not in (None, False):
                excluded.append(chosen)
    except HarnessError as error:
        raise HarnessError(f"rule {rule_id!r} of {base.system}: {error}") from error
    if not excluded:
        return None
    axes = tuple(axis for axis in values if axis in read)
    every = {axis: range(len(values[axis])) for axis in axes}
    allowed = np.ones([len(each) for each in every.values()], np.bool_)
    for chosen in excluded:
        allowed[crossed([np.array(chosen.get(axis, each)) for axis, each in every.items()])] = False
    return Table(rule_id, reason, axes, allowed)


def _require_table(axes: Iterable[str], values: Mapping[str, Sequence[Any]]) -> None:
    """A table over these axes is not too large.

    Raises:
        HarnessError: it is.
    """
    if prod(len(values[axis]) for axis in axes) > TABLE_LIMIT:
        raise HarnessError(f"it reads {', '.join(sorted(axes))} at once; split it into rules of fewer axes")
