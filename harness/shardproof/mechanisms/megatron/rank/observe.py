"""What a Megatron-Core rank holds, read without changing it.

Which part of which parameter a rank owns is read from two things: the optimizer's groups of model parameters and of
shards, which are paired by position, and the address of a shard inside its model parameter's memory. It is never read
from the library's index maps, which are under test. For example, a shard that begins 64 bytes after its bf16 parameter
is recorded as elements from 32 on, whatever the map says.

*Verifies* nothing by itself. *Does not read* the gradient and parameter buffers' padding, nor random generators of the
device.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, Protocol

import torch

from shardproof.emulation import cuda
from shardproof.emulation.used_symbols import used_symbols
from shardproof.layout import interval_boxes
from shardproof.mechanisms.megatron.rank.state import TrainState, fused_shape, local_box
from shardproof.mechanisms.probe_module import DTYPE_NAME, TORCH_DTYPE, Probe, local_part, tensor_bytes
from shardproof.models import NamedParam, ParamSpec
from shardproof.observe.numbers import number_of, numbers_of
from shardproof.observe.record import LIVE, Record, whole
from shardproof.observe.settings import SETTING, settings_of
from shardproof.oracle.contract import Contract
from shardproof.program import Op

STATE_ROLES = {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq", "momentum_buffer": "momentum"}


@dataclass(frozen=True)
class Owned:
    """A part of a parameter that this rank's optimizer steps.

    * fqn: empty where the model has no such parameter.
    * start, length: flat interval of this rank's local parameter, in elements; it lies beyond the parameter's end where
      the shard is not in the parameter's memory.
    * held: what Megatron's optimizer gave its inner optimizer, a master or the shard of the parameter itself.
    * stepped: what is really stepped: `held`, or the copy on the host, or in fp32, that a hybrid optimizer made of it.
    * separate: whether `held` has memory of its own.
    * state, scales, inner_group: of the optimizer that steps it.
    * group: the param group that the schedule writes to.
    """

    fqn: str
    start: int
    length: int
    held: Any
    stepped: Any
    separate: bool
    state: Mapping[str, Any] = field(default_factory=dict)
    group: Mapping[str, Any] = field(default_factory=dict)
    inner_group: Mapping[str, Any] = field(default_factory=dict)
    scales: Mapping[str, Any] = field(default_factory=dict)


class Owner(Protocol):
    """What says which parts a rank has, where the optimizer's groups of shards do not: under Megatron-FSDP."""

    def parts(self) -> Iterator[Owned]:
        """The slices of parameters that this rank's optimizer updates, with the optimizer state for each."""

    def model_part(self, fqn: str) -> tuple[torch.Tensor, int]:
        """What this rank keeps of the parameter that forwards compute with, flattened, and the element of the local
        parameter at which that begins."""


def observe(
    state: TrainState,
    op: Op,
    probe: Probe,
    gradients: Mapping[int, torch.Tensor],
    norm: float | None,
    contract: Contract,
    owner: Owner | None = None,
) -> Iterator[Record]:
    """Every record of this rank after an operation.

    gradients: as the optimizers were about to see them, by the identity of what is stepped. norm: the gradient norm
    that the step reported.
    """
    touched = used_symbols()  # before reading adds to them
    recorder = _Recorder(state, op, probe, contract)
    parts = list(owner.parts() if owner else owned_parts(state))
    known = {named.fqn for named in state.spec.params}
    owned = [part for part in parts if part.fqn in known]
    for index, part in enumerate(part for part in parts if part.fqn not in known):
        yield recorder.whole("param", part.fqn or f"stepped, but not the model's: {index}", part.held)
    yield from recorder.sharded_model(owner) if owner else recorder.model(owned)
    yield from recorder.optimizer(owned)
    yield from recorder.schedule()
    if op.kind in ("step", "overflow"):
        yield from recorder.compute()
    if op.kind == "step":
        yield from recorder.gradients(owned, gradients)
        if norm is not None:
            yield recorder.number("norm", "total_norm", norm)
    text = "\n".join(touched).encode()
    yield whole(op.index, state.rank, "emulated", "symbols", "utf8", (len(text),), text)


