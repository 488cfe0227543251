"""The steps of `shardproof diff`: index both checkpoints, compare structure, compare bits, explain the differences.

*Verifies*: every name is on both sides; tensors have the same dtype, shape and bits, however they are cut into pieces;
plain values are of the same type and equal, floats bit for bit. *Does not verify*: what no tensor or key refers to, the
order of names, devices, `requires_grad`, whether a sequence was a list or a tuple.
"""

from __future__ import annotations

import re
import struct
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from shardproof.compare import misplaced
from shardproof.compare.bits import Tally, compare_bits, index_of
from shardproof.compare.contents import Contents, Entry, Tensor
from shardproof.compare.coverage import flaw
from shardproof.compare.differences import Comparison, EntryDifference, Side, in_order
from shardproof.compare.formats import open_contents
from shardproof.compare.renames import Rename, hint_of
from shardproof.compare.roles import role_of
from shardproof.errors import UsageError
from shardproof.protocol.checkpoint_layout import Layout
from shardproof.readers.errors import bad
from shardproof.readers.values import Value

SHOWN = 200
"""Characters of a plain value that a difference quotes."""


class Progress(Protocol):
    """What is told of the work."""

    def phase(self, what: str, total_bytes: int) -> None:
        """A part of the work begins, in which so many bytes are to be compared."""

    def read(self, count: int) -> None:
        """So many more bytes of files were read."""

    def compared(self, count: int) -> None:
        """So many more bytes of tensors were compared."""


@dataclass(frozen=True)
class CompareRequest:
    """What is to be compared. layouts: the kinds of folders that systems know. renames: applied to the names of both.
    only: names that one of these does not match are left out.

    Of two folders, everything in them is compared that can be read, also what lies beside a format that we know, such
    as `optimizer.pt` beside `model.safetensors`. A file is compared with what the other folder's format has: a model
    in one file does not lack the optimizer that lies beside the same model elsewhere."""

    a: Path
    b: Path
    layouts: Sequence[Layout[Contents]]
    renames: Sequence[Rename] = ()
    only: Sequence[re.Pattern[str]] = ()
    checksums: bool = True

    @property
    def beside(self) -> bool:
        """Whether what lies beside the format of a folder belongs to it."""
        return self.a.is_dir() and self.b.is_dir()


def compare(request: CompareRequest, progress: Progress) -> Comparison:
    """Compare two checkpoints.

    Raises:
        CheckpointError: one is missing, damaged, foreign, or holds nothing. UsageError: names that are made equal.
    """
    counted = Counter[str]()

    def count_read(count: int) -> None:
        counted["read"] += count
        progress.read(count)

    with _opened(request.a, request, count_read) as a, _opened(request.b, request, count_read) as b:
        return _Work(request, a.contents, b.contents, progress, counted).result()


class _opened:  # noqa: N801
    """A checkpoint's index as a context, which closes its files."""

    def __init__(self, path: Path, request: CompareRequest, on_read: Callable[[int], None]) -> None:
        self.contents = open_contents(
            path, request.layouts, on_read, checksums=request.checksums, beside=request.beside
        )

    def __enter__(self) -> _opened:
        return self

    def __exit__(self, *_: object) -> None:
        self.contents.files.close()


