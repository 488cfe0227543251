"""The parameters and buffers of modules, under clean names, each with what this rank holds of it.

Wrappers put words into names: DistributedDataParallel `module.`, FSDP1 `_fsdp_wrapped_module.`, `torch.compile`
`_orig_mod.`, checkpointing `_checkpoint_wrapped_module.`. Names here are those of the model as its author wrote it, so
that the same parameter has one name under every wrapper.

Neither `named_parameters` nor `state_dict` says what a rank holds under FSDP. FSDP1 puts views of a flat parameter in
place of the originals, sharded or not, according to what ran last; so its flat parameters are read, whose tables say
which interval of which original this rank has. FSDP2 puts gathered parameters in place after a forward without a
backward; so its sharded parameters are taken from where it keeps them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardproof.layout import Box
from shardproof.trainer.arms import NOT_HERE, ONE, TWO
from shardproof.trainer.rank.pieces import Cut, Held, Unreadable, held
from shardproof.trainer.values.every_mesh import fits

ALWAYS = frozenset({"_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module"})
"""Names of children that only wrappers have."""

PLAIN = (torch.Tensor, nn.Parameter)

Paths = list[tuple[str, nn.Module]]

WEIGHTS = "weight", "bias"
"""Attributes of torch's layers that are parameters."""

MOST_NAMED = 4


@dataclass
class Modules:
    """What the modules of a trainer hold.

    * local: patterns of names of what each rank has of its own: parameters that are plain tensors, and settings.
    * parameters: identity of a parameter, or of a flat one, → what is held of it; `beside` looks an optimizer's up.
    * frozen: identities of those parameters that have `requires_grad=False`.
    * params: what is held, of the role `param`, in the order of the names. buffers: name → tensor.
    * places: name of a buffer → what its module has in its place now.
    * extra: path and module of each that has a `get_extra_state` of its own.
    * unread: name → reason, of what cannot be recorded.
    * names: clean name → what is held, for state that is kept by name.
    """

    local: Sequence[str] = ()
    parameters: dict[int, Held] = field(default_factory=dict)
    frozen: set[int] = field(default_factory=set)
    params: list[Held] = field(default_factory=list)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    places: dict[str, Callable[[], torch.Tensor | None]] = field(default_factory=dict)
    extra: list[tuple[str, nn.Module]] = field(default_factory=list)
    unread: dict[str, str] = field(default_factory=dict)
    names: dict[str, Held] = field(default_factory=dict)

    def is_local(self, name: str) -> bool:
        """Whether a name is one of those that the trainer declares as each rank's own."""
        return fits(name, self.local)

    def add(self, module: nn.Module, prefix: str) -> None:
        """Read one topmost module; prefix: what comes before its names, with the dot; empty if it is the only one."""
        paths = [(prefix + path, own) for path, own in _paths(module)]
        known = self._add_flat(paths)
        sharded = _sharded_parameters(paths)
        names: dict[int, list[str]] = {}
        tensors: dict[int, torch.Tensor] = {}
        passing = _broadcast_to_this_rank(paths)
        for path, own in paths:
            for name, found in own._parameters.items():
                tensor = sharded.get((id(own), name), found)
                if tensor is not None and id(tensor) not in known and (id(own), name) not in known:
                    names.setdefault(id(tensor), []).append(_joined(path, name))
                    tensors[id(tensor)] = tensor
            for name, buffer in own._buffers.items():
                if buffer is not None and id(buffer) not in passing:
                    self.buffers[_joined(path, name)] = buffer
                    self.places[_joined(path, name)] = partial(own._buffers.get, name)
            if type(own).get_extra_state is not nn.Module.get_extra_state:
                self.extra.append((path, own))
        for identity, tensor in tensors.items():
            self._add_plain(tensor, tuple(dict.fromkeys(names[identity])))

    def tie(self, one: str, other: str) -> str:
        """What two names of parameters are on this rank: `ONE`, `TWO` or `NOT_HERE`. Two parameters that share their
        memory count as one."""
        if one not in self.names or other not in self.names:
            return NOT_HERE
        first, second = self.names[one], self.names[other]
        if any({one, other} <= {*names} for names in first.names):
            return ONE
        place = _place(first, one)
        return ONE if place and place == _place(second, other) else TWO

    def _add_plain(self, tensor: torch.Tensor, names: tuple[str, ...]) -> None:
        try:
            partition = _partition(tensor, names)
            own = any(map(self.is_local, names))
            pieces = [partition] if partition else held(tensor, names, own=own, declared=own)
        except Unreadable as reason:
            self.unread[names[0]] = str(reason)
            return
        self._keep(tensor, pieces)

    def _keep(self, tensor: torch.Tensor, pieces: list[Held]) -> None:
        self.params += pieces
        for piece in pieces[:1]:
            self.parameters[id(tensor)] = piece
            self.frozen |= set() if tensor.requires_grad else {id(tensor)}
            self.names |= {name: piece for names in piece.names for name in names}

    def _add_flat(self, paths: Paths) -> set[object]:
        """Read the flat parameters of FSDP1. Returns what is accounted for by them: identities of flat parameters, and
        the identity of a module with the name of an original in it, where a view stands now."""
        known: set[object] = set()
        for _, module in paths:
            handle = vars(module).get("_handle")
            flat = getattr(handle, "flat_param", None)
            if handle is None or flat is None or id(flat) in known:
                continue
            infos = (*flat._param_infos, *flat._shared_param_infos)
            known |= {id(flat), *((id(info.module), info.param_name) for info in infos)}
            self._keep_flat(flat, sharded=bool(handle.uses_sharded_strategy), names=_flat_names(flat, paths))
        return known

    def _keep_flat(self, flat: Any, *, sharded: bool, names: list[tuple[str, ...]]) -> None:
        local = (flat._local_shard if sharded and hasattr(flat, "_local_shard") else flat).detach()
        own = any(extension is not None for extension in flat._param_extensions) or not all(flat._contiguities)
        cuts = []
        for these, shape, part in zip(names, flat._shapes, flat._shard_param_infos, strict=True):
            count, offset = (part.numel_in_shard, part.offset_in_shard) if part.in_shard else (0, 0)
            start = part.intra_param_start_idx if part.in_shard else prod(shape)
            cuts.append(Cut(these, tuple(shape), Box((start,), (count,)), Box((offset,), (count,)), flat=True))
        joined = Held(local, tuple(cuts), own)
        if flat._params is None:
            self._keep(flat, [joined])
            return
        self.parameters[id(flat)] = joined
        for original, cut in zip(flat._params, cuts, strict=True):
            self._keep(original, [_original(local, cut, own=own, sharded=sharded)])
        for alias, info in zip(flat._shared_params or (), flat._shared_param_infos, strict=True):
            for original, first in zip(flat._params, flat._param_infos, strict=True):
                if (first.module, first.param_name) == (info.prim_module, info.prim_param_name):
                    self.parameters[id(alias)] = self.parameters[id(original)]