def owned_parts(state: TrainState) -> Iterator[Owned]:
    """What this rank's optimizers step, link by link of the chain."""
    names = {id(parameter): name for name, parameter in state.root.named_parameters()}
    for link in state.links:
        if link.optimizer is None:
            continue
        outer = {id(p): group for group in link.optimizer.param_groups for p in group["params"]}
        leaves = getattr(link.optimizer, "sub_optimizers", [link.optimizer])
        inner = {id(p): (leaf, group) for leaf in leaves for group in leaf.param_groups for p in group["params"]}
        copies = getattr(link.optimizer, "param_to_inner_param", {})
        for model, held, start, length in _pairs(link):
            stepped = copies.get(held, held)
            leaf, inner_group = inner.get(id(stepped), (None, {}))
            kept = leaf.state.get(stepped, {}) if leaf is not None else {}
            # FusedAdam counts steps in the group; one that a load left in the state is not its count
            if not isinstance(leaf, torch.optim.Adam):
                kept = {name: value for name, value in kept.items() if name != "step"}
            separate = held.data_ptr() != model.data_ptr() + start * model.element_size()
            yield Owned(
                names.get(id(model), ""), start, length, held, stepped, separate,
                kept, outer.get(id(held), {}), inner_group, getattr(leaf, "_scales", {}).get(stepped, {}),
            )  # fmt: skip


def _pairs(link: Any) -> Iterator[tuple[Any, Any, int, int]]:
    """`(model parameter, what the inner optimizer holds for it, start, length)`."""
    if hasattr(link, "shard_fp32_groups"):
        for models, shards in zip(link.model_fp32_groups, link.shard_fp32_groups, strict=True):
            for model, shard in zip(models, shards, strict=True):
                yield model, shard, *_interval(model, shard)
        halves = (link.model_float16_groups, link.shard_float16_groups, link.shard_fp32_from_float16_groups)
        for models, shards, masters in zip(*halves, strict=True):
            for model, shard, master in zip(models, shards, masters, strict=True):
                yield model, shard if master is None else master, *_interval(model, shard)
    elif hasattr(link, "float16_groups"):
        for models, masters in zip(link.float16_groups, link.fp32_from_float16_groups, strict=True):
            for model, master in zip(models, masters, strict=True):
                yield model, master, 0, model.numel()
        for models in link.fp32_from_fp32_groups:
            for model in models:
                yield model, model, 0, model.numel()
    else:
        for group in link.optimizer.param_groups:
            for model in group["params"]:
                yield model, model, 0, model.numel()


def _interval(model: torch.Tensor, shard: torch.Tensor) -> tuple[int, int]:
    """Where a shard lies in its model parameter, from their addresses. A shard that lies elsewhere is put beyond the
    parameter's end, where assembly reports it."""
    start = (shard.data_ptr() - model.data_ptr()) // model.element_size()
    inside = start >= 0 and start + shard.numel() <= model.numel()
    return start if inside else model.numel(), shard.numel()


