"""The rank's side of the probe: a tree of `torch.nn.Module` whose gradients are known beforehand.

Each module's real forward returns x + ⟨p, g⟩ for each of its parameters p. The derivative of that by p is g, exactly,
so that a backward pass gives the gradient g through whatever hooks, buckets and reductions the library under test has
put there. The forward also records the parameter as it saw it: since g does not depend on p, nothing else would show
that it was computed with a stale or wrongly gathered weight.

A system builds the tree with `build_model`, hands it to its library, and sets `Probe.slot` before each microbatch.
Nothing here knows a library; DTensors are only unwrapped to their local part.

*Verifies* nothing by itself. *Does not verify* that the forward of a real layer is right: no matmul runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial

from shardproof.grid import Grid
from shardproof.models import BufferSpec, ModelSpec, ModuleSpec, NamedParam, ParamSpec, storage_dtype
from shardproof.probe import element_keys, extra_rank, initial_values, lone_rank, part_units, rank_units, with_rare
from shardproof.protocol.system import RankContext
from shardproof.scenario import DTypePolicy

TORCH_DTYPE: dict[str, torch.dtype] = {
    "fp32": torch.float32, "fp64": torch.float64, "fp16": torch.float16, "bf16": torch.bfloat16,
    "int64": torch.int64, "int32": torch.int32, "int16": torch.int16, "uint8": torch.uint8, "bool": torch.bool,
    "fp8e4m3": torch.float8_e4m3fn,
}  # fmt: skip

DTYPE_NAME: dict[torch.dtype, str] = {dtype: name for name, dtype in TORCH_DTYPE.items()}

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""`(start, size)` of a piece of a logical tensor, one entry a dim."""


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    """The raw bytes of a plain tensor, row-major.

    Reads only: it copies first, since `Tensor.numpy` marks the storage as not resizable, which FSDP2 needs.
    """
    copy = tensor.detach().cpu().reshape(-1).clone()
    return copy.view(torch.uint8).numpy().tobytes() if copy.numel() else b""


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """The local shard of a DTensor, through which gradients flow; a plain tensor as given."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@dataclass(frozen=True)
class Slot:
    """Which forward runs. overflow: one element of one gradient is +inf on data-parallel rank 0."""

    iteration: int = 0
    microbatch: int = 0
    overflow: bool = False


@dataclass(frozen=True)
class Seen:
    """The local piece of a parameter as a forward pass used it: dtype, size and raw bytes."""

    dtype: str
    size: tuple[int, ...]
    data: bytes


def _draw_nothing(stream: str, numel: int) -> None:
    """Dropout of a system that keeps no generators for it."""


class Probe:
    """What all modules of one rank's model share: which gradients to produce, what the forwards saw, and `dropout`,
    which draws a mask of so many elements from a stream.

    Args:
        context: of the rank.
        box: from a parameter's name to the piece of it that this rank's forward computes with: the tensor-parallel
            shard, or all of it without tensor parallelism.
    """

    def __init__(self, context: RankContext, box: Callable[[str], Box]) -> None:
        self.scenario, self.spec, self.mesh, self.rank = context.scenario, context.model, context.mesh, context.rank
        self.parameters = {p.fqn: p for p in context.contract.parameters(context.scenario, context.mesh)}
        self.box = box
        self.slot = Slot()
        self.seen: dict[str, list[Seen]] = {}
        self.poisoned = False
        self.dropout: Callable[[str, int], None] = _draw_nothing

    def start_step(self) -> None:
        """Forget what the previous step's forwards saw."""
        self.seen.clear()
        self.poisoned = False

    def record(self, fqn: str, local: torch.Tensor) -> None:
        """Keep what a forward sees of a parameter. Microbatches of a step that see the same bytes share one entry."""
        now = Seen(DTYPE_NAME[local.dtype], tuple(local.shape), tensor_bytes(local))
        kept = self.seen.setdefault(fqn, [])
        if now not in kept:
            kept.append(now)

    def gradient(self, fqn: str, local: torch.Tensor, trainable: bool) -> torch.Tensor:
        """This rank's gradient for one use of a parameter in the current slot, in the shape and dtype of `local`."""
        named, grid = self.spec.param(fqn), self._grid(fqn)
        keys = element_keys(fqn, named.spec.shape, self.scenario.seed)
        ranks, sharers = self._ranks(fqn)
        step, contributor = (self.slot.iteration, self.slot.microbatch), self.mesh.dp_index(self.rank) // sharers
        if grid.parted:
            own = part_units(keys, *step, ranks, self.mesh.tp, grid)[contributor, self.mesh.coordinate(self.rank)[2]]
        else:
            own = rank_units(keys, *step, ranks, grid)[contributor]
        values = (own * sharers * grid.unit).reshape(named.spec.shape)
        if self._poisons(trainable) and values.size:
            self.poisoned = True
            if self.mesh.dp_index(self.rank) == 0:
                values.reshape(-1)[0] = np.inf
        start, size = self.box(fqn)
        piece = values[tuple(slice(s, s + n) for s, n in zip(start, size, strict=True))]
        gradient = torch.from_numpy(np.ascontiguousarray(piece)).to(device=local.device, dtype=local.dtype)
        return gradient.reshape(local.shape)

    def term(self, fqn: str, param: torch.Tensor) -> torch.Tensor:
        """⟨p, g_p⟩ of one use of a parameter in the current slot; a scalar. Records the parameter as it is now."""
        local = local_part(param)
        if isinstance(param, DTensor) and self._grid(fqn).parted:
            local = param.to_local(grad_placements=[Partial()])
        self.record(fqn, local)
        gradient = self.gradient(fqn, local, param.requires_grad)
        term: torch.Tensor = _Term.apply(local, gradient, self, fqn)  # type: ignore[no-untyped-call]
        return term

    def uses(self, spec: ParamSpec) -> bool:
        """Whether this rank's forward of the current slot uses a parameter."""
        slot = self.slot
        alone = lone_rank(slot.iteration, slot.microbatch, self.mesh.dp) if spec.idle == "others" else None
        return spec.takes_part(slot.iteration, slot.microbatch) and alone in (None, self.mesh.dp_index(self.rank))

    def has(self, iteration: int, microbatch: int) -> bool:
        """Whether this rank has a microbatch at all."""
        if self.scenario.grad_sync != "uneven":
            return True
        return extra_rank(iteration, microbatch, self.mesh.dp) in (None, self.mesh.dp_index(self.rank))

    def _poisons(self, trainable: bool) -> bool:
        return self.slot.overflow and self.slot.microbatch == 0 and trainable and not self.poisoned

    def _ranks(self, fqn: str) -> tuple[int, int]:
        """How many data-parallel ranks hold the same piece of a parameter, and over how many its experts are shared
        out.

        A rank that has an expert computes its gradient for all ranks that share the experts out, so that its
        contribution counts that often.
        """
        sharers = self.scenario.expert_parallel if self.spec.param(fqn).spec.ep_dim is not None else 1
        return self.mesh.dp // sharers, sharers

    def _grid(self, fqn: str) -> Grid:
        grid = self.parameters[self.spec.param(fqn).spec.tied_to or fqn].gradient
        assert grid is not None, f"{fqn} takes part in a forward"
        return grid