def _original(local: torch.Tensor, cut: Cut, *, own: bool, sharded: bool) -> Held:
    """What is held of an original parameter of FSDP1: of one dim where it is sharded, otherwise in its own shape."""
    (offset,), (count,) = cut.window
    part = local[offset : offset + count]
    if sharded:
        return Held(part, (Cut(cut.names, cut.shape, cut.box, Box((0,), (count,)), flat=True),), own)
    box = Box((0,) * len(cut.shape), cut.shape)
    return Held(part.view(cut.shape), (Cut(cut.names, cut.shape, box, box),), own)


def _partition(tensor: Any, names: tuple[str, ...]) -> Held | None:
    """What a rank holds of a parameter that DeepSpeed's ZeRO-3 has taken apart: an interval of the flattened original,
    padded to the same size on all ranks, while the parameter itself is a placeholder without elements. None of any
    other."""
    part = getattr(tensor, "ds_tensor", None)
    if part is None or tensor.numel():
        return None
    shape, size = tuple(tensor.ds_shape), part.numel()
    start = min(dist.get_rank(tensor.ds_process_group) * size, prod(shape))
    count = min(size, prod(shape) - start)
    cut = Cut(names, shape, Box((start,), (count,)), Box((0,), (count,)), flat=True)
    return Held(part.detach().reshape(-1), (cut,))


def _place(held: Held, name: str) -> list[tuple[object, ...]]:
    """Where in memory the elements of a parameter lie, of those that this rank has; empty where it has none."""
    local = held.local
    start = (local.untyped_storage().data_ptr(), local.storage_offset()) if type(local) in PLAIN else (id(local),)
    return [(*start, *cut.window) for cut in held.cuts if name in cut.names and cut.box.volume]


def _flat_names(flat: Any, paths: Paths) -> list[tuple[str, ...]]:
    """The names of each original parameter in a flat parameter; a tied parameter has several."""
    of_module: dict[int, list[str]] = {}
    for path, module in paths:
        of_module.setdefault(id(module), []).append(path)
    places: dict[tuple[int, str], list[str]] = {}
    for info in flat._param_infos:
        key = (id(info.module), info.param_name)
        places[key] = [_joined(path, info.param_name) for path in of_module[id(info.module)]]
    for info in flat._shared_param_infos:
        key = (id(info.prim_module), info.prim_param_name)
        places[key] += [_joined(path, info.param_name) for path in of_module[id(info.module)]]
    return [tuple(dict.fromkeys(found)) for found in places.values()]


