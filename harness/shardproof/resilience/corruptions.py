"""Damage to a finished checkpoint, as disks, copying and people cause it.

Each damage is a pure function of the finished folder, of the folder as it was before the last save, of a folder that
another training run saved in the same way, and of a seed. `damaged` goes round the kinds, so that any number of damages
holds about as many of each; a kind that a stack's files do not allow (one file cannot be swapped with another) is left
out. A damage that changes nothing is no damage, and one that was there before is not repeated.

*Does not know*: what the bytes mean. `head` is the first 512 bytes of a file, where formats keep their headers, `tail`
the last 512, and `payload` what lies between; small files of metadata are damaged as often as large ones.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from shardproof.resilience.events import Link, Tree, digest_of
from shardproof.resilience.states import BLOCK

EDGE = 512
"""Bytes of a file's head and tail."""
_IN_VAIN = 60
"""So many damages of a kind one after the other that were there before, and the kind has no more."""

Files = dict[str, bytes | None]


@dataclass(frozen=True)
class Folders:
    """What damage is made of: the finished folder, what it held before the last save, and the one of another run."""

    new: Tree
    old: Tree
    other: Tree


@dataclass(frozen=True)
class Damage:
    """One damaged folder. label: kind and number, such as `flip-payload-3`, unique for a seed."""

    label: str
    kind: str
    what: str
    tree: Tree


Maker = Callable[[Folders, random.Random], tuple[str, Files] | None]
"""Makes a sentence and a folder; None if these folders cannot be damaged so."""


def damaged(folders: Folders, seed: int, most: int) -> Iterator[Damage]:
    """At most so many different damages, the same for the same folders and seed."""
    seen = {digest_of(folders.new)}
    made = 0
    supplies = {kind: _supply(kind, maker, folders, seed, seen) for kind, maker in KINDS.items()}
    while supplies and made < most:
        for kind in list(supplies):
            found = next(supplies[kind], None)
            if found is None:
                del supplies[kind]
            elif made < most:
                made += 1
                yield found


def _supply(kind: str, maker: Maker, folders: Folders, seed: int, seen: set[bytes]) -> Iterator[Damage]:
    number = vain = 0
    while vain < _IN_VAIN:
        made = maker(folders, random.Random(f"{seed} {kind} {number}"))
        if made is None:
            return
        what, tree = made
        digest = digest_of(tree)
        if digest in seen:
            vain += 1
        else:
            vain = 0
            seen.add(digest)
            yield Damage(f"{kind}-{number}", kind, what, tree)
        number += 1


def _files(tree: Tree, least: int = 1) -> list[str]:
    """The files that hold at least so many bytes; a symbolic link holds none."""
    files = ((path, data) for path, data in tree.items() if data is not None and not isinstance(data, Link))
    return sorted(path for path, data in files if len(data) >= least)


def _bytes(tree: Tree, path: str) -> bytes:
    data = tree[path]
    assert data is not None
    return data


def _flip(part: str) -> Maker:
    def flip(folders: Folders, draw: random.Random) -> tuple[str, Files] | None:
        paths = _files(folders.new, 2 * EDGE + 1 if part == "payload" else 1)
        if not paths:
            return None
        path = draw.choice(paths)
        data = bytearray(_bytes(folders.new, path))
        first, end = {
            "head": (0, min(EDGE, len(data))), "tail": (max(0, len(data) - EDGE), len(data)),
            "payload": (EDGE, len(data) - EDGE),
        }[part]  # fmt: skip
        at, bit = draw.randrange(first, end), draw.randrange(8)
        data[at] ^= 1 << bit
        return f"bit {bit} of byte {at} of {path} flipped", {**folders.new, path: bytes(data)}

    return flip


def _truncate(folders: Folders, draw: random.Random) -> tuple[str, Files] | None:
    path = draw.choice(_files(folders.new))
    data = _bytes(folders.new, path)
    sizes = (0, 1, len(data) // 2, len(data) - 1, max(0, len(data) - BLOCK), draw.randrange(len(data)))
    size = draw.choice(sizes)
    return f"{path} cut from {len(data)} to {size} bytes", {**folders.new, path: data[:size]}


def _extend(folders: Folders, draw: random.Random) -> tuple[str, Files] | None:
    path = draw.choice(_files(folders.new))
    more = draw.choice((1, 8, EDGE, BLOCK))
    return f"{more} bytes appended to {path}", {**folders.new, path: _bytes(folders.new, path) + draw.randbytes(more)}


def _zero(folders: Folders, draw: random.Random) -> tuple[str, Files] | None:
    path = draw.choice(_files(folders.new))
    data = bytearray(_bytes(folders.new, path))
    size = draw.choice((64, EDGE, BLOCK, len(data)))
    at = draw.randrange(-(-len(data) // size)) * size
    data[at : at + size] = bytes(len(data[at : at + size]))
    return f"bytes {at} to {min(at + size, len(data))} of {path} are zeros", {**folders.new, path: bytes(data)}


def _two(folders: Folders, draw: random.Random) -> list[str] | None:
    paths = _files(folders.new)
    return draw.sample(paths, 2) if len(paths) > 1 else None


def _swap(folders: Folders, draw: random.Random) -> tuple[str, Files] | None:
    if (two := _two(folders, draw)) is None:
        return None
    a, b = two
    return f"{a} and {b} swapped", {**folders.new, a: folders.new[b], b: folders.new[a]}


def _duplicate(folders: Folders, draw: random.Random) -> tuple[str, Files] | None:
    if (two := _two(folders, draw)) is None:
        return None
    a, b = two
    return f"{b} holds what {a} holds", {**folders.new, b: folders.new[a]}


def _missing(folders: Folders, draw: random.Random) -> tuple[str, Files] | None:
    paths = _files(folders.new, 0)
    gone = set(draw.sample(paths, draw.randint(1, min(3, len(paths)))))
    return f"{', '.join(sorted(gone))} missing", {path: d for path, d in folders.new.items() if path not in gone}


def _taken(what: str, source: Callable[[Folders], Tree]) -> Maker:
    """Files of another folder in the place of those of the same name, but never all of them."""

    def take(folders: Folders, draw: random.Random) -> tuple[str, Files] | None:
        donors: dict[str, bytes] = {}
        for path in _files(source(folders)):
            donors.setdefault(path.rpartition("/")[2], _bytes(source(folders), path))
            donors[path.rpartition("/")[2]] = _bytes(source(folders), path)
        fitting = [path for path in _files(folders.new) if donors.get(path.rpartition("/")[2]) != folders.new[path]]
        fitting = [path for path in fitting if path.rpartition("/")[2] in donors]
        if not fitting:
            return None
        taken = draw.sample(fitting, draw.randint(1, len(fitting)))
        replaced = {path: donors[path.rpartition("/")[2]] for path in taken}
        return f"{', '.join(sorted(taken))} from {what}", {**folders.new, **replaced}

    return take


KINDS: dict[str, Maker] = {
    "flip-head": _flip("head"),
    "flip-payload": _flip("payload"),
    "flip-tail": _flip("tail"),
    "truncated": _truncate,
    "extended": _extend,
    "zeroed": _zero,
    "swapped": _swap,
    "duplicated": _duplicate,
    "missing": _missing,
    "older-step": _taken("the step before", lambda folders: folders.old),
    "other-run": _taken("another run", lambda folders: folders.other),
}
