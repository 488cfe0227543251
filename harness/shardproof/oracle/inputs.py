"""Everything that an oracle may know about a scenario, resolved once into one frozen value.

A scenario is what a user asks for: a system, a mesh, a dtype policy, options. What follows from it for the numbers (in
which dtype a gradient is reduced, which kernel steps an element, over which elements a quantisation scale is taken) is
the promise of the system's *contract* (`shardproof.oracle.contract`). The contract answers all of it at once, with an
`Inputs` for what must come out, and a `Placement` for how the ranks of the reference share it out.

The twin (`shardproof.oracle.twin`) sees an `Inputs` and nothing else. So two scenarios with equal inputs share one
twin, whatever their system, mesh or checkpoint format, and nothing that a twin depends on can be missing from the key
of the cache: it is the value itself. For example, FSDP2 on 2 and on 4 ranks have equal inputs, because the exact grid
gives both the same mean gradient; on 1 rank the grid is another one, and so are the inputs.

The reference (`shardproof.reference`) sees the same `Inputs`, and the `Placement` beside it.

Values only: no torch, no numpy, no system.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from shardproof.grid import Grid
from shardproof.scenario import Mesh

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Stages:
    """The dtype of each stage a parameter's value and gradient pass through.

    * storage: the model's parameter.
    * compute: inside the forward, and of the gradient that comes out of it.
    * accumulate: sum over microbatches.
    * reduce: sum over ranks.
    * main_grad: the gradient as the optimizer sees it.
    * master: separate master parameter (None: the optimizer steps on `storage`).
    * exp_avg, exp_avg_sq: Adam's moments.
    """

    storage: str
    compute: str
    accumulate: str
    reduce: str
    main_grad: str
    master: str | None
    exp_avg: str
    exp_avg_sq: str

    @property
    def stepped(self) -> str:
        """The dtype of what the optimizer steps on, and of SGD's momentum."""
        return self.master or self.storage

    def moment(self, role: str) -> str:
        """The dtype that optimizer state of a role (`exp_avg`, `exp_avg_sq`, `momentum`) is stored in."""
        match role:
            case "exp_avg":
                return self.exp_avg
            case "exp_avg_sq":
                return self.exp_avg_sq
        return self.stepped


@dataclass(frozen=True)
class Parameter:
    """One parameter object of one build, with all that decides its bits.

    * names: fully qualified, its own first, then those of tied aliases.
    * uses: the names under which forwards use it.
    * trainable: `yes`, `no` or `later` (from the program's `unfreeze` or `add_group` on).
    * held: the optimizer has it in a param group.
    * initial: the dtypes that its initial values pass through, the last of them the one that it is stored in.
    * bound: initial values beyond it are clipped to it first.
    * gradient: the grid that its gradients come from; None where it never has a gradient.
    * scaled: which of `master`, `exp_avg`, `exp_avg_sq` are stored divided by a scale.
    * half_away: the parameter is its master rounded half away from zero, not to the nearest even.
    * idle: in which forwards it has no part (`ParamSpec.idle`). rare: its initial values are `ParamSpec.rare`.
    * host: one byte an element, row-major: whether a kernel of the host steps it; None where that is not known or makes
      no difference.
    * domains: the number of the domain over which each element's scale is taken; None where nothing is scaled.
    """

    names: tuple[str, ...]
    shape: Shape
    uses: tuple[str, ...]
    trainable: str
    held: bool
    stages: Stages
    initial: tuple[str, ...]
    bound: float
    gradient: Grid | None
    scaled: tuple[str, ...] = ()
    half_away: bool = False
    idle: str = ""
    host: bytes | None = None
    domains: tuple[int, ...] | None = None
    rare: bool = False

    @property
    def fqn(self) -> str:
        return self.names[0]


@dataclass(frozen=True)
class Buffer:
    """One buffer of a build. dtype: as the contract has it, `int64` and `bool` among them. Integer buffers count the
    steps' first forwards; others never change."""

    fqn: str
    shape: Shape
    dtype: str
    persistent: bool


@dataclass(frozen=True)
class Hyper:
    """The numbers of one param group, as python floats. momentum and nesterov are SGD's and Muon's, the betas Adam's,
    eps Adam's and Muon's."""

    lr: float
    weight_decay: float
    beta1: float
    beta2: float
    eps: float
    momentum: float
    nesterov: bool


@dataclass(frozen=True)
class Group:
    """A param group: its numbers, and the canonical names of its parameters in the order the optimizer was given.
    late: the optimizer has it from the program's `add_group` on."""

    hyper: Hyper
    names: tuple[str, ...]
    late: bool = False