def _sharded_parameters(paths: Paths) -> Mapping[tuple[int, str], torch.Tensor]:
    """Identity of a module and a parameter's name in it → FSDP2's sharded parameter, which an optimizer steps on even
    while the gathered one stands in its place."""
    found: dict[tuple[int, str], torch.Tensor] = {}
    for _, module in paths:
        ask = getattr(type(module), "_get_fsdp_state", None)
        state = ask(module) if ask is not None else None
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:
            groups = [group for group in (getattr(state, "_fsdp_param_group", None),) if group is not None]
        for one in (one for group in groups for one in group.fsdp_params):
            info, tensor = one._module_info, one.sharded_param
            found[id(info.module), info.param_name] = tensor
            for sharer, name in zip(info.shared_modules, info.shared_param_names, strict=True):
                found[id(sharer), name] = tensor
    return found


def topmost(modules: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """The modules, by path, that no other given module contains. Modules without parameters, buffers and extra state,
    such as a loss function, are left out."""
    inner = {id(part) for module in modules.values() for part in module.modules() if part is not module}
    return {path: module for path, module in modules.items() if id(module) not in inner and _has_state(module)}


def weights_beside(module: nn.Module) -> list[str]:
    """Names of the weights of torch's layers in a module that are plain tensors, and so neither parameters nor buffers:
    no `state_dict` has them, and `parameters()` does not go over them. Those that torch puts there are left out: what
    `weight_norm` and its kin work out, and views of FSDP1's flat parameters."""
    paths = _paths(module)
    if any(vars(own).get("_handle") is not None for _, own in paths):
        return []
    return [
        _joined(path, name)
        for path, own in paths if type(own).__module__.startswith("torch.nn.modules.")
        for name in WEIGHTS
        if isinstance(vars(own).get(name), torch.Tensor) and not any(p.startswith(f"{name}_") for p in own._parameters)
    ]  # fmt: skip


def said_of_weights(modules: Mapping[str, nn.Module]) -> dict[str, str]:
    """Return a sentence for each module that no other contains and that has weights which are plain tensors.

    Returns:
        path of such a module → the sentence.
    """
    inner = {id(part) for module in modules.values() for part in module.modules() if part is not module}
    found = {path: weights_beside(module) for path, module in modules.items() if id(module) not in inner}
    return {path: _said_of(names) for path, names in found.items() if names}


def _said_of(names: list[str]) -> str:
    named = f"{', '.join(names[:MOST_NAMED])}{', …' * (len(names) > MOST_NAMED)}"
    are, them = ("are plain tensors", "them") if len(names) > 1 else ("is a plain tensor", "it")
    return (
        f"{named} {are}, and no parameter or buffer: no state_dict has {them}, and a loop over parameters() does not "
        f"meet {them}"
    )


def _has_state(module: nn.Module) -> bool:
    return any(
        own._parameters or own._buffers or type(own).get_extra_state is not nn.Module.get_extra_state
        for own in module.modules()
    )


def clean(name: str) -> str:
    """A name without the words of wrappers, for names that somebody else made, such as the keys of an average."""
    return ".".join(part for part in name.split(".") if part != "module" and part not in ALWAYS)


def _broadcast_to_this_rank(paths: Paths) -> set[int]:
    """Identities of the buffers that another rank's take the place of in the next forward, as DistributedDataParallel
    has it with `broadcast_buffers`: between two steps each rank has its own statistics, and the first one's count."""
    wrappers = [module for _, module in paths if isinstance(module, nn.parallel.DistributedDataParallel)]
    return {
        id(buffer) for one in wrappers if one.broadcast_buffers and dist.get_rank(one.process_group)
        for buffer in one.modules_buffers
    }  # fmt: skip


def _paths(module: nn.Module) -> Paths:
    """Every module under a topmost one, under each of its clean paths; `module.` is dropped where it can be no word of
    the author's: where a module has this child and no other."""
    return list(_walk(module, "", ()))


def _walk(module: nn.Module, path: str, above: tuple[int, ...]) -> Iterator[tuple[str, nn.Module]]:
    yield path, module
    alone = list(module._modules) == ["module"] and not module._parameters
    for name, child in module._modules.items():
        if child is not None and id(child) not in above:
            dropped = name in ALWAYS or (name == "module" and alone)
            yield from _walk(child, path if dropped else _joined(path, name), (*above, id(module)))


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path and not path.endswith(".") else path + name