class _Work:
    """One comparison in progress."""

    def __init__(
        self, request: CompareRequest, a: Contents, b: Contents, progress: Progress, counted: Counter[str]
    ) -> None:
        self.request, self.progress, self.counted = request, progress, counted
        self.sides = (a, b)
        self.left_out: set[str] = set()
        self.a, self.b = self.named(a), self.named(b)
        self.found: list[EntryDifference] = []
        self.elements = 0
        self.same_multiset: dict[str, bool] = {}
        self.first: dict[str, int] = {}

    def result(self) -> Comparison:
        """All steps in order."""
        both = [name for name in self.a if name in self.b]
        self.absent()
        tensors = [name for name in both if self.structure(name)]
        self.bits(tensors)
        for side in self.sides:
            side.finish()
        self.explain()
        return Comparison(
            _side(self.sides[0]), _side(self.sides[1]), in_order(self.found),
            Counter(self.role(name) for name in both), self.elements,
            hint_of(self.a, self.b), self.counted["read"], self.request.checksums,
            left_out=len(self.left_out),
        )  # fmt: skip

    def named(self, contents: Contents) -> dict[str, Entry]:
        """A side's entries under the names that they are compared by; those that --only leaves out are noted."""
        entries: dict[str, Entry] = {}
        for old, entry in contents.entries.items():
            name = old
            for rename in self.request.renames:
                name = rename.apply(name)
            if self.request.only and not any(pattern.search(name) for pattern in self.request.only):
                self.left_out.add(name)
                continue
            if name in entries:
                what = f"{contents.path}: what --rename makes of a name"
                raise bad(what, f"{name} of {old}", "another name for each", "--rename '^module[.]='")
            entries[name] = entry
        if not any(isinstance(entry, Tensor) and entry.numel for entry in entries.values()):
            form = "shardproof diff A B --only '^model[.]'"
            raise UsageError.of(f"--only: tensors of {contents.path} that it leaves", 0, "1 or more", form)
        return entries

    def role(self, name: str) -> str:
        entry = self.a.get(name) or self.b[name]
        return role_of(entry.path, tensor=isinstance(entry, Tensor))

    # Structure

    def absent(self) -> None:
        """Record the names that only A has as `missing`, and the names that only B has as `extra`."""
        for name in self.a.keys() - self.b.keys():
            self.found.append(self.difference(name, "missing"))
        for name in self.b.keys() - self.a.keys():
            self.found.append(self.difference(name, "extra"))

    def difference(self, name: str, kind: str, **facts: object) -> EntryDifference:
        a, b = self.a.get(name), self.b.get(name)
        return EntryDifference(
            name, self.role(name), kind, _describe_entry(a), _describe_entry(b),
            pieces_a=len(a.parts) if isinstance(a, Tensor) else 0,
            pieces_b=len(b.parts) if isinstance(b, Tensor) else 0,
            **facts,  # type: ignore[arg-type]
        )  # fmt: skip

    def structure(self, name: str) -> bool:
        """Compare what both have under a name, but for the bits of tensors; whether those can be compared."""
        a, b = self.a[name], self.b[name]
        if not isinstance(a, Tensor) or not isinstance(b, Tensor):
            if isinstance(a, Tensor) or isinstance(b, Tensor):
                self.found.append(self.difference(name, "kind"))
            elif canonical(a.value) != canonical(b.value):
                self.found.append(self.difference(name, "value"))
            return False
        flaws = [(side, problem) for side, tensor in (("A", a), ("B", b)) if (problem := flaw(tensor))]
        if flaws:
            detail = "; ".join(f"in {side}, {detail}" for side, (_, detail) in flaws)
            self.found.append(self.difference(name, flaws[0][1][0], detail=detail, total=a.numel))
            return False
        if a.dtype != b.dtype or a.shape != b.shape:
            kind = "dtype" if a.dtype != b.dtype else "shape"
            mechanism, text = self.explained_structure(a, b)
            self.found.append(self.difference(name, kind, total=a.numel, mechanism=mechanism, explanation=text))
            return False
        return True

    def explained_structure(self, a: Tensor, b: Tensor) -> tuple[str, str]:
        if a.dtype == b.dtype:
            return misplaced.other_shape(a, b)
        return misplaced.other_dtype(a, b) if a.shape == b.shape else misplaced.NOTHING

    # Bits

    def bits(self, names: Sequence[str]) -> None:
        """Compare the bits of tensors, in the order in which A's lie in its files."""
        self.progress.phase("comparing", sum(self.tensor(name).nbytes for name in names))
        for name in sorted(names, key=self.place):
            a, b = self.tensor(name), self.b[name]
            assert isinstance(b, Tensor)
            tally, patterns = compare_bits(a, b, self.progress.compared)
            self.elements += a.numel
            if tally.mismatched:
                mechanism, text = patterns.explanation(a.numel, counts=self.role(name) == "step")
                self.same_multiset[name] = tally.same_multiset
                self.first[name] = tally.first
                self.found.append(self.of_tally(name, a, tally, mechanism, text))

    def of_tally(self, name: str, a: Tensor, tally: Tally, mechanism: str, text: str) -> EntryDifference:
        return self.difference(
            name, "bits", mismatched=tally.mismatched, total=a.numel, first_index=index_of(a, tally.first),
            last_index=index_of(a, tally.last), first_a=tally.first_a, first_b=tally.first_b, max_ulp=tally.max_ulp,
            nan=tally.nan, ulp_histogram=tally.histogram(), mechanism=mechanism, explanation=text,
        )  # fmt: skip

    def tensor(self, name: str) -> Tensor:
        entry = self.a[name]
        assert isinstance(entry, Tensor)
        return entry

    def place(self, name: str) -> tuple[str, int]:
        return min((part.place for part in self.tensor(name).parts), default=("", 0))

    # Explanations

    def explain(self) -> None:
        """Look for what the differences have in common with other tensors, and within their own."""
        mine = {name: entry for name, entry in self.a.items() if isinstance(entry, Tensor) and not flaw(entry)}
        its = {name: entry for name, entry in self.b.items() if isinstance(entry, Tensor) and not flaw(entry)}
        asked = [one for one in self.found if one.kind in ("bits", "extra") and one.name in its]
        budget = 2 * self.sides[0].nbytes + (1 << 30)
        unexplained = [one.name for one in asked if not one.explanation or one.mechanism == "bit_flip"]
        holders = misplaced.holders(mine, its, unexplained, budget)
        moved = {source: name for name, source in holders.items()}
        explained = misplaced.explain_holders(holders)
        extra = {one.name for one in self.found if one.kind == "extra"}
        for at, one in enumerate(self.found):
            if one.kind == "missing" and moved.get(one.name) in extra:
                self.found[at] = replace(one, mechanism="renamed", explanation=f"B has it as {moved[one.name]}.")
            elif one.kind == "extra" and one.name in holders:
                text = f"A has it as {holders[one.name]}."
                mechanism = "renamed" if holders[one.name] not in self.b else "copied"
                self.found[at] = replace(one, mechanism=mechanism, explanation=text)
            elif one.kind == "bits" and one.name in explained:
                self.found[at] = replace(one, mechanism=explained[one.name][0], explanation=explained[one.name][1])
            elif one.kind == "bits" and not one.explanation:
                mechanism, text = misplaced.rearranged(
                    mine[one.name], its[one.name], self.first[one.name], same_multiset=self.same_multiset[one.name]
                )
                self.found[at] = replace(one, mechanism=mechanism, explanation=text)


def canonical(value: Value) -> object:
    """A plain value so that two are equal only if they are of the same types and bits: 1 is not 1.0, nor True."""
    match value:
        case float():
            return "float", struct.pack("<d", value)
        case list():
            return "list", [canonical(entry) for entry in value]
        case dict():
            return "dict", {key: canonical(entry) for key, entry in value.items()}
        case _:
            return type(value).__name__, value


def _describe_entry(entry: Entry | None) -> str:
    """An entry of a checkpoint in words: `bf16 4×3` for a tensor, `3 (int)` for a plain value, empty for an absent
    entry."""
    if entry is None:
        return ""
    if isinstance(entry, Tensor):
        return f"{entry.dtype} {'×'.join(map(str, entry.shape)) or 'scalar'}"
    text = f"{entry.value!r} ({type(entry.value).__name__})"
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"


def _side(contents: Contents) -> Side:
    tensors = contents.tensors
    return Side(
        str(contents.path), contents.form, len(tensors), len(contents.entries) - len(tensors), contents.nbytes,
        tuple(sorted(contents.foreign)),
    )  # fmt: skip
