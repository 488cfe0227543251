"""Saves that are in flight while training goes on, and collectives that change places: on toys, in this process."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from shardproof.faults import overlap, reorder
from shardproof.faults.collectives import Collective
from shardproof.faults.ranks import Around
from shardproof.program import Op, expand
from shardproof.protocol.system import RankContext, RankSystem
from shardproof.scenario import Scenario

NAMES = ("a", "b", "c")


class Toy:
    """A stack that saves in a thread: copies of its tensors, or the tensors themselves. A step adds one to each.
    looks_back: the save reads its tensors once more when all are written. forks: it saves in a process."""

    def __init__(self, folder: Path, *, copies: bool, looks_back: bool = False, forks: bool = False) -> None:
        self.folder, self.copies, self.looks_back, self.forks = folder, copies, looks_back, forks
        self.tensors = {name: torch.zeros(2) for name in NAMES}

    def build(self, op: Op) -> None:
        """Nothing to do."""

    def step(self, op: Op) -> None:
        for tensor in self.tensors.values():
            tensor += 1

    def save(self, op: Op) -> None:
        content = {name: tensor.clone() if self.copies else tensor for name, tensor in self.tensors.items()}
        start = multiprocessing.get_context("fork").Process if self.forks else threading.Thread
        worker = start(target=self._write, args=(content,))
        worker.start()
        self.in_flight(worker.join)

    def in_flight(self, finish: Callable[[], None]) -> None:
        finish()

    def _write(self, content: dict[str, torch.Tensor]) -> None:
        for name, tensor in content.items():
            torch.save(tensor.detach(), self.folder / name)
        if self.looks_back:
            self.looked = [float(tensor.sum()) for tensor in content.values()]

    def saved(self) -> list[float]:
        return [float(torch.load(self.folder / name)[0]) for name in NAMES]


def driven(
    folder: Path,
    number: int,
    *,
    copies: bool,
    program: str = "build step save step",
    looks_back: bool = False,
    forks: bool = False,
    late: Callable[[int], Around] = overlap.late_read,
) -> tuple[list[float], bool]:
    """What a toy has saved, with the save held at its read of this number; whether that struck."""
    folder.mkdir()
    scenario, struck = Scenario(program=program), list[str]()
    toy = Toy(folder, copies=copies, looks_back=looks_back, forks=forks)
    told = SimpleNamespace(scenario=scenario, directory=folder, rank=0, struck=lambda: struck.append("held"))
    context, system, around = cast("RankContext", told), cast("RankSystem", toy), late(number)
    for op in expand(scenario):
        around(lambda op=op: getattr(toy, op.kind)(op), op, context, system)  # type: ignore[misc]
    return toy.saved(), bool(struck)


def test_a_copy_is_of_its_step_wherever_the_save_is_held(tmp_path: Path) -> None:
    runs = [driven(tmp_path / str(number), number, copies=True) for number in range(1, 5)]
    assert runs == [([1, 1, 1], True)] * 3 + [([1, 1, 1], False)]


def test_live_tensors_are_of_the_next_step_from_the_read_on_that_was_held(tmp_path: Path) -> None:
    runs = [driven(tmp_path / str(number), number, copies=False)[0] for number in range(1, 4)]
    assert runs == [[2, 2, 2], [1, 2, 2], [1, 1, 2]]


def test_a_process_has_the_memory_of_its_fork_and_without_a_copy_is_a_thread(tmp_path: Path) -> None:
    """torch is asked for one thread, as ranks are: more would not survive the fork."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        forked = driven(tmp_path / "forked", 2, copies=False, forks=True)[0]
        live = driven(tmp_path / "live", 2, copies=False, forks=True, late=overlap.late_read_of_live)[0]
    finally:
        torch.set_num_threads(threads)
    assert (forked, live) == ([1, 1, 1], [1, 2, 2])


@pytest.mark.parametrize("program", ["build step save", "build step save build step", "build step save save step"])
def test_a_save_that_no_step_follows_at_once_is_waited_for(tmp_path: Path, program: str) -> None:
    saved, held = driven(tmp_path / "x", 1, copies=False, program=program)
    assert held is program.endswith("save save step")
    assert saved == ([2, 2, 2] if held else [1, 1, 1])


def test_a_read_behind_everything_that_is_written_strikes_nothing(tmp_path: Path) -> None:
    runs = [driven(tmp_path / str(number), number, copies=False, looks_back=True) for number in range(1, 7)]
    assert [struck for _, struck in runs] == [True] * 3 + [False] * 3
    assert [saved for saved, _ in runs[3:]] == [[1, 1, 1]] * 3


def test_only_the_first_save_before_a_step_is_left_in_flight() -> None:
    twice = expand(Scenario(program="build save restart build load save step restart build load save step"))
    first = overlap._overlapped(
        Scenario(program="build save restart build load save step restart build load save step")
    )
    assert first == [op.index for op in twice if op.kind == "save"][1]
    assert overlap._overlapped(Scenario(program="build step save restart build load step")) is None


MEETING_S = 60.0
"""How long ranks on threads may wait for each other before a test has failed."""


