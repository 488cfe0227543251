"""DeepSpeed's checkpoint folders, for `shardproof diff`: the flat parts of the ranks put together by parameter.

Each rank stores its part of the masters and moments as flat tensors. Which parameters lie in them, the files say: under
stages 1 and 2 `param_slice_mappings` of each rank, under stage 3 `param_shapes` together with the rule that every rank
has ceil(elements / ranks) of each parameter, in order (as in the library's own `zero_to_fp32.py`). So checkpoints of
different numbers of ranks compare, under names such as `optimizer.a.weight.exp_avg`; `fp32` is the master. A universal
checkpoint has the same names. A folder of tags has a file `latest`, which says which tag is taken.

*Verifies*: what `shardproof.compare` does with the files; that every rank has its file; that flat tensors are long
enough. *Does not verify*: that the mapping in the files is right. Under `round_robin_gradients` release 0.19.8 writes a
wrong one (`universal-round-robin` in `issues.toml`), and parameters then differ from those of a run without it. Of what
every rank stores alike (schedule, counters, buffers, the loss scaler, param groups) it takes rank 0's copy. Padding is
left out, and so is what only says how the state was cut.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from shardproof.compare.archives import Archive, add_archive, add_leaves, open_archive
from shardproof.compare.contents import Contents, Part, Tensor, flat_parts, whole
from shardproof.compare.views import Ints, View
from shardproof.readers.errors import CheckpointError, bad
from shardproof.readers.pieces import leaves
from shardproof.readers.values import Tensor as Stored

LATEST = ("latest", "latest_universal")
FORM = "a checkpoint as DeepSpeed's engine writes it"

_MODEL = re.compile(r"(?:zero_pp_rank_(\d{1,5})_)?mp_rank_(\d\d)_model_states\.pt")
_OPTIM = re.compile(r"(?:\w{4}_)?zero_pp_rank_(\d{1,5})_mp_rank_(\d\d)_optim_states\.pt")
_FLAT = ("single_partition_of_fp32_groups", "fp32_flat_groups")
_CUT = ("param_slice_mappings", "group_paddings", "param_alignment_paddings", "partition_count", *_FLAT)
"""What only says how state was cut, and the flat tensors themselves."""
_INNER = ("base_optimizer_state", "optimizer_state_dict")
_COPIES = ("ds_config", "ds_version")
"""What the files of optimizer state have as well as those of model states."""
_SMALL = 1 << 10


class DeepSpeedFolder:
    """A folder of tags, a tag, or a universal checkpoint."""

    def recognises(self, folder: Path) -> bool:
        """Whether the file names in a folder are those of a DeepSpeed checkpoint."""
        if not any((folder / name).is_file() for name in LATEST):
            return _is_tag(folder)
        return any(_is_tag(folder / name) for name in os.listdir(folder))

    def add(self, contents: Contents, folder: Path) -> str:
        """Take everything in it up.

        Raises:
            CheckpointError: it is damaged, or a rank's file is not there.
        """
        if not _is_tag(folder):
            folder = _latest(contents, folder)
        groups = {match[2] for name in os.listdir(folder) for match in [_MODEL.fullmatch(name)] if match}
        for number in sorted(groups):
            _Tag(contents, folder, number, (f"mp_rank_{number}",) if len(groups) > 1 else ()).add()
        if (folder / "zero").is_dir():
            _add_universal(contents, folder / "zero")
            return "DeepSpeed's universal checkpoint"
        return "DeepSpeed's checkpoint"


def _is_tag(folder: Path) -> bool:
    return folder.is_dir() and any(_MODEL.fullmatch(name) for name in os.listdir(folder))


def _latest(contents: Contents, folder: Path) -> Path:
    file = next(folder / name for name in LATEST if (folder / name).is_file())
    tag = contents.files.read(file, 0, min(_SMALL, contents.files.size(file))).decode(errors="replace").strip()
    inside = re.fullmatch(r"[\w.+-]{1,200}", tag) and tag not in (".", "..")
    if not inside or (folder / tag).is_symlink() or not (folder / tag).is_dir() or not _is_tag(folder / tag):
        raise bad(f"{file}: tag", tag[:40], "the name of a folder of this one", FORM)
    return folder / tag


def _add_universal(contents: Contents, folder: Path) -> None:
    """`NAME/{fp32,exp_avg,…}.pt`, each a tensor, or a dict with it under `param`."""
    for held in sorted(os.listdir(folder)):
        file = folder / held
        if file.is_dir() and not file.is_symlink():
            for name in sorted(os.listdir(file)):
                archive = open_archive(contents, file / name)
                value = archive.value()
                tensor = value.get("param") if isinstance(value, dict) else value
                path = ("optimizer", held, name.removesuffix(".pt"))
                if isinstance(tensor, Stored):
                    contents.add(whole(path, archive.view(tensor)))
                    contents.extents += archive.extents()
                else:
                    add_leaves(contents, path, archive, value)
        elif held.endswith(".pt"):
            add_archive(contents, file, ("optimizer_state",))


@dataclass(frozen=True)
class _Slice:
    """Where elements `first` to `first + count` of a parameter lie: at `at` in flat tensor `tensor` of a rank."""

    name: str
    rank: int
    tensor: int
    at: int
    first: int
    count: int


class _Tag:
    """The files of one tag and one model-parallel rank."""

    def __init__(self, contents: Contents, folder: Path, number: str, prefix: tuple[str, ...]) -> None:
        self.contents, self.folder, self.prefix = contents, folder, prefix
        self.models = self.files(_MODEL, number)
        self.optims = self.files(_OPTIM, number)
        self.shapes: list[dict[str, Ints]] = []

    def files(self, pattern: re.Pattern[str], number: str) -> list[Path]:
        """The ranks' files of a kind, by rank.

        Raises:
            CheckpointError: one is not there.
        """
        named = [(m, name) for name in os.listdir(self.folder) if (m := pattern.fullmatch(name)) and m[2] == number]
        found = sorted((int(match[1] or 0), name) for match, name in named)
        if [rank for rank, _ in found] != list(range(len(found))):
            given = str([rank for rank, _ in found][:40])
            raise bad(f"{self.folder}: ranks with a file {pattern.pattern}", given, f"0 to {len(found) - 1}", FORM)
        return [self.folder / name for _, name in found]

    def add(self) -> None:
        """Index the tag's folder: model states first, then the optimizer's partitions."""
        try:
            self.add_models()
            self.add_optims()
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise bad(f"{self.folder}: structure", f"{type(error).__name__}: {error}", FORM, FORM) from None

    def add_models(self) -> None:
        """The module's state dict and what lies beside it. Under stage 3 what is trained is in the flat tensors only,
        and what is frozen in fragments."""
        archives = [open_archive(self.contents, file) for file in self.models]
        values: list[Any] = [archive.value() for archive in archives]
        state = values[0]
        told = state.get("param_shapes") or []
        told = [told] if isinstance(told, dict) else told
        self.shapes = [{name: tuple(shape) for name, shape in group.items()} for group in told]
        known = {name for group in self.shapes for name in group}
        frozen = {name: tuple(shape) for name, shape in (state.get("frozen_param_shapes") or {}).items()}
        module = dict(state.get("module") or {})
        if self.models[0].name.startswith("zero_pp_rank_"):  # stage 3, also of one rank
            module = {k: v for k, v in module.items() if not (k in known or k in frozen) or _elements(v)}
            for name, shape in frozen.items():
                fragments = [value["frozen_param_fragments"][name] for value in values]
                views = [archive.view(tensor) for archive, tensor in zip(archives, fragments, strict=True)]
                self.add_tensor(("module", name), shape, _shares(shape, views))
        rest = {k: v for k, v in state.items() if k not in ("module", "frozen_param_fragments")}
        held: dict[Any, Any] = {"module": module, **rest}
        add_leaves(self.contents, self.prefix, archives[0], held)
        self.contents.extents += [extent for archive in archives[1:] for extent in archive.extents()]

    def add_optims(self) -> None:
        """The masters and the optimizer's state."""
        if not self.optims:
            return
        archives = [open_archive(self.contents, file) for file in self.optims]
        values: list[Any] = [archive.value() for archive in archives]
        states = [value["optimizer_state_dict"] for value in values]
        flat = next((name for name in _FLAT if name in states[0]), "")
        if not flat:  # no flat tensors: an optimizer without ZeRO
            add_leaves(self.contents, self.prefix, archives[0], values[0])
            return
        masters = [_tensors(state[flat]) for state in states]
        key = next((name for name in _INNER if name in states[0]), _INNER[0])
        inner = [_inner_of(state[key]) for state in states]
        slices = list(self.mapped(states) if "param_slice_mappings" in states[0] else self.shared(masters))
        self.add_state("fp32", archives, masters, slices)
        for name in _flat_states(inner[0], masters[0]):
            held = [[entry[1][name] for entry in sorted(part["state"].items())] for part in inner]
            self.add_state(name, archives, held, slices)
        self.add_rest(archives[0], values[0], states[0], inner[0], masters[0])
        self.contents.extents += [extent for archive in archives for extent in archive.extents()]

    def mapped(self, states: list[dict[str, Any]]) -> Iterator[_Slice]:
        """The fragments of parameters under ZeRO stages 1 and 2, as each rank's `param_slice_mappings` lists them.
        Fragments of a parameter on consecutive ranks are consecutive."""
        seen: dict[str, int] = {}
        for rank, state in enumerate(states):
            for tensor, mapping in enumerate(state["param_slice_mappings"]):
                for name, address in mapping.items():
                    count = int(address["numel"])
                    yield _Slice(name, rank, tensor, int(address["start"]), seen.get(name, 0), count)
                    seen[name] = seen.get(name, 0) + count

    def shared(self, masters: list[list[Stored]]) -> Iterator[_Slice]:
        """Stage 3: every rank has an equal share of each parameter; the last ones are shorter or empty."""
        ranks = len(masters)
        for rank, tensors in enumerate(masters):
            tensor, at = 0, 0
            for name, shape in (pair for group in self.shapes for pair in group.items()):
                part = -(-prod(shape) // ranks)
                while tensor + 1 < len(tensors) and at >= tensors[tensor].numel:
                    tensor, at = tensor + 1, 0
                first = min(part * rank, prod(shape))
                yield _Slice(name, rank, tensor, at, first, min(part, prod(shape) - first))
                at += part

    def add_state(self, name: str, archives: list[Archive], held: list[list[Stored]], slices: list[_Slice]) -> None:
        """Index one kind of optimizer state, such as `exp_avg`, for every parameter, as views into the ranks' flat
        partitions."""
        shapes = {key: shape for group in self.shapes for key, shape in group.items()}
        views: dict[tuple[int, int], View] = {}
        parts: dict[str, list[Part]] = {}
        for piece in slices:
            place = piece.rank, piece.tensor
            if place not in views:
                views[place] = archives[piece.rank].view(held[piece.rank][piece.tensor])
            if piece.count:
                shape = shapes[piece.name]
                parts.setdefault(piece.name, []).extend(_part(shape, piece.first, piece.count, views[place], piece.at))
        for key, found in parts.items():
            dtype = next(iter(views.values())).dtype
            self.contents.add(Tensor((*self.prefix, "optimizer", key, name), dtype, shapes[key], tuple(found)))

    def add_tensor(self, path: tuple[str, ...], shape: Ints, parts: list[Part]) -> None:
        dtype = parts[0].opened().dtype
        self.contents.add(Tensor((*self.prefix, *path), dtype, shape, tuple(parts)))

    def add_rest(
        self, archive: Archive, value: dict[str, Any], state: dict[str, Any], inner: dict[str, Any],
        masters: list[Stored],
    ) -> None:  # fmt: skip
        """What rank 0 has beside the flat tensors: counters, groups, the loss scaler."""
        flat = set(_flat_states(inner, masters))
        kept = {
            number: {name: held for name, held in entry.items() if name not in flat}
            for number, entry in inner["state"].items()
        }
        rest = {k: v for k, v in state.items() if k not in (*_CUT, *_INNER)}
        groups = [_without(group, "params") for group in inner["param_groups"]]
        rest |= {"state": kept, "param_groups": groups}
        outside = {k: v for k, v in value.items() if k not in ("optimizer_state_dict", *_COPIES)}
        held: dict[Any, Any] = {"optimizer_state_dict": rest, **outside}
        add_leaves(self.contents, self.prefix, archive, held)


def _inner_of(told: Any) -> dict[str, Any]:
    """The state of the optimizer inside, as torch's optimizers write it. Under `elastic_checkpoint` it is a list with
    an entry for each group, without padding and without the groups' settings."""
    if not isinstance(told, list):
        return dict(told)
    return {"state": dict(enumerate(told)), "param_groups": []}


def _without(group: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != name}


def _tensors(value: Any) -> list[Stored]:
    return [leaf for _, leaf in leaves((), value) if isinstance(leaf, Stored)]


def _flat_states(inner: dict[str, Any], masters: list[Stored]) -> list[str]:
    """The names of state that every flat tensor has, of its own length."""
    entries = [entry for _, entry in sorted(inner["state"].items())]
    if len(entries) != len(masters):
        return []
    return [
        name
        for name in (entries[0] if entries else ())
        if all(
            isinstance(entry.get(name), Stored) and entry[name].numel == master.numel and entry[name].shape
            for entry, master in zip(entries, masters, strict=True)
        )
    ]


def _elements(value: Any) -> int:
    return value.numel if isinstance(value, Stored) else 1


def _shares(shape: Ints, views: list[View]) -> list[Part]:
    """The parts of a parameter of which every rank has ceil(elements / ranks), with padding behind the last."""
    share, parts = -(-prod(shape) // len(views)), []
    for rank, view in enumerate(views):
        first = min(share * rank, prod(shape))
        parts += _part(shape, first, min(share, prod(shape) - first), view, 0)
    return parts


def _part(shape: Ints, first: int, count: int, view: View, at: int) -> list[Part]:
    place = (str(view.extent.path), view.extent.start)
    return list(flat_parts(shape, first, count, lambda: view, at, place))


LAYOUTS = (DeepSpeedFolder(),)