class _Term(torch.autograd.Function):
    """⟨p, g⟩, which saves p for backward, as a matrix product would, and records what it finds there.

    A library that frees parameters after the forward gathers them again before the backward; the gradient here does
    not depend on p, so only looking shows whether it gathered the right thing.
    """

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, gradient: torch.Tensor, probe: Probe, fqn: str) -> torch.Tensor:
        """The inner product; a scalar."""
        ctx.save_for_backward(local, gradient)
        ctx.probe, ctx.fqn = probe, fqn
        return (local * gradient).sum()

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        """Upstream times g, after recording the saved parameter."""
        local, gradient = ctx.saved_tensors
        ctx.probe.record(ctx.fqn, local)
        return upstream * gradient, None, None, None


class ProbeModule(nn.Module):
    """One module of a ModelSpec. forward: (1,) → (1,); each used parameter adds ⟨p, g_p⟩ to it. What comes out is never
    the input itself, which FSDP2 would warn of, also where no parameter has a part in it."""

    def __init__(self, spec: ModuleSpec, probe: Probe) -> None:
        super().__init__()
        self.spec = spec
        self.probe = probe

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given = x
        if self.spec.draws:
            self.probe.dropout(self.spec.draws, self.spec.params[0].numel)
        for spec in self.spec.params:
            if self.probe.uses(spec):
                x = x + self.probe.term(f"{self.spec.path}.{spec.name}", getattr(self, spec.name)).to(x.dtype)
        if self.training and self.probe.slot.microbatch == 0:
            self._count()
        return x.clone() if x is given else x

    def _count(self) -> None:
        with torch.no_grad():
            for spec in self.spec.buffers:
                if spec.dtype.startswith("int"):
                    getattr(self, spec.name).add_(1)


