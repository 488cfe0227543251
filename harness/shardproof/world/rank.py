"""A rank: one freshly forked process that runs a session of a scenario on a real system and writes what it saw.

1. It runs in the scenario's process group with its output in a file, and takes its device.
2. It joins a process group over loopback, and constructs the system's `RankSystem`.
3. For each operation of the session: it performs it, observes, and appends the packed records to its file.
4. It sends one message over a socket: that it is done, or its error. A full disk cannot swallow that.

Whose an error is, the library's or ours, is said right here, where its frames are (`shardproof.ownership`).
"""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import struct
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import BinaryIO, NoReturn

from shardproof.entry import resolve
from shardproof.faults.boundary import perform
from shardproof.loading import scenario_during
from shardproof.models import model_spec
from shardproof.observe.record import pack
from shardproof.ownership import asked_of_device, folders_of, is_ours, is_planted, with_callable
from shardproof.program import Op
from shardproof.protocol.registry import system_named
from shardproof.protocol.system import RankContext, RankSystem
from shardproof.world import devices, group, process, shapes, wire
from shardproof.world.job import STAGES, Job, RankError, shortened

DUMP_SIGNAL = signal.SIGUSR1  # makes a rank write its Python stack into its log
LENGTH = struct.Struct("<Q")
START, CONSTRUCT, OP, OBSERVE, RECORD, DONE = range(len(STAGES))


@dataclass(frozen=True)
class RankSeat:
    """What the supervisor gives a rank. channel: where its last word goes. store_fd: a listening socket bound to
    store_port, which rank 0 serves the group's store on."""

    job: Job
    rank: int
    world: int
    board: process.Board
    channel: socket.socket
    store_fd: int
    store_port: int


@dataclass
class _Place:
    """Where the rank is, for its error message and the progress board."""

    seat: RankSeat
    op: Op | None = None
    stage: int = START

    def enter(self, stage: int, op: Op | None = None) -> None:
        self.op, self.stage = op, stage
        self.seat.board.mark(self.seat.rank, op.index if op else -1, stage)


def run_rank(seat: RankSeat) -> None:
    """Run the session and send one message: `done` or the error. Never returns normally into the caller's state."""
    faulthandler.register(DUMP_SIGNAL, file=2, all_threads=False)
    faulthandler.enable(file=2)  # an abort comes from a thread of a C++ library, and says nothing of Python's
    place = _Place(seat)
    place.enter(START)
    status = 0
    try:
        _run(seat, place)
        wire.send(seat.channel, {"rank": seat.rank, "done": True})
        _stay()
    except BaseException as error:  # a library may raise SystemExit or DCP's CheckpointException, a BaseException
        status, raised_ns = 1, time.monotonic_ns()
        wire.send(seat.channel, {"rank": seat.rank, "error": vars(_described(error, place)), "at_ns": raised_ns})
    os._exit(status)


def _stay() -> NoReturn:
    """Stay until the supervisor, which has heard of every rank then, ends this process.

    A rank that is still making a group would lose this one otherwise: it may not have answered all of this rank's
    connections yet, and in rank 0 is the store of the process group.
    """
    while True:
        signal.pause()


def _run(seat: RankSeat, place: _Place) -> None:
    from shardproof.observe.ambient import Ambient

    shapes.begin(cold=seat.job.cold)
    where = _take_device(seat)
    timeout_s = seat.job.longest_s + 60  # our own deadline ends a hang, before gloo's does
    group.join(seat.rank, seat.world, where, seat.store_port, seat.store_fd if seat.rank == 0 else None, timeout_s)
    place.enter(CONSTRUCT)
    ops = seat.job.ops
    scenario = scenario_during(seat.job.scenario, ops[0])
    found, device = system_named(scenario.system), scenario.device
    context = RankContext(
        scenario, model_spec(scenario.model), ops[0].mesh, seat.rank, seat.job.directory, found.contract
    )
    factory: Callable[[RankContext], RankSystem] = resolve(found.entry(found.rank))
    if found.library:
        resolve(found.entry(found.library))(device)
    ambient = Ambient(scenario.seed, device, where.note)
    system = factory(context)
    place.enter(RECORD)
    with seat.job.observation(seat.rank).open("wb", buffering=0) as file:
        for op in ops:
            place.enter(OP, op)
            perform(system, op, context)
            if seat.job.quiet and op is not ops[-1]:
                continue
            place.enter(OBSERVE, op)
            around = () if found.judge_entry else ambient.records(op, seat.rank)  # whose rank looks for itself
            blob = pack([*around, *system.observe(op)])
            place.enter(RECORD, op)
            _append(file, blob)
    shapes.end(seat.job.shapes if seat.rank == 0 else None)
    place.enter(DONE)


def _append(file: BinaryIO, blob: bytes) -> None:
    data = memoryview(LENGTH.pack(len(blob)) + blob)
    while data:
        data = data[file.write(data) :]


def _take_device(seat: RankSeat) -> devices.Seat:
    """The rank's GPU, made current; nothing on the CPU.

    Raises:
        RuntimeError: CUDA was initialised before the fork, or cannot be here.
    """
    device, mesh = seat.job.scenario.device, seat.job.ops[0].mesh
    if device == "cpu":
        return devices.seat(device, seat.rank, mesh, ())
    import torch

    torch.cuda.init()  # type: ignore[no-untyped-call]
    names = tuple(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
    where = devices.seat(device, seat.rank, mesh, names)
    torch.cuda.set_device(where.index)
    return where


def _described(error: BaseException, place: _Place) -> RankError:
    text = "".join(traceback.format_exception(error))
    error, frames = _root_cause(error)
    scenario = place.seat.job.scenario
    system = system_named(scenario.system)
    asked = asked_of_device(frames) if system.emulated and scenario.device == "cpu" else ""
    ours = place.stage == OBSERVE or bool(asked) or is_ours(error, frames, folders_of(system.home))
    message = with_callable(str(error)) if ours and isinstance(error, TypeError) else str(error)
    if asked:
        message = f"the emulated device lacks what {asked} asks of it: {message}"
    return RankError(
        rank=place.seat.rank,
        op_index=place.op.index if place.op else -1,
        op=place.op.kind if place.op else "",
        stage=STAGES[place.stage],
        type=type(error).__qualname__,
        message=shortened(message),
        errno=error.errno if isinstance(error, OSError) else None,
        traceback=shortened(text),
        ours=ours,
        planted=is_planted(error),
    )


def _root_cause(error: BaseException) -> tuple[BaseException, traceback.StackSummary]:
    """What a rank really raised, and where: DCP wraps the errors of all ranks into one, whose `failures` has for each
    rank the error and the frames that it came from."""
    failures = getattr(error, "failures", None)
    if isinstance(failures, dict) and failures:
        wrapped, *frames = failures[min(failures)]
        if isinstance(wrapped, BaseException) and frames and isinstance(frames[0], traceback.StackSummary):
            return wrapped, frames[0]
    return error, traceback.extract_tb(error.__traceback__)
