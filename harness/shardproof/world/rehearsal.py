"""Checks before the first scenario that processes forked from the server can do what every rank needs.

A machine can refuse ranks in ways that look like a library's crash: the first backward pass of a forked process
raises, ranks cannot reach each other over loopback, a container has no shared memory. So the warm server forks two
children that do nothing but try, one need after the other. If one of them fails, the server ends with what was needed,
what happened and what to do about it, and every scenario is `unknown` (exit status 3): the library under test had no
part in it.

*Verifies*: that a forked child can run a backward pass on the scenarios' device, write temporary files, create POSIX
semaphores and share memory, and reach another child through gloo.
*Does not verify*: that there is enough of anything (memory, disk, processes) for a large world.
"""

from __future__ import annotations

import mmap
import multiprocessing
import os
import signal
import socket
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from shardproof.world import devices, group, process, wire

WORLD = 2
PATIENCE_S = 60.0
"""How long the two children may take; where the machine lets them wait for a CPU, longer (see `_longest_s`)."""


class UnfitError(Exception):
    """Ranks cannot run on this machine, or not forked from this server. The message says why, and the remedy."""


@dataclass(frozen=True)
class Seat:
    """What a child tries with. device: of the scenarios. folder: where the ranks' files will be. shared: memory that
    the children share, one byte a rank. store_fd, store_port: a listening socket for the group's store."""

    rank: int
    device: str
    folder: Path
    shared: mmap.mmap
    store_fd: int
    store_port: int


@dataclass(frozen=True)
class Need:
    """One thing that every rank needs. check: raises whatever it raises where the thing cannot be had. remedy: for
    the reader."""

    name: str
    check: Callable[[Seat], None]
    remedy: str


def prove(device: str, folder: Path) -> None:
    """Fork two children and have them try everything in `NEEDS`, in order.

    Args:
        device: `cpu` or `cuda`, of the scenarios that this server will run. folder: where ranks will write.

    Raises:
        UnfitError: a child could not do something that ranks need.
    """
    ours, theirs = wire.packet_pair()
    shared = mmap.mmap(-1, WORLD)
    try:
        with ours, theirs, socket.create_server(("127.0.0.1", 0)) as store:
            port = store.getsockname()[1]
            seats = [Seat(rank, device, folder, shared, store.fileno(), port) for rank in range(WORLD)]
            children = [process.fork(lambda seat=seat: _try_all(seat, theirs)) for seat in seats]  # type: ignore[misc]
            theirs.close()
            _hear(ours, children)
    except OSError as error:
        raise UnfitError(
            f"no process can be forked, or no socket opened on 127.0.0.1: {error}; raise the limits of processes and "
            "open files (`ulimit -u`, `ulimit -n`), and bring loopback up (`ip link set lo up`)"
        ) from error


def summary(payload: bytes) -> bytes:
    """Worker entry: what a server that started has proved."""
    return f"ready: forked processes can have {', '.join(need.name for need in NEEDS)}".encode()


def _hear(channel: socket.socket, children: list[int]) -> None:
    """Wait until both children are done, or one says what it lacks; none of them is left alive.

    Raises:
        UnfitError: one lacks something, died, or did not come to an end.
    """
    trying: dict[int, str] = {}
    give_up, done = time.monotonic() + PATIENCE_S, 0
    try:
        while done < WORLD:
            channel.settimeout(max(give_up - time.monotonic(), 0.001))
            try:
                message, _ = wire.receive(channel)
            except TimeoutError:
                starved = max(map(process.starved_s, children))
                if starved > PATIENCE_S / 2 and time.monotonic() < give_up + 4 * PATIENCE_S:
                    give_up += starved
                    continue
                raise _unfit(trying, f"it did not end within {PATIENCE_S:.0f} s") from None
            if message is None:
                raise _unfit(trying, "the process ended without a word")
            if "lacks" in message:
                raise _unfit({0: message["lacks"]}, message["error"])
            trying[message["rank"]] = message["tries"]
            done += message["tries"] == ""
    finally:
        for pid in children:
            os.kill(pid, signal.SIGKILL)
        for pid in children:
            os.waitpid(pid, 0)


def _unfit(trying: dict[int, str], what: str) -> UnfitError:
    """The error about the need that the child furthest behind was at."""
    behind = next((need for need in NEEDS if need.name in trying.values()), NEEDS[0])
    return UnfitError(f"a process forked from the warm server cannot have {behind.name}: {what}\n{behind.remedy}")


def _try_all(seat: Seat, channel: socket.socket) -> None:
    for need in NEEDS:
        wire.send(channel, {"rank": seat.rank, "tries": need.name})
        try:
            need.check(seat)
        except BaseException as error:
            wire.send(channel, {"lacks": need.name, "error": f"{type(error).__name__}: {str(error)[:2000]}"})
            os._exit(1)
    wire.send(channel, {"rank": seat.rank, "tries": ""})


def _run_backward(seat: Seat) -> None:
    import torch

    if seat.device == "cuda":
        torch.cuda.init()  # type: ignore[no-untyped-call]
    weight = torch.ones(2, device=seat.device, requires_grad=True)
    (weight * 3).sum().backward()  # type: ignore[no-untyped-call]
    if weight.grad is None or weight.grad.tolist() != [3.0, 3.0]:
        raise RuntimeError(f"the gradient of 3w is {weight.grad}")


def _write_temporary(seat: Seat) -> None:
    for folder in dict.fromkeys((str(seat.folder), tempfile.gettempdir())):
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            file.write(b"rank")
            file.flush()


def _share_memory(seat: Seat) -> None:
    with multiprocessing.get_context("fork").Lock():  # a POSIX semaphore, which needs /dev/shm
        seat.shared[seat.rank] = 1
    give_up = time.monotonic() + PATIENCE_S
    while not all(seat.shared[rank] for rank in range(WORLD)):
        if time.monotonic() > give_up:
            raise TimeoutError("what the other process wrote does not arrive")
        time.sleep(0.001)


def _talk(seat: Seat) -> None:
    import torch
    import torch.distributed as dist

    where = devices.Seat(None, devices.GLOO, "")
    group.join(seat.rank, WORLD, where, seat.store_port, seat.store_fd if seat.rank == 0 else None, PATIENCE_S)
    total = torch.tensor([seat.rank + 1.0])
    dist.all_reduce(total)
    if total.item() != 3.0:
        raise RuntimeError(f"the ranks' 1 and 2 add up to {total.item()}")


NEEDS = (
    Need(
        "a backward pass",
        _run_backward,
        "Remedy: something that was imported before the fork has started autograd's device threads, which no forked "
        "process can use: a plugin, a .pth file, sitecustomize. Try without `--plugin`, or give the ranks another "
        "interpreter (`--python PATH`), such as one with the CPU build of torch.",
    ),
    Need(
        "temporary files",
        _write_temporary,
        "Remedy: point TMPDIR to a folder that can be written and has space, and free some in /dev/shm.",
    ),
    Need(
        "shared memory",
        _share_memory,
        "Remedy: /dev/shm must be there and writable; in a container, start it with `--shm-size=1g`.",
    ),
    Need(
        "gloo between two ranks",
        _talk,
        "Remedy: ranks talk over the loopback interface `lo`, 127.0.0.1: bring it up (`ip link set lo up`) and let no "
        "firewall or sandbox close it.",
    ),
)
"""In the order in which they are tried. The names stand in messages after `cannot have`."""
