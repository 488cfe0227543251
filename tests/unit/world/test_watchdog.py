"""A server that is stopped, or silent, is ended; one that works, or sleeps with the whole machine, is not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from shardproof.world import process, watchdog


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as running:
        yield running
        running.kill()


def ended(sleeper: subprocess.Popen[bytes]) -> int:
    return sleeper.wait(30)


def test_a_stopped_server_is_killed(sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "STOPPED_S", 0.05)
    os.kill(sleeper.pid, signal.SIGSTOP)
    assert "stopped by a signal" in watchdog.watch(sleeper.pid, threading.Event(), lambda s: "", 0.01)
    assert ended(sleeper) == -signal.SIGKILL


def test_a_short_stop_is_forgiven(sleeper: subprocess.Popen[bytes]) -> None:
    """Each look counts for itself: what went on in between begins anew."""
    over = threading.Event()
    looks = 0

    def late(passed_s: float) -> str:
        nonlocal looks
        looks += 1
        os.kill(sleeper.pid, signal.SIGCONT if looks % 3 == 0 else signal.SIGSTOP)
        if looks > 40:
            over.set()
        return ""

    assert not watchdog.watch(sleeper.pid, over, late, 0.01)
    os.kill(sleeper.pid, signal.SIGCONT)
    assert sleeper.poll() is None


def test_a_server_that_owes_an_answer_is_killed(sleeper: subprocess.Popen[bytes]) -> None:
    left_s = [0.05]

    def late(passed_s: float) -> str:
        left_s[0] -= passed_s
        return "a job had no answer" if left_s[0] <= 0 else ""

    assert watchdog.watch(sleeper.pid, threading.Event(), late, 0.01) == "a job had no answer"
    assert ended(sleeper) == -signal.SIGKILL


def test_a_server_that_has_ended_is_left_alone() -> None:
    over = threading.Event()
    over.set()
    assert not watchdog.watch(os.getpid(), over, lambda s: "never asked", 0.01)


def test_the_states_of_a_process() -> None:
    assert not process.is_stopped(os.getpid())
    assert not process.is_stopped(1 << 22)
    before = process.cpu_s(os.getpid())
    until = time.process_time() + 0.1
    while time.process_time() < until:
        pass
    assert process.cpu_s(os.getpid()) >= before + 0.05
    assert process.cpu_s(1 << 22) == 0.0