class ProbeUnit(ProbeModule):
    """A module that its spec calls a unit, for libraries that are told their units by class."""


class ProbeRoot(nn.Module):
    """The root: calls the modules in the spec's order. Module paths with dots nest. A module none of whose
    parameters is used is never called, like a branch of a real model that nothing reaches."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.paths = tuple(m.path for m in spec.modules if m.buffers or any(p.used for p in m.params))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for path in self.paths:
            x = self.get_submodule(path)(x)
        return x


def build_model(probe: Probe, init_seed: int) -> ProbeRoot:
    """The model of `probe.spec` on one process, whole, with initial values; tied parameters are one object."""
    spec, scenario = probe.spec, probe.scenario
    root = ProbeRoot(spec)
    for module_spec in spec.modules:
        kind = ProbeUnit if module_spec.unit else ProbeModule
        attach(root, module_spec.path, kind(module_spec, probe))
    for named in spec.unique_params:
        values = initial_values(element_keys(named.fqn, named.spec.shape, scenario.seed), init_seed)
        values = with_rare(values, init_seed) if named.spec.rare else values
        parameter = nn.Parameter(
            _cast(values, named.spec.shape, scenario.dtype, named), requires_grad=named.spec.trainable == "yes"
        )
        root.get_submodule(named.module.path).register_parameter(named.spec.name, parameter)
    for named in spec.params:
        if named.spec.tied_to is not None:
            shared = root.get_parameter(named.spec.tied_to)
            root.get_submodule(named.module.path).register_parameter(named.spec.name, shared)
    for fqn, buffer_spec in spec.buffers():
        path, _, name = fqn.rpartition(".")
        value = initial_buffer(fqn, buffer_spec, scenario.seed, init_seed)
        root.get_submodule(path).register_buffer(name, value, persistent=buffer_spec.persistent)
    return root


def initial_buffer(fqn: str, spec: BufferSpec, seed: int, init_seed: int) -> torch.Tensor:
    """A buffer's initial value: floats as a parameter's, booleans change with the build, integers are zero."""
    keys = element_keys(fqn, spec.shape, seed)
    match spec.dtype:
        case "int64":
            return torch.zeros(spec.shape, dtype=torch.int64)
        case "bool":
            return torch.from_numpy(((keys ^ np.uint64(init_seed)) & np.uint64(1)).astype(bool)).reshape(spec.shape)
        case name:
            return torch.from_numpy(initial_values(keys, init_seed)).reshape(spec.shape).to(TORCH_DTYPE[name])


def _cast(
    values: np.ndarray[tuple[int], np.dtype[np.float32]], shape: tuple[int, ...], policy: DTypePolicy, named: NamedParam
) -> torch.Tensor:
    assert values.size == prod(shape)
    own = torch.tensor(values)  # a copy: storage that numpy owns cannot be resized
    return own.reshape(shape).to(TORCH_DTYPE[storage_dtype(policy, named.spec)])


def attach(root: nn.Module, path: str, module: nn.Module) -> None:
    """Put a module at a dotted path, with plain modules on the way there."""
    *parents, leaf = path.split(".")
    node = root
    for name in parents:
        if not hasattr(node, name):
            node.add_module(name, nn.Module())
        node = getattr(node, name)
    node.add_module(leaf, module)