@dataclass(frozen=True)
class _Recorder:
    """Makes the records of one rank after one operation."""

    state: TrainState
    op: Op
    probe: Probe
    contract: Contract

    def model(self, owned: list[Owned]) -> Iterator[Record]:
        """Parameters and buffers.

        With overlap_param_gather, the parts of a parameter that other ranks own are old until the next forward gathers
        them. Then each rank records only the part that it owns.
        """
        late = "overlap_param_gather" in self.state.scenario.options
        for named in self.state.spec.params:
            parameter = self.state.root.get_parameter(named.fqn)
            if not (late and parameter.requires_grad):
                yield self.boxed("param", named, parameter)
                continue
            flat = parameter.detach().reshape(-1)
            mine = [part for part in owned if part.fqn == (named.spec.tied_to or named.fqn)]
            for part in mine:
                yield from self.flat("param", named, part.start, flat[part.start : part.start + part.length])
            if not mine:
                yield self.nothing("param", named, DTYPE_NAME[parameter.dtype])
        for fqn, _ in self.state.spec.buffers():
            yield self.whole("buffer", fqn, self.state.root.get_buffer(fqn))

    def sharded_model(self, owner: Owner) -> Iterator[Record]:
        """Parameters and buffers of a model whose parameters may be sharded too."""
        for named in self.state.spec.params:
            flat, start = owner.model_part(named.spec.tied_to or named.fqn)
            if flat.numel():
                yield from self.flat("param", named, start, flat)
            else:
                yield self.nothing("param", named, DTYPE_NAME[flat.dtype])
        for fqn, _ in self.state.spec.buffers():
            yield self.whole("buffer", fqn, self.state.root.get_buffer(fqn))

    def optimizer(self, owned: list[Owned]) -> Iterator[Record]:
        """Masters, moments, steps and hyperparameters of what this rank owns."""
        for part in owned:
            named = self.state.spec.param(part.fqn)
            for role, tensor in self._tensors(named, part):
                yield from self._part(role, named, part, tensor)
            yield from self._scales(named, part)
            step = number_of(part.state.get("step", part.inner_group.get("step")))
            if step is not None:
                yield self.whole("step", part.fqn, torch.as_tensor(step, dtype=torch.float32))
            for name, number in numbers_of(part.group):
                yield self.number("hyperparameter", f"{part.fqn}.{name}", number)
            for name, line in settings_of(part.group):
                yield self.text(SETTING, f"{part.fqn}.{name}", line)
        yield from self._copies(owned)
        if self.contract.has_masters(self.state.scenario, self.op):
            yield from self._rest("master", {part.fqn for part in owned})

    def _rest(self, role: str, owned: set[str]) -> Iterator[Record]:
        """Empty records for the parameters of which this rank owns no element, so that assembly can tell an empty shard
        from a missing record."""
        for named in self.state.spec.unique_params:
            if named.spec.trainable == "yes" and named.fqn not in owned:
                declared = self.probe.parameters[named.fqn].stages
                if role == "master" and self._is_scaled(named, role) and not self.state.iteration:
                    continue  # it is created by the first step
                dtype = {"master": declared.master, "grad": declared.main_grad}[role]
                if dtype is not None:
                    yield self.nothing(role, named, dtype)

    def _has_master(self, named: NamedParam) -> bool:
        return self.probe.parameters[named.fqn].stages.master is not None

    def _tensors(self, named: NamedParam, part: Owned) -> Iterator[tuple[str, torch.Tensor]]:
        if self._has_master(named) and self.contract.has_masters(self.state.scenario, self.op):
            yield from (("master", master) for master in self._masters(named, part))
        for name, role in STATE_ROLES.items():
            if torch.is_tensor(part.state.get(name)):  # a load may have put something else there: then it is missing
                yield role, part.state[name]
        if self.contract.knows_host(self.state.scenario):
            stepped = local_part(part.stepped)
            on_device = stepped.is_cuda if self.state.scenario.device == "cuda" else cuda.is_device(stepped)
            yield "host", torch.full(local_part(part.held).shape, not on_device)

    def _scales(self, named: NamedParam, part: Owned) -> Iterator[Record]:
        """The scale of every scaled state that there is, for each element."""
        names = {"master": "master_param"}
        for role in self.probe.parameters[named.fqn].scaled:
            name = names.get(role, role)
            if part.state.get(name) is None or (
                role == "master" and not self.contract.has_masters(self.state.scenario, self.op)
            ):
                continue
            scale = part.scales[name].cpu().expand(part.state[name].numel())
            for record in self._part("quant_scale", named, part, scale.reshape(part.state[name].shape)):
                yield record._replace(fqn=f"{named.fqn}.{role}")

    def _is_scaled(self, named: NamedParam, role: str) -> bool:
        return role in self.probe.parameters[named.fqn].scaled

    def _masters(self, named: NamedParam, part: Owned) -> Iterator[torch.Tensor]:
        """Every copy that the optimizer has of a master; all must agree.

        FusedAdam makes its own master of the parameter at its first step. Until then the parameter, widened, is what
        its master will be, unless the master will be scaled: its scale is not known yet.
        """
        if part.separate:
            yield part.held
        if part.stepped is not part.held:
            yield part.stepped
        kept = part.state.get("master_param")
        if kept is not None and kept is not part.stepped:
            yield _joined(part.held, kept) if kept.dtype == torch.int16 else kept
        elif not part.separate and part.stepped is part.held and not self._is_scaled(named, "master"):
            yield part.held.detach().float()

    def _copies(self, owned: list[Owned]) -> Iterator[Record]:
        """The host's copies of fp32 parameters, under CPU offload.

        An fp32 parameter has no master. Its copies on the host, together with the shards that stay on the device, make
        one more copy of it, which must equal it, except right after a load of the model alone: the copies are refreshed
        by the `reload_params` that follows.
        """
        if not any(part.stepped is not part.held for part in owned) or self.op.kind == "load_model_only":
            return
        for part in owned:
            named = self.state.spec.param(part.fqn)
            if not self._has_master(named):
                yield from self._part("param", named, part, part.stepped, copy=self.state.mesh.tp)

    def gradients(self, owned: list[Owned], gradients: Mapping[int, torch.Tensor]) -> Iterator[Record]:
        said = set()
        for part in owned:
            gradient, named = gradients.get(id(part.stepped)), self.state.spec.param(part.fqn)
            if gradient is not None:
                said.add(part.fqn)
                if part.stepped is not part.held:  # the gradients of copies that a hybrid optimizer made are widened
                    gradient = gradient.to(TORCH_DTYPE[self.probe.parameters[named.fqn].stages.main_grad])
                yield from self._part("grad", named, part, gradient)
        yield from self._rest("grad", said | {part.fqn for part in owned})

    def compute(self) -> Iterator[Record]:
        """Parameters as the last microbatch's forward saw them."""
        for fqn, kept in self.probe.seen.items():
            spec = self.state.spec.param(fqn).spec
            box = local_box(spec, self.state.mesh, self.state.rank, self.state.scenario.expert_parallel)
            for seen in kept:
                size = _unfused(spec, box.size, seen.size)
                at = (self.op.index, self.state.rank, LIVE, "compute_param", fqn)
                yield Record(*at, seen.dtype, spec.shape, box.start, size, seen.data)

    def schedule(self) -> Iterator[Record]:
        if self.state.scenario.optimizer.schedule != "none":
            yield self.integer("scheduler", "last_epoch", self.state.scheduler.num_steps)
        if not self.state.scenario.optimizer.loss_scale:
            return
        for link in self.state.links:
            scaler = getattr(link, "grad_scaler", None)
            if scaler is not None:
                yield self.whole("scaler", "scale", scaler.scale.reshape(()))
                yield self.integer("scaler", "growth_tracker", scaler._growth_tracker)
                yield self.integer("scaler", "hysteresis_tracker", scaler._hysteresis_tracker)

    # Records

    def _part(self, role: str, named: NamedParam, part: Owned, tensor: torch.Tensor, copy: int = 0) -> Iterator[Record]:
        if self.state.scenario.sharding == "zero1":
            yield from self.flat(role, named, part.start, tensor, copy)
        else:
            yield self.boxed(role, named, tensor)

    def flat(self, role: str, named: NamedParam, at: int, tensor: torch.Tensor, copy: int = 0) -> Iterator[Record]:
        """A flat interval of this rank's local parameter, in boxes of the logical one where the mesh cuts that."""
        box = local_box(named.spec, self.state.mesh, self.state.rank, self.state.scenario.expert_parallel)
        tensor = local_part(tensor)
        data, dtype, length = tensor_bytes(tensor), DTYPE_NAME[tensor.dtype], tensor.numel()
        head = (self.op.index, self.state.rank, LIVE, role, named.fqn, dtype, named.spec.shape)
        replica = self._replica(named) + copy
        outside = at + length > box.volume
        if outside or box.size == named.spec.shape:
            yield Record(*head, (named.spec.numel if outside else at,), (length,), data, flat=True, replica=replica)
            return
        position, itemsize = 0, tensor.element_size()
        for piece in interval_boxes(box.size, at, length):
            start = tuple(s + p for s, p in zip(box.start, piece.start, strict=True))
            end = position + prod(piece.size) * itemsize
            yield Record(*head, start, piece.size, data[position:end], replica=replica)
            position = end

    def nothing(self, role: str, named: NamedParam, dtype: str) -> Record:
        head = (self.op.index, self.state.rank, LIVE, role, named.fqn, dtype, named.spec.shape)
        return Record(*head, (named.spec.numel,), (0,), b"", flat=True, replica=self._replica(named))

    def _replica(self, named: NamedParam) -> int:
        """Which copy of a parameter a record in flat buffers belongs to: every tensor-parallel rank has a copy of
        those that are not sharded over tp, and each lies in its own buffer."""
        return self.state.tp_index if named.spec.tp_dim is None else 0

    def boxed(self, role: str, named: NamedParam, tensor: torch.Tensor) -> Record:
        """A record of a whole local tensor. Where its box starts is our arithmetic, how large it is the library's
        tensor says. A fused projection is a matrix in the library and a stack in the model's spec."""
        box = local_box(named.spec, self.state.mesh, self.state.rank, self.state.scenario.expert_parallel)
        return Record(
            self.op.index, self.state.rank, LIVE, role, named.fqn, DTYPE_NAME[tensor.dtype], named.spec.shape,
            box.start, _unfused(named.spec, box.size, tuple(tensor.shape)), tensor_bytes(tensor),
        )  # fmt: skip

    def whole(self, role: str, fqn: str, tensor: torch.Tensor) -> Record:
        name, shape = DTYPE_NAME[tensor.dtype], tuple(tensor.shape)
        return whole(self.op.index, self.state.rank, role, fqn, name, shape, tensor_bytes(tensor))

    def number(self, role: str, fqn: str, number: float) -> Record:
        return whole(self.op.index, self.state.rank, role, fqn, "fp64", (), struct.pack("<d", number))

    def text(self, role: str, fqn: str, text: str) -> Record:
        data = text.encode()
        return whole(self.op.index, self.state.rank, role, fqn, "utf8", (len(data),), data)

    def integer(self, role: str, fqn: str, number: int) -> Record:
        return whole(self.op.index, self.state.rank, role, fqn, "int64", (), struct.pack("<q", number))


def _unfused(spec: ParamSpec, local: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a tensor in its parameter's own dims: where it is the fused form of the whole local one, that
    one's."""
    return local if spec.stacked and shape == fused_shape(spec, local) else shape


def _joined(parameter: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """The fp32 master of a bf16 parameter and the signed low 16 bits that FusedAdam keeps of it: where those are
    negative the parameter was rounded up (TransformerEngine, multi_tensor_adam_param_remainder)."""
    low = remainder.detach().cpu().to(torch.int32)
    high = parameter.detach().cpu().view(torch.int16).to(torch.int32)
    high = high - (low < 0).to(torch.int32)
    return ((high << 16) | (low & 0xFFFF)).view(torch.float32)
