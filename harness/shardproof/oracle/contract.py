"""Contracts: what a system promises where the answer is a choice, with the source of each promise.

A contract turns a scenario into what an oracle may know of it (`shardproof.oracle.inputs`). `Contract` itself promises
what a plain torch training loop does: torch.optim on the parameters themselves, torch's GradScaler and clipping,
gradients accumulated and reduced in the dtype they were computed in. A system's own contract, in its package,
overrides the methods where its library promises something else, and lists the promises as `clauses`. For example,
Megatron-Core's overrides `kernels`, because its CPU offload steps part of the elements with another optimizer class.

A system is checked against its contract: storing, computing or reducing in another dtype is a mismatch, no variant.
No contract imports a library under test, nor the half of a system that runs on ranks: an oracle that shared
arithmetic with what it judges would prove nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from shardproof.axes_read import by_axes
from shardproof.grid import Grid, choose_grid, scale_for
from shardproof.loading import scenario_during
from shardproof.models import ModelSpec, ModuleSpec, NamedParam, ParamSpec, model_spec, storage_dtype
from shardproof.oracle.inputs import (
    LATE_LR,
    Buffer,
    Build,
    Clip,
    Group,
    Hyper,
    Inputs,
    LossScale,
    Operation,
    Parameter,
    Placement,
    PreciseState,
    Stages,
    Stepper,
)
from shardproof.program import Op, does, expand
from shardproof.scenario import DTypePolicy, Mesh, Optimizer, Scenario

if TYPE_CHECKING:
    from shardproof.observe.logical import Logical


KINDS = (ParamSpec("bulk", (1,)), ParamSpec("island", (1,), island=True))
"""A parameter of each kind that a dtype policy tells apart: one of the bulk, and one that stays in fp32."""


@dataclass(frozen=True)
class Clause:
    """A promise of the library, and the source of the promise: an upstream document, file or issue."""

    promise: str
    source: str


_KEPT = (*Hyper.__dataclass_fields__, "initial_lr", "schedule")
"""What the oracles keep of a run at a load; a contract may name more, which its settings alone have."""


class Contract:
    """The promises of a torch training loop; see the module's text.

    * clauses: the promises in words.
    * zero_gradients: a trainable parameter that no forward of a step uses has a gradient of zeros.
    * trainable_only: the optimizer holds trainable parameters only.
    * owner_groups: hyperparameters are recorded parameter by parameter, by the ranks that own some of it.
    * load_refreshes: loading the model alone also refreshes the masters from it, without a `reload_params`.
    * sharded_masters: there are separate masters under per-parameter sharding too.
    """

    clauses: ClassVar[Sequence[Clause]] = ()
    zero_gradients: ClassVar[bool] = False
    trainable_only: ClassVar[bool] = False
    owner_groups: ClassVar[bool] = False
    load_refreshes: ClassVar[bool] = False
    sharded_masters: ClassVar[bool] = False

    # What a system's own contract overrides. `mesh` is that of the session.

    def stages(self, scenario: Scenario, spec: ParamSpec, mesh: Mesh) -> Stages:
        """The dtype of every stage of one parameter."""
        policy = scenario.dtype
        storage = storage_dtype(policy, spec)
        compute = policy.param or storage
        reduce = policy.reduce or compute
        master = self.master(scenario, storage)
        stepped = master or storage
        return Stages(
            storage, compute, reduce, reduce, self.main_grad(scenario, storage, reduce, stepped), master,
            policy.exp_avg or self.moment(scenario, stepped), policy.exp_avg_sq or self.moment(scenario, stepped),
        )  # fmt: skip

    def master(self, scenario: Scenario, storage: str) -> str | None:
        """The dtype of the separate master of a parameter stored in `storage`; None where it has none."""
        asked = scenario.dtype.master
        return asked if asked and asked != storage else None

    def main_grad(self, scenario: Scenario, storage: str, reduce: str, stepped: str) -> str:
        """The dtype in which the optimizer reads a gradient that was reduced in `reduce`."""
        return stepped

    def moment(self, scenario: Scenario, stepped: str) -> str:
        """The dtype of moments for which the scenario asks for none."""
        return stepped

    def initial_dtypes(self, scenario: Scenario, spec: ParamSpec, mesh: Mesh) -> tuple[str, ...]:
        """The dtypes through which an initial value is cast in order. The last dtype is the stored one; an earlier
        dtype loses bits for good."""
        return (self.stages(scenario, spec, mesh).storage,)

    def initial_bound(self, scenario: Scenario, spec: ParamSpec) -> float:
        """The largest magnitude of initial values. What is larger is clipped to it before it is rounded."""
        return math.inf

    def buffer_dtype(self, scenario: Scenario, dtype: str, module: ModuleSpec, mesh: Mesh) -> str:
        """The dtype of a buffer that its module declares as `dtype`."""
        return dtype

    def at_build(self, scenario: Scenario, init_seed: int) -> Optimizer:
        """The hyperparameters that a build starts with: others at every later build, so that a load that does not
        restore them is seen."""
        return scenario.optimizer.at_build(init_seed)

    def loss_scale(self, scenario: Scenario) -> LossScale | None:
        """The dynamic loss scale that training runs under."""
        return LossScale(torch=True) if scenario.optimizer.loss_scale else None

    def clip(self, scenario: Scenario) -> Clip | None:
        """How gradients are clipped by their global norm."""
        bound = scenario.optimizer.clip
        return Clip(bound, "fp32") if bound else None

    def kernels(self, scenario: Scenario) -> tuple[str, str]:
        """The implementations that step what is on the device and what is on the host (`Optimizer.impl`)."""
        return scenario.optimizer.impl, scenario.optimizer.impl

    def precise_state(self, scenario: Scenario) -> PreciseState | None:
        """The dtypes of a FusedAdam that keeps state in dtypes of its own; None for every other optimizer."""
        return None

    def stepper_entry(self, scenario: Scenario) -> str:
        """`module:function` that builds the twin's optimizer, where a system has one that the oracle does not know;
        else empty."""
        return ""

    def masters_in_state(self, scenario: Scenario) -> bool:
        """Whether masters are a part of the optimizer's state, made of the parameter by its first step."""
        return False

    def masters_in_model(self, scenario: Scenario) -> bool:
        """Whether a checkpoint's model section holds the masters, so that loading it alone restores them."""
        return False

    def scaled_roles(self, scenario: Scenario, stages: Stages) -> tuple[str, ...]:
        """Which of a parameter's master and moments are kept divided by a scale of their own."""
        return ()

    def rounds_half_away(self, scenario: Scenario, stages: Stages) -> bool:
        """Whether the optimizer keeps the low 16 bits of a bf16 parameter's master as a signed integer, so that the
        parameter is the master rounded half away from zero."""
        return False

    def knows_host(self, scenario: Scenario) -> bool:
        """Whether it is known which elements are stepped on the host, so that ranks record it."""
        return False

    def host_elements(self, scenario: Scenario, mesh: Mesh) -> Mapping[str, bytes]:
        """Name → which elements are stepped on the host, one byte each, row-major. Empty where that is not known, or
        makes no difference."""
        return {}

    def scale_domains(self, scenario: Scenario, mesh: Mesh) -> Mapping[str, tuple[int, ...]]:
        """Name → for each element, row-major, the number of the domain over which its scale is taken. A number
        occurs in one parameter only. Empty where nothing is scaled."""
        return {}

    def reference_sharding(self, scenario: Scenario) -> str:
        """Which of the reference's own shardings stands for the scenario's: `fully_shard`, `zero1` or `replicate`.

        zero2 reduces gradients to the same values as zero1, and where a sharded model has masters apart, the reference
        keeps them in flat buffers.
        """
        if scenario.sharding == "zero2" or (scenario.sharding == "fully_shard" and scenario.dtype.master):
            return "zero1"
        return scenario.sharding

    def reference_checkpoint(self, scenario: Scenario) -> str:
        """Which of the reference's checkpoint formats stands for the scenario's."""
        return "sharded"

    def completed(self, truth: Logical, observed: Logical, scenario: Scenario, done: AbstractSet[int]) -> Logical:
        """What the oracle says of a scenario, with what only this system has added to it: other stored forms, marks,
        texts.

        Args:
            truth: what the twin says after every operation. observed: what the ranks held.
            done: indices of the operations that every rank completed.
        """
        return truth

    def skips_frozen(self, scenario: Scenario) -> bool:
        """Whether checkpoints leave out the parameters that are frozen, and loads do not touch those that then are."""
        return False

    def run_keeps(self, scenario: Scenario) -> tuple[str, ...]:
        """What a load leaves as the run has it, where run and checkpoint disagree: keys of a param group, such as
        `weight_decay`, and `schedule`. Everything else is the checkpoint's."""
        return ()

    def schedule_share(self, scenario: Scenario) -> str:
        """`module:function` of the schedule, where it is the library's own and not torch's: name, steps → the
        `Share` of each group's learning rate and weight decay that is left (`Inputs.share`)."""
        return ""

    def stores_extra_state(self, scenario: Scenario) -> bool:
        """Whether checkpoints hold the layers' extra state."""
        return True

    # What follows from them

    def resolve(self, scenario: Scenario) -> tuple[Inputs, Placement]:
        """What must come out of a scenario, and how the reference's ranks share it out."""
        ops = expand(scenario)
        numbers: dict[int, int] = {}
        operations: list[Operation] = []
        builds: list[Build] = []
        stepper = self._stepper(scenario)
        for op in ops:
            if op.kind == "build":
                numbers[op.init_seed] = len(builds)
                seen = scenario_during(scenario, op)
                own = self._stepper(seen)
                builds.append(replace(self.build(seen, op.mesh, op.init_seed), stepper=None if own == stepper else own))
            operations.append(Operation(op.index, op.kind, op.iteration, numbers[op.init_seed], op.checkpoint))
        ask = scenario.optimizer
        inputs = Inputs(
            seed=scenario.seed, microbatches=scenario.microbatches, device=twin_device(scenario),
            operations=tuple(operations), builds=tuple(builds), stepper=stepper,
            schedule=ask.schedule, scale=self.loss_scale(scenario),
            clip=self.clip(scenario),
            owner_groups=self.owner_groups, share=self.schedule_share(scenario), records_host=self.knows_host(scenario),
            zero_gradients=self.zero_gradients,
            masters_in_model=self.masters_in_model(scenario), load_refreshes=self.load_refreshes,
            skips_frozen=self.skips_frozen(scenario),
            run_keeps=tuple(n for n in self.run_keeps(scenario) if n in _KEPT),
        )  # fmt: skip
        placement = Placement(
            tuple(scenario_during(scenario, op).model for op in ops), tuple(op.mesh for op in ops),
            self.reference_sharding(scenario), scenario.offload.fraction,
            scenario.grad_sync, self.reference_checkpoint(scenario), scenario.expert_parallel,
        )  # fmt: skip
        return inputs, placement

    def parameter(self, scenario: Scenario, fqn: str, mesh: Mesh) -> Parameter:
        """One parameter of a build on a mesh, by its canonical name."""
        return next(p for p in self.parameters(scenario, mesh) if p.fqn == fqn)

    @by_axes
    def parameters(self, scenario: Scenario, mesh: Mesh) -> tuple[Parameter, ...]:
        """Every parameter of a build on a mesh, in the model's order."""
        model = model_spec(scenario.model)
        hosts, domains = self.host_elements(scenario, mesh), self.scale_domains(scenario, mesh)
        return tuple(
            self._parameter(scenario, model, named, mesh, hosts.get(named.fqn), domains.get(named.fqn))
            for named in model.unique_params
        )

    def has_masters(self, scenario: Scenario, op: Op) -> bool:
        """Whether masters have a definite value after an operation (`Build.masters_undefined`)."""
        stale = op.kind == "load_model_only" and not self.load_refreshes
        return not (stale and self.masters_in_state(scenario))

    def gradient_grid(self, scenario: Scenario, spec: ParamSpec, mesh: Mesh) -> Grid:
        """The exact grid that a parameter's gradients are drawn from on a mesh."""
        stage = self.stages(scenario, spec, mesh)
        alone = "lone" if spec.idle == "others" else "uneven" if scenario.grad_sync == "uneven" else ""
        return choose_grid(
            (stage.accumulate, stage.reduce, stage.main_grad), stage.compute,
            gradient_ranks(scenario, spec, mesh.dp), scenario.microbatches, alone, spec.partial and mesh.tp > 1,
            scale_for(scenario.optimizer.clip, str(scenario.dtype)),
        )  # fmt: skip

    def has_scales(self, scenario: Scenario) -> bool:
        """Whether some state is scaled, so that its bits depend on which elements lie together."""
        if scenario.optimizer.kind in ("sgd", "muon"):
            return False
        params = model_spec(scenario.model).unique_params
        return any(
            self.scaled_roles(scenario, self.stages(scenario, p.spec, scenario.mesh))
            for p in params
            if p.spec.trainable == "yes"
        )

    def mixes_kernels(self, scenario: Scenario) -> bool:
        """Whether host and device step with kernels that round differently, so that it matters which of them an
        element has. They are two implementations, or one on a CPU and on a GPU."""
        device, host = self.kernels(scenario)
        return device != host or (scenario.device == "cuda" and 0 < scenario.offload.fraction < 1)

    def stepped_dtype(self, scenario: Scenario, spec: ParamSpec) -> str:
        """The dtype of the tensor that the optimizer steps on."""
        storage = storage_dtype(scenario.dtype, spec)
        return self.master(scenario, storage) or storage

    def calculates_in(self, scenario: Scenario, spec: ParamSpec) -> str:
        """The dtype in which the optimizer's kernel calculates with what it steps, whatever dtype that is stored in."""
        return self.stepped_dtype(scenario, spec)

    def _parameter(
        self, scenario: Scenario, model: ModelSpec, named: NamedParam, mesh: Mesh, host: bytes | None,
        domains: tuple[int, ...] | None,
    ) -> Parameter:  # fmt: skip
        spec, stage = named.spec, self.stages(scenario, named.spec, mesh)
        uses = model.uses(named.fqn)
        aliases = tuple(p.fqn for p in model.params if p.spec.tied_to == named.fqn)
        return Parameter(
            (named.fqn, *aliases), spec.shape, uses, spec.trainable,
            spec.trainable == "yes" or not self.trainable_only, stage,
            self.initial_dtypes(scenario, spec, mesh), self.initial_bound(scenario, spec),
            self.gradient_grid(scenario, spec, mesh) if uses or self.zero_gradients else None,
            self.scaled_roles(scenario, stage), self.rounds_half_away(scenario, stage), spec.idle, host, domains,
            spec.rare,
        )  # fmt: skip

    @by_axes
    def build(self, scenario: Scenario, mesh: Mesh, init_seed: int) -> Build:
        """What a build on a mesh makes. init_seed: `Op.init_seed`."""
        parameters = self.parameters(scenario, mesh)
        return Build(
            init_seed, parameters, self._buffers(scenario, mesh), self._groups(scenario, mesh, init_seed),
            scale=self.at_build(scenario, init_seed).loss_scale,
            masters_undefined=self.masters_in_state(scenario) and not self.load_refreshes,
        )  # fmt: skip

    def _buffers(self, scenario: Scenario, mesh: Mesh) -> tuple[Buffer, ...]:
        return tuple(
            Buffer(f"{m.path}.{b.name}", b.shape, self.buffer_dtype(scenario, b.dtype, m, mesh), b.persistent)
            for m in model_spec(scenario.model).modules
            for b in m.buffers
        )

    def _groups(self, scenario: Scenario, mesh: Mesh, init_seed: int) -> tuple[Group, ...]:
        model, ask = model_spec(scenario.model), self.at_build(scenario, init_seed)
        held = {p.fqn for p in self.parameters(scenario, mesh) if p.held}
        common = Hyper(ask.lr, ask.weight_decay, ask.beta1, ask.beta2, ask.eps, ask.momentum, ask.nesterov)
        params = [p for p in model.unique_params if p.fqn in held]
        late: list[Group] = []
        if does(scenario, "add_group"):
            names = tuple(p.fqn for p in params if p.spec.trainable == "later")
            late = [Group(replace(common, lr=ask.lr * LATE_LR), names, late=True)]
            params = [p for p in params if p.spec.trainable != "later"]
        if ask.groups == "one":
            return (Group(common, tuple(p.fqn for p in params)), *late)
        groups = [
            Group(
                replace(
                    common, lr=ask.lr * own.lr_scale,
                    weight_decay=ask.weight_decay if own.weight_decay is None else own.weight_decay,
                ),
                tuple(p.fqn for p in params if p.spec.group == index),
            )
            for index, own in enumerate(model.groups)
        ]  # fmt: skip
        return (*groups, *late)

    def _stepper(self, scenario: Scenario) -> Stepper:
        device, host = self.kernels(scenario)
        ask = scenario.optimizer
        return Stepper(
            ask.kind, device, host, scenario.device if scenario.offload.fraction < 1 else "cpu",
            self.mixes_kernels(scenario), ask.capturable, ask.tensor_lr, self.precise_state(scenario),
            self.stepper_entry(scenario),
        )  # fmt: skip


