"""The expected states of the random generators that dropout draws from, live and in checkpoints.

A model's modules say which stream their dropout draws from (`shardproof.models`, `ModuleSpec.draws`). A stream has one
generator for each of its coordinates: `tensor` one for each tensor-parallel rank, `data` one for each data-parallel
rank; `rank`, which no model names, has one for every rank, for libraries that seed all that a rank has in that way.
What becomes of a generator follows from the program: a build seeds it, a forward draws, a load gives back what was live
at the save, unless the stream has another number of coordinates now. For example, after `build step step save` with one
microbatch the generator of rank 1's stream `tensor` was seeded with its coordinate's seed, and two forwards have drawn
from it.

*Verifies* nothing by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import NamedTuple

from shardproof.models import model_spec
from shardproof.observe.generators import KEEP, state_value
from shardproof.observe.logical import Key, Logical, Value
from shardproof.observe.record import LIVE, WRITTEN
from shardproof.program import FORWARDS, NO_CHECKPOINT, TAKES, WRITES, Op, expand
from shardproof.scenario import Mesh, Scenario


class Drawn(NamedTuple):
    """A generator: the seed that it was given, and how many forwards have drawn from it since."""

    seed: int
    forwards: int


class Held(NamedTuple):
    """A stream after an operation: the generators of its coordinates, of each rank the number of its coordinate, and
    after one that completed a checkpoint the generators of the coordinates as they are in that."""

    op: Op
    places: tuple[Drawn, ...]
    at: tuple[int, ...]
    saved: tuple[Drawn, ...]


def follow(
    stream: str, scenario: Scenario, ops: tuple[Op, ...], unchanged: Callable[[Mesh], int] | None = None
) -> Iterator[Held]:
    """One stream after every operation.

    unchanged: what of a mesh must be the same at a load as at the save, or else the load leaves generators alone; None
    for the number of the stream's coordinates.
    """
    forwards, seed, halfway = 0, 0, False
    saved: dict[int, tuple[int, int, int]] = {}  # checkpoint → what is unchanged, seed, forwards
    for op in ops:
        at = _coordinates(stream, op.mesh, scenario.expert_parallel)
        count = max(at) + 1
        same = unchanged(op.mesh) if unchanged else count
        if op.kind == "build":
            forwards, seed, halfway = 0, scenario.seed % 2**31 + 1000 * op.init_seed, False
        elif op.kind in FORWARDS:
            forwards += 1 if op.kind == "accumulate" else scenario.microbatches - halfway
            halfway = op.kind == "accumulate"
        elif op.kind in TAKES:
            saved[op.checkpoint] = (same, seed, forwards)
        elif op.kind == "save_kept":
            saved[op.checkpoint] = saved[NO_CHECKPOINT]
        elif op.kind in ("load", "recall") and saved[op.checkpoint][0] == same:
            _, seed, forwards = saved[op.checkpoint]
        places = tuple(Drawn(_seed(stream, seed, place, op.mesh.tp), forwards) for place in range(count))
        written: tuple[Drawn, ...] = ()
        if op.kind in WRITES:
            _, own, then = saved[op.checkpoint]
            written = tuple(Drawn(_seed(stream, own, place, op.mesh.tp), then) for place in range(count))
        yield Held(op, places, tuple(at), written)


def torch_streams(scenario: Scenario, *, device: bool = False) -> Logical:
    """The states of a torch script's generators, live on every rank and in what saves wrote. The stream `replicated` is
    torch's default generator, which `shardproof.observe.ambient` records as well.

    device: they are all of the emulated device, whose default generator is another one.
    """
    model, expected, ops = model_spec(scenario.model), Logical(), expand(scenario)
    for stream in {module.draws for module in model.modules if module.draws}:
        sizes = tuple(module.params[0].numel for module in model.modules if module.draws == stream)
        names = (stream, "torch") if stream == "replicated" and not device else (stream,)
        for op, places, at, saved in follow(stream, scenario, ops):
            states = [state_of(place, sizes, device=device) for place in places]
            for rank, place in enumerate(at):
                expected |= {Key(op.index, LIVE, "rng", f"rank{rank}.{name}"): states[place] for name in names}
            for number, drawn in enumerate(saved):
                expected[Key(op.index, WRITTEN, "rng", f"rank0.{stream}.{number}")] = state_of(
                    drawn, sizes, device=device
                )
    return expected


@lru_cache(maxsize=4096)
def state_of(drawn: Drawn, sizes: tuple[int, ...], *, device: bool = False) -> Value:
    """The state of a generator from which each forward drew so many numbers for each module, in their order.

    device: it is the emulated device's, which has other numbers for a seed.
    """
    import torch

    from shardproof.emulation.generator import DeviceGenerator

    generator = (DeviceGenerator() if device else torch.Generator()).manual_seed(drawn.seed)
    for _ in range(drawn.forwards):
        for size in sizes:
            torch.empty(size).bernoulli_(KEEP, generator=generator)
    return state_value(generator.get_state().numpy().tobytes())


def _coordinates(stream: str, mesh: Mesh, expert_parallel: int) -> list[int]:
    """Of every rank the number of its place among those that have a stream of their own."""

    def place(dp: int, tp: int) -> int:
        match stream:
            case "tensor":
                return tp
            case "expert":
                return dp % expert_parallel * mesh.tp + tp
            case "data":
                return dp
            case "rank":
                return dp * mesh.tp + tp
        return 0

    return [place(mesh.dp_index(rank), mesh.coordinate(rank)[2]) for rank in range(mesh.world)]


def _seed(stream: str, seed: int, coordinate: int, tp: int) -> int:
    group, within = divmod(coordinate, tp)
    own = {
        "replicated": 0, "tensor": 2718 + coordinate, "expert": 1024 + 100 * group + within, "data": 10 * coordinate,
        "rank": coordinate,
    }  # fmt: skip
    return seed + own[stream]
