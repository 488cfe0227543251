"""Enumerates every folder state that a crash during a save may leave, derived from the record of the save.

The rules are the weakest that POSIX and fsync(2) allow, not those of one file system: what a save left to luck is
found, also where ext4 in its usual mode would have been lucky. A crash comes between two steps, at the *crash point*;
of the steps before it, those that a sync had put on disk are there, and of the others any part may be, as long as
nothing is on disk without what it needs (`steps.needs`). That is exponentially many folders, so they are bounded:

* `killed`: the process dies and the machine lives. Every step before the crash point is there: all prefixes.
* `apart`: of several ranks, all die at once and the machine lives. Within a stage of a save, where no rank waits for
  another, each may be anywhere. Bounded: one of them is anywhere, and each other one has done all of the stage or
  nothing of it. (`killed` has the ranks one after the other.)
* `torn`: as `killed`, and of the write that was going on its first block, half, or all but the last block.
* `lost`: the machine dies. Of what was not synced: nothing; all but the bytes of one file, of all files or of one
  folder's names; or bytes that are zeros, for one file or for all.
* `reordered`: the machine dies. Of what was not synced, all but at most two steps and what needs them, or at most two
  steps and what they need; also one write in part. Only the latest 45 steps are left out or kept so. Pairs are taken
  where reordering ends: right before a sync, and at the end of the save. CrashMonkey (Mohan et al., OSDI 2018) bounds
  its crash states in the same way, by the barriers and by how many requests change places.

Folders with equal content are one state, under the first label that leads to it.

*Verifies* nothing; it is a pure function.
*Does not know*: blocks of metadata that are torn, and devices that lie about a flush.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from shardproof.resilience.events import Trace, digest_of
from shardproof.resilience.steps import ALL, ZEROS, Data, Name, Steps, Sync, durable, needs

BLOCK = 4096
"""Bytes that a device writes as one."""
MOST_LOOSE = 45
"""So many steps at most are left out or kept alone and in pairs, the latest of an epoch; 45 give 990 pairs."""

KINDS = ("killed", "apart", "torn", "lost", "reordered")


@dataclass(frozen=True)
class State:
    """One folder that a crash may leave.

    Attributes:
        label: kind, crash point and what is special, such as `lost@17-bytes-3`; unique, and the same for equal traces.
        kept: index of each step that reached the disk → how much of it (`steps.result`).
        crash: how many steps had been issued; of `apart` the step that one rank would have made next.
        tree: what is on disk.
    """

    label: str
    kind: str
    crash: int
    kept: Mapping[int, int]
    tree: Mapping[str, bytes | None]


def crash_states(trace: Trace, kinds: Sequence[str] = KINDS) -> Iterator[State]:
    """Every state within the bounds above of these kinds, each content once, prefixes first."""
    world = _World(trace)
    seen: set[bytes] = set()
    for label, kind, crash, kept in world.every(kinds):
        tree = world.result(kept)
        if (digest := digest_of(tree)) not in seen:
            seen.add(digest)
            yield State(label, kind, crash, kept, tree)


def states_called(labels: Collection[str], trace: Trace, kinds: Sequence[str] = KINDS) -> Iterator[State]:
    """The states of these labels, in the order of `crash_states`, without working out what is in the others."""
    world = _World(trace)
    for label, kind, crash, kept in world.every(kinds):
        if label in labels:
            yield State(label, kind, crash, kept, world.result(kept))


Labelled = Iterator[tuple[str, dict[int, int]]]


class _World:
    """The steps of a recorded save, with the dependencies between steps: `needs` lists for each step the earlier steps
    that must reach the disk first."""

    def __init__(self, trace: Trace) -> None:
        built = Steps(trace)
        self.result = built.result
        self.steps = built.steps
        self.calls = trace.calls
        self.needs = needs(self.steps)
        self.needed_by: list[set[int]] = [set() for _ in self.steps]
        for index, before in enumerate(self.needs):
            for earlier in before:
                self.needed_by[earlier].add(index)

    def every(self, kinds: Sequence[str] = KINDS) -> Iterator[tuple[str, str, int, dict[int, int]]]:
        """Label, kind, crash point and what is kept, of each state; some have equal content."""
        for kind in kinds:
            for crash in range(len(self.steps) + 1):
                for label, kept in self.of_kind(kind, crash):
                    yield f"{kind}@{crash}{label}", kind, crash, kept

    def of_kind(self, kind: str, crash: int) -> Labelled:
        everything = {i: ALL for i in range(crash) if not isinstance(self.steps[i], Sync)}
        match kind:
            case "killed":
                yield "", everything
            case "apart":
                yield from self._apart(crash)
            case "torn":
                yield from self._torn(crash, everything)
            case "lost":
                yield from self._lost(crash, everything)
            case "reordered":
                yield from self._reordered(crash, everything)

    def _apart(self, crash: int) -> Labelled:
        if crash >= len(self.calls):
            return
        here = self.calls[crash]
        before = [i for i, call in enumerate(self.calls) if call.stage < here.stage]
        before += [i for i in self._of_rank(here.stage, here.rank) if i < crash]
        others = sorted({call.rank for call in self.calls if call.stage == here.stage} - {here.rank})
        for count in range(len(others) + 1):
            for done in combinations(others, count):
                kept = [*before, *(i for rank in done for i in self._of_rank(here.stage, rank))]
                label = f"-with-{'-'.join(map(str, done))}" if done else "-alone"
                yield label, {i: ALL for i in kept if not isinstance(self.steps[i], Sync)}

    def _of_rank(self, stage: int, rank: int) -> list[int]:
        return [i for i, call in enumerate(self.calls) if (call.stage, call.rank) == (stage, rank)]

    def _torn(self, crash: int, everything: dict[int, int]) -> Labelled:
        if crash < len(self.steps):
            for size in sizes_of(self.steps[crash]):
                yield f"-{size}", {**everything, crash: size}

    def _lost(self, crash: int, everything: dict[int, int]) -> Labelled:
        loose = self._loose(crash, everything)
        yield "-all", self._without(everything, loose)
        writes = [i for i in loose if isinstance(s := self.steps[i], Data) and s.size is None]
        files = sorted({s.file for i in loose if isinstance(s := self.steps[i], Data)})
        for file in files:
            own = [i for i in loose if isinstance(s := self.steps[i], Data) and s.file == file]
            of_writes = [i for i in own if i in writes]
            yield f"-bytes-{file}", self._without(everything, of_writes)
            yield f"-changes-{file}", self._without(everything, own)
            yield f"-zeros-{file}", {**everything, **dict.fromkeys(of_writes, ZEROS)}
        yield "-bytes", self._without(everything, writes)
        yield "-zeros", {**everything, **dict.fromkeys(writes, ZEROS)}
        names = [i for i in loose if isinstance(self.steps[i], Name)]
        yield "-names", self._without(everything, names)
        folders = {slot[0] for i in names if isinstance(s := self.steps[i], Name) for slot, _ in s.slots}
        for folder in sorted(folders):
            of_folder = [i for i in names if isinstance(s := self.steps[i], Name) and _in(s, folder)]
            yield f"-names-{folder}", self._without(everything, of_folder)

    def _reordered(self, crash: int, everything: dict[int, int]) -> Labelled:
        loose = self._loose(crash, everything)
        sure = {i: ALL for i in everything if i not in loose}
        latest = sorted(loose)[-MOST_LOOSE:]
        for one in latest:
            yield f"-less-{one}", self._without(everything, [one])
            yield f"-only-{one}", self._with(sure, [one])
            for size in sizes_of(self.steps[one]):
                yield f"-part-{one}-{size}", {**everything, one: size}
        if crash == len(self.steps) or isinstance(self.steps[crash], Sync):
            for two in combinations(latest, 2):
                yield f"-less-{two[0]}-{two[1]}", self._without(everything, two)
                yield f"-only-{two[0]}-{two[1]}", self._with(sure, two)

    def _loose(self, crash: int, everything: dict[int, int]) -> list[int]:
        """The steps that no sync had put on disk."""
        sure = durable(self.steps, crash, self.needs)
        return [index for index in everything if index not in sure]

    def _without(self, everything: Mapping[int, int], dropped: list[int] | tuple[int, ...]) -> dict[int, int]:
        """The steps that reach the disk when the dropped steps, and every step that depends on a dropped step, do
        not."""
        gone = set(dropped).union(*(self.needed_by[index] for index in dropped))
        return {index: amount for index, amount in everything.items() if index not in gone}

    def _with(self, sure: Mapping[int, int], added: list[int] | tuple[int, ...]) -> dict[int, int]:
        """The steps on disk when the added steps reach the disk early: the durable steps, the added steps and their
        prerequisites."""
        return {**sure, **dict.fromkeys(set(added).union(*(self.needs[index] for index in added)), ALL)}


def sizes_of(step: object) -> list[int]:
    """How many bytes of a write may reach the disk alone: its first block, half of it, all but its last block."""
    if not isinstance(step, Data) or step.size is not None or len(step.data) < 2:
        return []
    total = len(step.data)
    return sorted({size for size in (BLOCK, total // 2, total - BLOCK) if 0 < size < total})


def _in(step: Name, folder: int) -> bool:
    return any(slot[0] == folder for slot, _ in step.slots)
