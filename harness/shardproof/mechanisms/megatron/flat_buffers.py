"""Where Megatron's flat gradient buffers hold each parameter: our own arithmetic of the documented layout.

A model-parallel rank has one buffer for each pair of storage and gradient dtype, in the order in which the model shows
them; dense parameters and shared-out experts have buffers of their own. A buffer holds the parameters last to first,
each from a multiple of 64 elements on. With several buckets it closes one as soon as it has `BUCKET_SIZE` elements, and
pads its end to a multiple of 128 and of the data-parallel ranks. A checkpoint leaves that last padding out of each
bucket. For example, the bf16 parameters `a` and `b` of 16 elements each make a buffer in which `b` has elements 0 to 15
and `a` elements 64 to 79 of 128; of two data-parallel ranks the first owns `b` and the second `a`.

The reader of checkpoints uses this to find parameters in stored buffers. A map of the library that is wrong then shows
as values of another parameter.

Source: megatron.core.distributed.param_and_grad_buffer._ParamAndGradBuffer, distributed_data_parallel (0.13 to 0.19);
never the library's own index maps, which are under test.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm

from shardproof.layout import Box, chunk
from shardproof.mechanisms.megatron.switches import BUCKET_SIZE, several_buckets
from shardproof.models import ModelSpec, NamedParam, ParamSpec, model_spec, storage_dtype
from shardproof.scenario import Mesh, Scenario

PARAM_ALIGNMENT, BUCKET_ALIGNMENT = 64, 128

_TORCH_NAME = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True)
class Owner:
    """Which model-parallel rank is meant: its index in the tensor-parallel group, and in the group that shares experts
    out.

    experts: whether its buffers of experts are meant, or those of everything else.
    """

    tp: int
    ep: int
    experts: bool


@dataclass(frozen=True)
class Slot:
    """A parameter's place in a buffer. bucket: which bucket. start: its first element in the bucket. box: what part
    of the logical parameter lies there."""

    param: NamedParam
    bucket: int
    start: int
    box: Box

    @property
    def stop(self) -> int:
        return self.start + self.box.volume


@dataclass(frozen=True)
class Buffer:
    """One flat buffer. dtypes: as python prints its key. sizes: of its buckets, without the padding at their ends."""

    dtypes: str
    sizes: tuple[int, ...]
    slots: tuple[Slot, ...]

    @property
    def numel(self) -> int:
        return sum(self.sizes)

    def unpadded_start(self, slot: Slot) -> int:
        """A parameter's first element, counted as if the buckets lay end to end with no padding between them, as
        checkpoints store them."""
        return sum(self.sizes[: slot.bucket]) + slot.start


def local_box(spec: ParamSpec, mesh: Mesh, owner: Owner, expert_parallel: int) -> Box:
    """What a model-parallel rank has of a parameter."""
    start, size = [0] * len(spec.shape), list(spec.shape)
    for dim, parts, index in ((spec.tp_dim, mesh.tp, owner.tp), (spec.ep_dim, expert_parallel, owner.ep)):
        if dim is not None and parts > 1:
            start[dim], size[dim] = chunk(spec.shape[dim], parts, index)
    return Box(tuple(start), tuple(size))


def is_shared_out(spec: ParamSpec, expert_parallel: int) -> bool:
    """Whether a parameter's experts are shared out over ranks, so that the expert optimizer has it."""
    return spec.ep_dim is not None and expert_parallel > 1


def trained(scenario: Scenario, *, experts: bool) -> list[NamedParam]:
    """The parameters of one of the optimizers, in the order in which the model shows them."""
    spec = model_spec(scenario.model)
    return [
        p
        for p in _as_shown(spec)
        if p.spec.trainable == "yes" and is_shared_out(p.spec, scenario.expert_parallel) == experts
    ]


def buffers(scenario: Scenario, mesh: Mesh, owner: Owner) -> tuple[Buffer, ...]:
    """The buffers of a model-parallel rank, in their order."""
    by_dtypes: dict[str, list[NamedParam]] = {}
    for param in trained(scenario, experts=owner.experts):
        storage = storage_dtype(scenario.dtype, param.spec)
        gradient = "fp32" if scenario.dtype.reduce == "fp32" else storage
        by_dtypes.setdefault(f"(torch.{_TORCH_NAME[storage]}, torch.{_TORCH_NAME[gradient]})", []).append(param)
    ranks = max(1, mesh.dp_shard // (scenario.expert_parallel if owner.experts else 1))
    limit = _bucket_limit(scenario)
    boxes = {p.fqn: local_box(p.spec, mesh, owner, scenario.expert_parallel) for p in _all(by_dtypes)}
    return tuple(_buffer(dtypes, params, boxes, limit, ranks) for dtypes, params in by_dtypes.items())


def _all(by_dtypes: dict[str, list[NamedParam]]) -> list[NamedParam]:
    return [param for params in by_dtypes.values() for param in params]


def _bucket_limit(scenario: Scenario) -> int | None:
    """Elements after which a bucket is closed. None where none ever is: there is one bucket unless gradients are
    reduced as they come."""
    return BUCKET_SIZE if several_buckets(scenario.options) else None


def _buffer(dtypes: str, params: list[NamedParam], boxes: dict[str, Box], limit: int | None, ranks: int) -> Buffer:
    slots: list[Slot] = []
    sizes: list[int] = []
    begin = end = 0  # the open bucket, in elements of the padded buffer
    open_ = False
    for param in reversed(params):
        start = _padded(end, PARAM_ALIGNMENT)
        end = start + boxes[param.fqn].volume
        slots.append(Slot(param, len(sizes), start - begin, boxes[param.fqn]))
        open_ = True
        if limit is not None and end - begin >= limit:
            sizes.append(end - begin)
            begin = end = _padded(end, lcm(ranks, BUCKET_ALIGNMENT))
            open_ = False
    if open_:
        sizes.append(end - begin)
    return Buffer(dtypes, tuple(sizes), tuple(slots))


def _padded(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _as_shown(spec: ModelSpec) -> list[NamedParam]:
    """A module tree's parameters depth first: a module's own before its children's, children as first registered."""
    first: dict[tuple[str, ...], int] = {}
    for module in spec.modules:
        parts = tuple(module.path.split("."))
        for depth in range(1, len(parts) + 1):
            first.setdefault(parts[:depth], len(first))

    def place(param: NamedParam) -> tuple[int, ...]:
        parts = tuple(param.module.path.split("."))
        return (*(first[parts[:depth]] for depth in range(1, len(parts) + 1)), -1)

    return sorted(spec.unique_params, key=place)