@dataclass(frozen=True)
class Build:
    """What one `build` of the program makes. seed: number of the initialisation, so that no two builds start equal.
    stepper: of its optimizer, where that is another one than the run's (`Inputs.stepper`); else None. scale: what its
    loss scale starts at, where there is one (`Inputs.scale`). masters_undefined: between a load of the model alone and
    the refresh after it no master has a definite value."""

    seed: int
    parameters: tuple[Parameter, ...]
    buffers: tuple[Buffer, ...]
    groups: tuple[Group, ...]
    stepper: Stepper | None = None
    scale: float = 0.0
    masters_undefined: bool = False

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.seed, self.parameters, self.buffers, self.groups, self.stepper, self.scale))

    @cached_property
    def by_name(self) -> dict[str, Parameter]:
        """Canonical name → parameter."""
        return {parameter.fqn: parameter for parameter in self.parameters}


@dataclass(frozen=True)
class PreciseState:
    """A FusedAdam that keeps its state in dtypes of its own, and reads gradients that lie beside the parameter
    (`decoupled_grad`).

    exp_avg, exp_avg_sq: dtypes of the moments. master: dtype of masters that are a part of its state; None where it has
    none.
    """

    exp_avg: str
    exp_avg_sq: str
    master: str | None = None


@dataclass(frozen=True)
class Stepper:
    """Which code steps.

    * kind: `sgd`, `adam`, `adamw` or `muon`.
    * impl, host_impl: the implementation (`scenario.Optimizer.impl`) that steps what is on the device, and what is
      offloaded to the host.
    * device: where the first of them steps, `cpu` or `cuda`.
    * mixed: the two implementations round differently, so that it matters which of them steps an element.
    * capturable, tensor_lr: as the scenario's optimizer has them.
    * precise: the dtypes of a FusedAdam that keeps its state in dtypes of its own; None for every other optimizer.
    * make: `module:function` of a plugin that builds the optimizer instead, called with `(stepper, groups)`, where
      groups are torch's param groups with every number in them.
    """

    kind: str
    impl: str
    host_impl: str
    device: str = "cpu"
    mixed: bool = False
    capturable: bool = False
    tensor_lr: bool = False
    precise: PreciseState | None = None
    make: str = ""


@dataclass(frozen=True)
class Rule:
    """Something that both oracles do, each with code of its own, so that a mistake in one is not repeated in the other.

    twin, reference: `module:function` of the twin's code, on torch tensors, and of the reference's, on numpy arrays. A
    plugin names functions of its own. The signatures stand where a rule is used: `Clip`, `LossScale`.
    """

    twin: str
    reference: str


COUNTED = Rule("shardproof.oracle.scaler:count", "shardproof.reference.scaling:count")
"""The loss scale doubles after a window of steps without overflow, and halves at an overflow, unless a hysteresis
has some left to bear. torch.amp.GradScaler and Megatron-Core's DynamicGradScaler count like this."""

TORCH_CLIPPING = Rule("shardproof.oracle.clipping:as_torch", "shardproof.reference.clipping:as_torch")
"""Gradients are multiplied by min(1, bound / (norm + 1e-6)), each operation rounded to the norm's dtype, which is
that of the gradients: torch.nn.utils.clip_grad_norm_."""

DOUBLE_CLIPPING = Rule("shardproof.oracle.clipping:in_double", "shardproof.reference.clipping:in_double")
"""The same coefficient, computed in double precision, and multiplied in fp32 if it is below 1: Megatron-Core's
clip_grad_by_total_norm_fp32."""


@dataclass(frozen=True)
class LossScale:
    """A dynamic loss scale. It doubles after `window` steps without overflow, and halves at an overflow.

    * torch: the twin runs torch.amp.GradScaler itself, which unscales the gradients in their own dtype; else the scale
      is counted by `rule`, and unscaling is exact.
    * hysteresis: how many overflows, without growth between them, it takes to halve; None: every one halves, and no
      count is recorded.
    * minimum: the scale never goes below it.
    * rule: of the twin `f(scaler: CountedScaler, *, overflow: bool)`, of the reference `f(scaler: Scaler, rule:
      LossScale, overflow: bool)`; each counts one step.
    """

    torch: bool
    window: int = 2
    hysteresis: int | None = None
    minimum: float = 0.0
    rule: Rule = COUNTED


