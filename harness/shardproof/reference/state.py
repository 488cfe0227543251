"""The training state of all simulated ranks: flat arrays with the leading axes (dp_replicate, dp_shard).

A `Shards` holds everything of one storage dtype on one tensor-parallel coordinate; R, S are the mesh's replicate
and shard sizes, n the flat buffer's length, m the elements each rank owns. Ranks never see each other's rows
except through the reductions and gathers of `trainer` and the loads and saves of `checkpoint`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from shardproof.models import ModelSpec, NamedParam
from shardproof.observe.generators import SEED_OF_A_BUILD
from shardproof.oracle.inputs import Buffer, Inputs, Operation, Parameter, Placement, Stepper
from shardproof.reference import fused_adam
from shardproof.reference.blueprint import Blueprint, blueprints, initial_buffer, offloaded, values_of
from shardproof.reference.chained import chain_of
from shardproof.reference.extra_state import Opaque, fresh
from shardproof.reference.kernels import Hyper
from shardproof.reference.numerics import DTYPE, Array
from shardproof.reference.placement import Catalogue, Index
from shardproof.reference.quantised import HISTORY, Weights, empty, greatest, quantise, recipes, scales_for
from shardproof.reference.schedule import Group, Schedule, begin
from shardproof.reference.streams import Streams
from shardproof.reference.streams import fresh as seeded
from shardproof.scenario import Mesh


def moment_roles(stepper: Stepper, momentum: float) -> tuple[str, ...]:
    """The roles of the moments that an optimizer keeps; FusedSGD has momentum buffers without momentum."""
    if stepper.kind == "sgd":
        return ("momentum",) if momentum or stepper.impl == "multi_tensor" else ()
    return ("momentum",) if stepper.kind == "muon" else ("exp_avg", "exp_avg_sq")


@dataclass(eq=False)
class Shards:
    """Parameters that pass through the same dtypes, on one tensor-parallel coordinate.

    * blueprint: what no step changes.
    * stepped: what the optimizer steps on, the master or the storage itself, (R, S, m).
    * model: the replicated parameters of flat buffers, (R, S, n); None under `fully_shard`, where `stepped` is the
      storage.
    * moments: role → (R, S, m); the rows of parameters without a step mean nothing.
    * offloaded: which elements live on the host, (S, m); host: the copies they are stepped on, (R, S, m).
    * scaled: role → (as stored, scale), (R, S, m) each, of state that FusedAdam scales: `moments`, or `stepped` for a
      master, is then what they stand for, in fp32.
    * weights: what of them is kept in fp8 too; None where nothing is.
    * computed: parameters as the last forward saw them, (R, S, n).
    * accumulated: gradients before reduction, (R, S, n).
    * reduced, main_grad: gradients after reduction, and as the optimizer sees them, (R, S, m).
    """

    blueprint: Blueprint
    stepped: Array
    model: Array | None = None
    moments: dict[str, Array] = field(default_factory=dict)
    offloaded: Array | None = None
    host: Array | None = None
    scaled: dict[str, tuple[Array, Array]] = field(default_factory=dict)
    weights: Weights | None = None
    computed: Array | None = None
    accumulated: Array | None = None
    reduced: Array | None = None
    main_grad: Array | None = None

    def __post_init__(self) -> None:
        self.layout, self.alike, self.tp_index = self.blueprint.layout, self.blueprint.alike, self.blueprint.tp_index
        self.stages = self.alike.stages

    def settle(self, role: str) -> None:
        """Store what an update or a load left of a scaled state, and let that be what it stands for."""
        values = self.stepped if role == "master" else self.moments[role]
        dtype = DTYPE[self.stages.master or "" if role == "master" else self.stages.moment(role)]
        assert self.blueprint.domains is not None
        numbers = np.repeat(self.blueprint.domains[None], len(values), axis=0).ravel()
        stored, scale = fused_adam.scaled(values.ravel(), dtype, numbers)
        self.scaled[role] = stored.reshape(values.shape), scale.reshape(values.shape)
        settled = fused_adam.unscaled(stored, scale).reshape(values.shape)
        if role == "master":
            self.stepped = settled
        else:
            self.moments[role] = settled

    @property
    def storage_shard(self) -> Array:
        """Each rank's own shard of the parameters in storage dtype, (R, S, m)."""
        if self.model is None:
            return self.stepped
        own: Array = self.model[:, self.layout.own_row, self.layout.order]
        return own

    def gathered(self, shards: Array) -> Array:
        """All-gather over the shard ranks: (R, S, m) in shard order → (R, S, n) in buffer order."""
        replicas, ranks, _ = shards.shape
        full: Array = shards.reshape(replicas, 1, -1)[:, :, self.layout.gathering]
        return full.repeat(ranks, axis=1)