class Ranks:
    """Ranks on threads of this process, with a save each: `r` reads the step that there is, `|` is a collective of all.
    A step is one, too. A save ends where its text does."""

    def __init__(self, folder: Path, saves: tuple[str, ...], number: int) -> None:
        self.saves, self.step = saves, [0] * len(saves)
        self.read: list[list[int]] = [[] for _ in saves]
        self.struck: set[int] = set()
        self._all_step = threading.Barrier(len(saves), timeout=MEETING_S)
        self._signs = [overlap._Signs(folder, rank) for rank in range(len(saves))]
        self._number = number
        for signs in self._signs:
            signs.folder.mkdir(parents=True)

    def run(self) -> list[list[int]]:
        """Of each save, with which step it read what it read."""
        ranks = [threading.Thread(target=self._trains, args=(rank,), daemon=True) for rank in range(len(self.saves))]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(2 * MEETING_S)
        assert not any(rank.is_alive() for rank in ranks), "a rank waits for good"
        return self.read

    def _trains(self, rank: int) -> None:
        signs = self._signs[rank]
        save = threading.Thread(target=self._saves, args=(rank, signs.reading(signs)), daemon=True)
        save.start()
        signs.wait_until_held()
        self._all_step.wait()
        self.step[rank] += 1
        signs.release()
        save.join()
        signs.end()

    def _saves(self, rank: int, reading: Path) -> None:
        reader = overlap._Reader(self._signs[rank], self._number, lambda: self.struck.add(rank))
        reader.saves = True
        for event in self.saves[rank]:
            if event == "r":
                reader.reads()
                self.read[rank].append(self.step[rank])
            else:
                reader.meets(SimpleNamespace(__name__="allgather_"), ())
        reading.unlink()


@pytest.fixture
def one_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every collective is one of two ranks."""
    monkeypatch.setattr(overlap, "_group", lambda *_: ("of/two", [0, 1]))


@pytest.mark.usefixtures("one_group")
@pytest.mark.parametrize("number", range(1, 9))
def test_a_save_that_waits_for_one_that_is_held_is_held_too(tmp_path: Path, number: int) -> None:
    ranks = Ranks(tmp_path, ("rr|rrr|r", "r||rr"), number)
    numbers = [1, 2, 3, 4, 5, 6], [1, 6, 7]
    assert ranks.run() == [[int(each >= number) for each in of_rank] for of_rank in numbers]
    assert ranks.struck == {rank for rank, of_rank in enumerate(numbers) if number in of_rank}


@pytest.mark.usefixtures("one_group")
@pytest.mark.parametrize(("number", "read"), [(1, [[1, 1], [1]]), (2, [[0, 1], [0]]), (3, [[0, 0], [0]])])
def test_a_save_that_is_over_is_not_waited_for(tmp_path: Path, number: int, read: list[list[int]]) -> None:
    assert Ranks(tmp_path, ("r|r", "r"), number).run() == read


class Handles:
    """Collectives that say when they are made, and give a handle as torch's operators do."""

    def __init__(self) -> None:
        self.made: list[str] = []
        self.struck = 0

    def one(self, name: str) -> Collective:
        def make(*_: Any) -> Any:
            self.made.append(name)
            return torch.zeros(1), ended()

        func = cast("Any", make)
        func.namespace, func._schema = "c10d", SimpleNamespace(returns=(1, 2))
        return Collective(func, (torch.zeros(1),), {}, 2, self._strikes)

    def _strikes(self) -> None:
        self.struck += 1


def ended() -> Any:
    from shardproof.faults.collectives import _ended

    return _ended()


def waited(made: Any) -> None:
    torch.distributed.Work.unbox(made[-1]).wait()


def test_two_that_are_under_way_at_once_end_in_the_other_order() -> None:
    calls, order = Handles(), reorder._Order(1)
    first, second = order.meet(calls.one("first")), order.meet(calls.one("second"))
    assert (calls.made, calls.struck) == (["second"], 1)
    waited(second)
    waited(first)
    order.meet(calls.one("third"))
    assert calls.made == ["second", "first", "third"], "each is made once, and the rest as they come"


def test_one_that_is_waited_for_at_once_changes_places_with_none() -> None:
    calls, order = Handles(), reorder._Order(1)
    waited(order.meet(calls.one("first")))
    second = order.meet(calls.one("second"))
    assert calls.made == ["first"]
    order.catch_up()
    waited(second)
    assert (calls.made, calls.struck) == (["first", "second"], 0)


def test_the_number_chooses_the_pair() -> None:
    calls, order = Handles(), reorder._Order(2)
    for name in ("first", "second", "third", "fourth"):
        order.meet(calls.one(name))
    assert (calls.made, calls.struck) == (["first", "third", "second", "fourth"], 1)


def _sums_of_two(rank: int, folder: str, relies: bool) -> None:
    """Two reductions under way at once, over gloo. relies: the first is taken to be over when the second is."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    first, second = torch.full((3,), 1.0 + rank), torch.full((3,), 10.0 * (1 + rank))
    struck = list[str]()
    told = SimpleNamespace(struck=lambda: struck.append("struck"), mesh=SimpleNamespace(world=2))
    seen = list[float]()

    def step() -> None:
        one, two = dist.all_reduce(first, async_op=True), dist.all_reduce(second, async_op=True)
        two.wait()
        if relies:
            seen.append(float(first[0]))
        one.wait()
        seen.extend((float(first[0]), float(second[0])))

    op = next(op for op in expand(Scenario(program="build step")) if op.kind == "step")
    reorder.exchanged(1)(step, op, cast("RankContext", told), cast("RankSystem", None))
    Path(folder, f"rank{rank}").write_text(f"{seen} {struck}")
    dist.destroy_process_group()


@pytest.mark.nightly
@pytest.mark.parametrize("relies", [False, True])
def test_over_gloo_two_reductions_change_places_and_come_to_the_same(tmp_path: Path, *, relies: bool) -> None:
    torch.multiprocessing.spawn(_sums_of_two, (str(tmp_path), relies), nprocs=2)
    for rank in range(2):
        early = [1.0 + rank] if relies else []
        assert (tmp_path / f"rank{rank}").read_text() == f"{[*early, 3.0, 30.0]} ['struck']"