@dataclass(frozen=True)
class Clip:
    """Clipping by global norm.

    * bound: gradients with a larger norm are scaled down to it.
    * norm_dtype: the dtype of the norm that is reported.
    * rule: of the twin `f(gradients: dict[str, Tensor], norm: float, clip: Clip)`, which clips them in place or puts
      others there; of the reference `f(squares: float, dtypes: set[str], clip: Clip) -> (norm, coefficient or None)`,
      from the sum of the squares and the gradients' dtypes: the coefficient multiplies every gradient in fp32.
    """

    bound: float
    norm_dtype: str
    rule: Rule = TORCH_CLIPPING


@dataclass(frozen=True)
class Operation:
    """One operation of the program, without where it runs. build: index into `Inputs.builds` of the build it works on.
    checkpoint: number of the checkpoint that a save writes or a load reads; -1 for others."""

    index: int
    kind: str
    iteration: int
    build: int
    checkpoint: int


@dataclass(frozen=True)
class Inputs:
    """A scenario as an oracle sees it. See the module's text.

    * seed: of initial values and gradients.
    * device: where the oracle holds its tensors.
    * schedule: by its name in `shardproof.schedules`.
    * owner_groups: hyperparameters are recorded by parameter, not by group.
    * share: `module:function` of a library's own schedule: name, steps → the `Share` of each group's settings that
      is left. Empty for torch's, of which the rates that it set and what else it keeps are recorded too.
    * zero_gradients: a parameter that no forward of a step uses has a gradient of zeros; otherwise it has none.
    * masters_in_model: loading the model alone restores the masters too, and `reload_params` does nothing.
    * skips_frozen: parameters that are frozen are not in a checkpoint, and a load leaves those that then are.
    * load_refreshes: loading the model alone refreshes the masters from it.
    * run_keeps: what a param group keeps of the run that loads, in place of what the checkpoint has: keys of a group of
      torch.optim, such as `weight_decay`. With `lr`, a schedule goes on from the checkpoint's step at the run's rates;
      with `initial_lr`, it does so from its next step on; with `schedule`, it is not loaded, while the groups have the
      checkpoint's rates.
    """

    seed: int
    microbatches: int
    device: str
    operations: tuple[Operation, ...]
    builds: tuple[Build, ...]
    stepper: Stepper
    schedule: str = "none"
    scale: LossScale | None = None
    clip: Clip | None = None
    owner_groups: bool = False
    share: str = ""
    records_host: bool = False
    zero_gradients: bool = False
    masters_in_model: bool = False
    load_refreshes: bool = False
    skips_frozen: bool = False
    run_keeps: tuple[str, ...] = ()

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.seed, self.microbatches, self.device, self.operations, self.builds, self.stepper, self.scale))

    def stepper_of(self, build: Build) -> Stepper:
        """The optimizer implementation that steps the parameters of a build."""
        return build.stepper or self.stepper

    def groups_at(self, index: int) -> list[tuple[str, ...]]:
        """The names in each param group of the build that an operation of the program works on."""
        operation = next(operation for operation in self.operations if operation.index == index)
        return [group.names for group in self.builds[operation.build].groups]

    def has_masters(self, operation: Operation) -> bool:
        """Whether masters have a definite value after an operation."""
        return not (self.builds[operation.build].masters_undefined and operation.kind == "load_model_only")

    @property
    def steps_on_gpu(self) -> bool:
        """Whether a kernel of a real GPU steps some element: its bits are the twin's to say, on the same GPU."""
        return self.stepper.device == "cuda"


@dataclass(frozen=True)
class Placement:
    """How the reference's ranks share a scenario out. The twin never sees it.

    * models: name of each operation's model, whose specs say what tensor and expert parallelism cut.
    * meshes: the mesh of each operation.
    * sharding: `fully_shard` (whole rows of each parameter), `zero1` (equal parts of flat buckets) or `replicate`.
    * offload: the fraction of the optimizer's elements that live on the host.
    * grad_sync: reduce after the `last` microbatch or after `every` one; `uneven`: as `last`, where one rank alone has
      the microbatches behind the first.
    * checkpoint: one of the reference's formats.
    * expert_parallel: ranks that share the experts out.
    """

    models: tuple[str, ...]
    meshes: tuple[Mesh, ...]
    sharding: str
    offload: float
    grad_sync: str
    checkpoint: str
    expert_parallel: int

    @property
    def model(self) -> str:
        """The name of the model that has the parameters of all operations."""
        return max(self.models, key=len)


LATE_LR = 0.5
"""The learning rate of a group that joins the optimizer after its first step, as a share of the others'."""