@dataclass
class Scaler:
    """The scale, the steps without overflow since it last changed, and the overflows that it bears before it shrinks
    (None: it shrinks at the first, as torch.amp.GradScaler's)."""

    scale: float
    growth_tracker: int = 0
    hysteresis_tracker: int | None = None


class Session:
    """Model, optimizer, schedule and scaler of all ranks, freshly built.

    Attributes beside the constructor's: `shards` (all storage dtypes of tensor-parallel coordinate 0, then 1 …),
    `groups`, `steps` (canonical name → steps taken; absent: no optimizer state), `trainable` (canonical names),
    `with_gradient` (the trainable parameters that some forward uses),
    `buffers` and `opaque` (equal on every rank), `streams` (the random generators of each), `recipes` and `histories`
    (of the weights that are kept in fp8, by name), `installed` (the groups' parameters in the order the optimizer holds
    them: fp32 storage first, then those with a master), `index_map` (name → group and position in `installed`),
    `held` (the parameters that the optimizer holds), `chain` (those of each of several optimizers), `moment_roles` (of
    the moments that it keeps),
    `places` (where the optimizer's own state lies, beside what is offloaded: `device`, or `host` where a load left it;
    a kernel takes tensors of one place only).
    """

    def __init__(
        self, inputs: Inputs, placement: Placement, model: ModelSpec, catalogue: Catalogue, operation: Operation
    ) -> None:
        self.inputs, self.placement, self.model, self.catalogue = inputs, placement, model, catalogue
        self.of_build = inputs.builds[operation.build]
        mesh = placement.meshes[operation.index]
        self.mesh = Mesh(mesh.dp, 1, mesh.tp) if placement.sharding == "replicate" else mesh
        self.held = {p.fqn for p in self.of_build.parameters if p.held}
        self.moment_roles = moment_roles(inputs.stepper_of(self.of_build), self.of_build.groups[0].hyper.momentum)
        self.chain = chain_of(model)
        self.shards: list[Shards] = []
        self.groups: list[Group] = []
        self.buffers: dict[str, Array] = {}
        self.opaque: Opaque = {}
        self.streams: Streams = {}
        self.recipes = dict(recipes(model))
        self.histories = {name: np.zeros(HISTORY, np.float32) for name in self.recipes}
        self.steps: dict[str, int] = {}
        self.scaler: Scaler | None = None
        self.schedule: Schedule | None = None
        self.places = dict.fromkeys(("step", "moments"), "device")
        self._set_trainable({p.fqn for p in self.of_build.parameters if p.trainable == "yes"})

    def build(self) -> None:
        """Initialise everything from the seeds; needs no checkpoint and leaves nothing undefined."""
        self._build_shards()
        self.groups += self._made_of(late=False)
        self.installed = [list(group.names) for group in self.groups]
        self.reinstall()
        self.index_map = self.build_index_map()
        if self.placement.offload:
            self._place_on_host()
            self.refresh_host_copies()
        self.buffers = {buffer.fqn: self.initial_buffer(buffer) for buffer in self.of_build.buffers}
        self.opaque = fresh(self.model)
        self.streams = self.seed_streams()
        for shards in self.shards:
            mask = self.catalogue.belongs_to(self.recipes, shards.layout.shard_element)
            shards.weights = empty(shards.stepped.shape, mask) if mask.any() else None
        self.quantise()
        if self.inputs.scale:
            self.scaler = Scaler(self.of_build.scale, 0, self.inputs.scale.hysteresis)
        if self.inputs.schedule != "none":
            self.schedule = begin(self.inputs.schedule, self.groups, self.inputs.share)

    @property
    def flat(self) -> bool:
        """Whether parameters lie whole in flat buffers, of which each rank steps a part (`replicate`: all of it)."""
        return self.placement.sharding != "fully_shard"

    def parameter(self, fqn: str) -> Parameter:
        """What the inputs say of a parameter, by its canonical name."""
        return self.of_build.by_name[fqn]

    def storage(self, param: NamedParam) -> str:
        """The dtype in which a parameter is stored."""
        return self.parameter(param.fqn).stages.storage

    def _build_shards(self) -> None:
        for own in blueprints(self.catalogue, self.of_build, self.mesh, self.flat):
            shards = Shards(own, np.empty(0))
            self.place_params(shards, own.initial, own.layout.shard_element)
            self.refresh_masters(shards)
            self.shards.append(shards)

    def scaled_roles(self, shards: Shards) -> tuple[str, ...]:
        """Which of a storage dtype's master and moments FusedAdam scales."""
        return shards.alike.scaled

    def working_dtype(self, shards: Shards, role: str) -> str:
        """The dtype that a master or moment is calculated with: that of its stage, or fp32 where it is scaled."""
        if role in self.scaled_roles(shards):
            return "fp32"
        return shards.stages.stepped if role == "master" else shards.stages.moment(role)

    def settle(self, *, masters: bool) -> None:
        """Store the scaled masters, or the scaled moments that there are."""
        for shards in self.shards:
            for role in self.scaled_roles(shards):
                if masters if role == "master" else not masters and role in shards.moments:
                    shards.settle(role)

    def place_params(self, shards: Shards, logical: Array, owned: Index) -> None:
        """Set the storage parameters of every rank from values over the catalogue, in storage dtype.

        Under `fully_shard` each rank takes the elements `owned`, (S, m); in flat buffers all.

        Masters stay as they are; without one, the optimizer steps on the parameters themselves.
        """
        if self.flat:
            shards.model = self.spread(logical[shards.layout.element], per_shard=False)
            if shards.stages.master is None:
                self.refresh_masters(shards)
        else:
            shards.stepped = self.spread(logical[owned], per_shard=True)

    def spread(self, values: Array, per_shard: bool) -> Array:
        """For every rank: (n,) → (R, S, n), or with `per_shard` (S, m) → (R, S, m)."""
        replicas, ranks = self.mesh.dp_replicate, self.mesh.dp_shard
        if per_shard:
            return values[None].repeat(replicas, axis=0)
        return values[None].repeat(replicas * ranks, axis=0).reshape(replicas, ranks, -1)

    def refresh_masters(self, shards: Shards) -> None:
        """Let the optimizer step on the model's parameters as they are now: widen them into the masters."""
        if shards.model is not None:
            shards.stepped = shards.storage_shard.astype(DTYPE[self.working_dtype(shards, "master")])

    def refresh_host_copies(self) -> None:
        """Copy what the optimizer steps on to the host."""
        for shards in self.shards:
            if shards.offloaded is not None:
                shards.host = shards.stepped.copy()

    def reload_params(self) -> None:
        """Refresh masters and host copies from the model's parameters."""
        for shards in self.shards:
            self.refresh_masters(shards)
        if self.steps:
            self.settle(masters=True)
        self.refresh_host_copies()

    def replace_params(self, number: int) -> None:
        """Give the parameters other values, as pretrained weights are copied in; masters stay as they are.

        Args:
            number: the values are those of the build of this number.
        """
        for shards in self.shards:
            self.place_params(shards, values_of(shards.blueprint, number), shards.layout.shard_element)
        self.refresh_host_copies()

    def stored_names(self) -> list[str]:
        """The parameters that checkpoints have, or give values to."""
        names = [param.fqn for param in self.catalogue.params]
        return [name for name in names if name in self.trainable or not self.inputs.skips_frozen]

    def unfreeze(self) -> None:
        """Make the parameters that the model marks `later` trainable."""
        self._set_trainable({p.fqn for p in self.of_build.parameters if p.trainable != "no"})

    def add_group(self) -> None:
        """Unfreeze them, and give them to the optimizer in groups of their own."""
        self.unfreeze()
        for group in self._made_of(late=True):
            self.groups.append(group)
            self.installed.append(list(group.names))
        self.reinstall()
        self.index_map = self.build_index_map()
        if self.placement.offload:
            self._place_on_host()
            self.refresh_host_copies()

    def _set_trainable(self, names: set[str]) -> None:
        self.trainable = names
        self.with_gradient = [
            p for p in self.catalogue.params if p.fqn in names and self.parameter(p.fqn).gradient is not None
        ]

    def _made_of(self, *, late: bool) -> Iterator[Group]:
        """The param groups that the optimizer is built with; with `late`, the groups added by `add_param_group`
        afterwards."""
        stepper = self.inputs.stepper_of(self.of_build)
        for group in self.of_build.groups:
            own = group.hyper
            hyper = Hyper(
                stepper.kind, stepper.impl, own.lr, own.weight_decay, own.beta1, own.beta2, own.eps, own.momentum,
                own.nesterov,
            )  # fmt: skip
            if group.late == late:
                yield Group(hyper, group.names, hyper.lr)

    def reinstall(self) -> None:
        """Put each group into the order the optimizer holds it in: parameters stepped on directly, then masters."""
        has_master = {p.fqn: p.stages.master is not None for p in self.of_build.parameters}
        for names in self.installed:
            names.sort(key=has_master.__getitem__)

    def build_index_map(self) -> dict[str, tuple[int, int]]:
        """Name → (group, position) of its state, from the order that is installed now."""
        return {
            name: (group, position) for group, names in enumerate(self.installed) for position, name in enumerate(names)
        }

    def state_owner(self, name: str) -> str:
        """The parameter whose optimizer state a checkpoint files under `name`: what the index map points at."""
        if name not in self.index_map:
            return name  # the optimizer does not hold it
        group, position = self.index_map[name]
        return self.installed[group][position]

    def _place_on_host(self) -> None:
        for tp_index in range(self.mesh.tp):
            column = [s for s in self.shards if s.tp_index == tp_index]
            groups = tuple(map(tuple, self.installed))
            masks = offloaded(tuple(s.layout for s in column), groups, self.placement.offload)
            for shards, mask in zip(column, masks, strict=True):
                shards.offloaded = mask

    def quantise(self) -> None:
        """Make the weights in fp8 anew of what the optimizer steps on."""
        for name, recipe in self.recipes.items():
            history = self.histories[name]
            latest = np.float32(0)
            for shards in self.shards:
                own = self.owns(name, shards)
                amax = self.amax(name, shards.tp_index)
                latest = np.maximum(latest, amax.max())
                if shards.weights is not None:
                    scales = scales_for(amax if recipe == "current" else np.full(amax.shape, history.max()))
                    scale = np.broadcast_to(scales[:, None, None], shards.stepped.shape)[:, own]
                    shards.weights.data[:, own] = quantise(shards.stepped[:, own], scale)
                    shards.weights.inverse[:, own] = np.float32(1) / scale
            self.histories[name] = np.append(history[1:], latest)

    def amax(self, name: str, tp_index: int) -> Array:
        """The greatest magnitude of a weight on all ranks that share it with those of a tensor-parallel coordinate:
        all ranks of a replica, fp32, (R,)."""
        found = np.zeros(self.mesh.dp_replicate, np.float32)
        for shards in self.shards:
            found = np.maximum(found, greatest(shards.stepped, self.owns(name, shards)))
        return found

    def owns(self, name: str, shards: Shards) -> Array:
        """Which elements of what ranks own are a parameter's, (S, m)."""
        return self.catalogue.belongs_to({name}, shards.layout.shard_element)

    def seed_streams(self) -> Streams:
        """The random generators of every rank, as a training script seeds them."""
        seed = self.inputs.seed % 2**31 + SEED_OF_A_BUILD * self.of_build.seed
        return seeded(self.model, self.mesh, self.placement.expert_parallel, seed)

    def initial_buffer(self, buffer: Buffer) -> Array:
        """A module's buffer as its constructor makes it, in its own dtype and shape."""
        return initial_buffer(buffer, self.inputs.seed, self.of_build.seed)


def mesh_rank(mesh: Mesh, replica: int, shard: int, tp_index: int) -> int:
    """The global rank at a mesh coordinate, row-major."""
    return (replica * mesh.dp_shard + shard) * mesh.tp + tp_index
