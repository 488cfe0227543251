"""Whether the files of a checkpoint hold what is live: the bytes of each value are looked for in all of them.

That needs no knowledge of the format. `torch.save`, distributed checkpoints, safetensors and plain arrays all store a
contiguous tensor as its bytes, and a flat buffer holds those of its parts. A format that compresses or converts has
next to nothing of what is live; then nothing is claimed, and the result says so.

*Verifies*: tensors of 16 bytes and more that are not all of one byte. *Does not verify*: smaller values, such as
counts of steps, and texts, such as what a scheduler keeps: the result counts them, and names those of which a
checkpoint with readable names has nothing; under which name a value is stored; whether a load can reach the bytes
(`torch.save` writes the whole storage behind a view).
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shardproof.diff import Difference, as_numbers, numpy_dtype
from shardproof.observe.logical import Key, Value
from shardproof.trainer.values.every_mesh import BESIDE, OF_A_RANK, ROLES, is_transient

LEAST_BYTES = 16
PIECE = 8
"""The shortest piece that counts: eight bytes that occur by chance in a small checkpoint are unlikely."""
STEP = 2
"""How far the search goes on where nothing is found: the smallest element."""
LEFT_OVER = 0.25
"""What share of a value may be in no piece, as where ranks hold one element each, and the value still counts as
held."""
LONGEST_GAP = 32
"""So many bytes in a row without a found piece are no cut of ranks: they are in no file, however large the rest."""
LEAST_SHARE = 0.25
"""If fewer than this share of the parameters are in the files, they are stored in another form."""


@dataclass(frozen=True)
class Written:
    """missing: (role, name) of what is in no file. looked_for: how many values. empty: there is no file at all.
    converted: the files hold next to none of the parameters, so that they have another form there.
    too_small: (role, name) of texts, and of values that are too short or too uniform to be found by their bytes.
    no_optimizer: nothing is in the files of all that optimizers keep beside parameters, as far as it was looked for.
    rounded: (role, name) of what is in no file, and is a value of more bits rounded that is."""

    missing: tuple[tuple[str, str], ...]
    looked_for: int
    empty: bool = False
    converted: bool = False
    too_small: tuple[tuple[str, str], ...] = ()
    no_optimizer: bool = False
    rounded: tuple[tuple[str, str], ...] = ()

    def differences(self, op: int) -> list[Difference]:
        """What is missing, as differences of the operation that saved."""
        why = "its bytes are in no file"
        return [Difference(Key(op, "written", *key), "missing", total=1, mismatched=1, detail=why)
                for key in self.missing]  # fmt: skip


def not_made_by_build(
    live: Mapping[tuple[str, str], Value],
    fresh: Sequence[Mapping[tuple[str, str], Value]],
    frozen: Collection[tuple[str, str]] = (),
) -> dict[tuple[str, str], Value]:
    """The live values without constants: buffers and what hangs on other objects, such as the frequencies of a position
    embedding or a dataset, that every fresh trainer has with the same bytes. A checkpoint need not hold those, nor the
    frozen parameters of a base model that are alike under two seeds.

    Args:
        fresh: what was there right after `build`, in a run that saves and in one that loads, which have other seeds.
        frozen: the parameters that are frozen.
    """
    constant = {key for key in live if key[0] in ("buffer", "extra_state") or (key in frozen and len(fresh) > 1)}
    return {
        key: value
        for key, value in live.items()
        if key not in constant or not fresh or any(one.get(key) != value for one in fresh)
    }


def absent_from(folder: Path, values: Mapping[tuple[str, str], Value]) -> list[str]:
    """The names of values whose bytes are in no file below a folder."""
    files = _files(folder)
    return [key[1] for key, value in values.items() if not _held(value, files)]


def held_as_in(folder: Path, missing: Sequence[tuple[str, str]], values: Mapping[tuple[str, str], Value]) -> bool:
    """Whether the files of a checkpoint have other values, such as older ones, for each parameter whose bytes they
    miss; False where no parameter is missing."""
    params = {key: values[key] for key in missing if key[0] == "param" and key in values}
    return (
        bool(params) and all(key in params for key in missing if key[0] == "param") and not absent_from(folder, params)
    )


def written(folder: Path, live: Mapping[tuple[str, str], Value], transient: Sequence[str], ranks: int = 1) -> Written:
    """What of the live values is in no file below `folder`. transient: patterns of `ROLE NAME` that need not be. ranks:
    among how many a value may be cut; of one whose pieces would be too short to be found, nothing is claimed."""
    files = _files(folder)
    least = max(LEAST_BYTES, 2 * PIECE * ranks)
    owed = {key: value for key, value in live.items() if key[0] not in OF_A_RANK and not is_transient(key, transient)}
    wanted = {
        key: value
        for key, value in owed.items()
        if value.dtype != "utf8" and len(value.data) >= LEAST_BYTES and len(set(value.data)) > 1
    }
    if not files:
        return Written(tuple(key for key in wanted if key[0] == "param"), len(wanted), empty=True)
    missing = [key for key, value in wanted.items() if not _held(value, files)]
    rounded = _rounded(wanted, missing)
    missing = [key for key in missing if key not in rounded]
    params = [key for key in wanted if key[0] == "param"]
    absent = [key for key in missing if key[0] == "param"]
    if params and len(absent) > (1 - LEAST_SHARE) * len(params):
        return Written((), len(wanted), converted=True)
    found_out = {key for key in wanted if len(wanted[key].data) >= least or key not in missing}
    too_small = tuple(key for key, value in owed.items() if key not in found_out and value.data)
    lost = tuple(key for key in missing if key in found_out)
    beside = {key for key in wanted if key[0] in BESIDE}
    no_optimizer = any(key in beside for key in lost) and beside <= {*missing}
    return Written(lost, len(found_out), too_small=too_small, no_optimizer=no_optimizer, rounded=rounded)


def _rounded(
    values: Mapping[tuple[str, str], Value], missing: Sequence[tuple[str, str]]
) -> tuple[tuple[str, str], ...]:
    """What is missing and is a part of another value, rounded to its dtype, as a parameter is of its fp32 master."""
    halves = {dtype for key in missing if (dtype := values[key].dtype) in HALVES}
    wide = [value for key, value in values.items() if key not in missing and value.dtype in WIDE]
    with np.errstate(over="ignore"):
        there = {half: [as_numbers(value).astype(numpy_dtype(half)).tobytes() for value in wide] for half in halves}
    return tuple(key for key in missing if any(values[key].data in data for data in there.get(values[key].dtype, ())))


HALVES, WIDE = ("bf16", "fp16"), ("fp32", "fp64")
"""Dtypes to which values of the others are rounded."""


def nameless(keys: Iterable[tuple[str, str]], names: Iterable[str]) -> tuple[str, ...]:
    """The last words of names, such as `last_epoch`, that no name in a checkpoint has. State of an optimizer goes by
    its role, since a checkpoint may number parameters."""
    there = {part for name in names for part in re.split(r"\W+", name)}
    wanted = dict.fromkeys(map(_words, keys))
    return tuple(words[0] for words in wanted if not there.intersection(words))


def _words(key: tuple[str, str]) -> tuple[str, ...]:
    """What a value may be called in a checkpoint."""
    role, name = key
    own = tuple(word for word, of in ROLES.items() if of == role)
    parts = [part for part in re.split(r"\W+", name) if part and not part.isdecimal()]
    return own or (parts[-1] if parts else role,)


def _held(value: Value, files: Sequence[Path]) -> bool:
    """Whether the bytes of a value are in the files, in one piece or cut into pieces, wherever a format cuts them."""
    with ExitStack() as stack:
        contents = [_opened(path, stack) for path in files]
        gaps = _gaps(value.data, contents)
        return sum(gaps) <= LEFT_OVER * len(value.data) and max(gaps, default=0) < LONGEST_GAP


def _gaps(data: bytes, contents: Sequence[mmap.mmap]) -> list[int]:
    """The lengths in bytes of what lies between the pieces of `PIECE` bytes or more that some file has."""
    gaps: list[int] = []
    at, follows = 0, False
    while at < len(data):
        length = _longest(data, at, contents)
        gap = length < PIECE
        length = min(STEP, len(data) - at) if gap else length
        if gap and follows:
            gaps[-1] += length
        elif gap:
            gaps.append(length)
        at, follows = at + length, gap
    return gaps


def _longest(data: bytes, at: int, contents: Sequence[mmap.mmap]) -> int:
    """The length of the longest piece from `at` on that some file has, by halving."""

    def there(length: int) -> bool:
        return any(content.find(data[at : at + length]) >= 0 for content in contents)

    low, high = 0, len(data) - at
    if there(high):
        return high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if there(middle) else (low, middle)
    return low


def _files(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.rglob("*")) if path.is_file() and path.stat().st_size]


def _opened(path: Path, stack: ExitStack) -> mmap.mmap:
    file = stack.enter_context(path.open("rb"))
    return stack.enter_context(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