OF_THE_RUN = (
    "loss_scale", "clip", "kernels", "mixes_kernels", "stepper_entry", "masters_in_model", "knows_host",
    "reference_sharding", "reference_checkpoint",
)  # fmt: skip
"""Methods of a contract whose answer holds for all operations of a run, from the first to the last."""


def gradient_ranks(scenario: Scenario, spec: ParamSpec, dp: int) -> int:
    """How many ranks contribute to a parameter's gradient, of `dp` data-parallel ones. Ranks that share the experts
    out compute one contribution between them."""
    return dp // scenario.expert_parallel if spec.ep_dim is not None else dp


def twin_device(scenario: Scenario) -> str:
    """Where the twin holds its tensors: on the host as soon as offload leaves some of them there, else on the
    device."""
    return "cpu" if scenario.offload.fraction else scenario.device


def steps_on_gpu(scenario: Scenario) -> bool:
    """Whether a kernel of a real GPU steps some element. Offloaded elements are stepped by torch's kernel for the
    CPU."""
    return scenario.device == "cuda" and scenario.offload.fraction < 1


def half_dtype(policy: DTypePolicy) -> str | None:
    """The half-precision dtype that a policy stores the bulk of a model in; None for fp32."""
    return {"bf16": "bf16", "fp16": "fp16", "mixed": "bf16", "mixed_fp16": "fp16"}.get(policy.storage)
