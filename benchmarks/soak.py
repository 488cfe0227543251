"""Thousands of scenarios through one fork server, incidents among them: does anything accumulate?

Every tenth scenario hangs, is killed, raises or leaves a daemon behind. The table shows what the server, this process
and the scratch folder hold as scenarios go by; `leaks` says what grew. `--system torch-fsdp2` runs a real library
between the incidents, megatron-core too (saving through dist_checkpointing, which leaves a manager process);
the default is a stub.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from pathlib import Path

from shardproof.scenario import Scenario
from shardproof.world.job import Job, JobOutcome
from shardproof.world.server import ForkServer

from benchmarks.servers import server_options

INCIDENTS = ("hang", "kill", "raise", "daemon")
EVERY = 10
RAM_DISK = Path("/dev/shm")
RSS_SLACK_MIB = 30
FD_SLACK = 2


@dataclass(frozen=True)
class Holdings:
    """What is held at one moment. Sizes in MiB; descendants, zombies included, are those of the server."""

    scenarios: int
    server_fds: int
    server_threads: int
    server_rss_mib: int
    descendants: int
    parent_fds: int
    parent_rss_mib: int
    files: int


def holdings(scenarios: int, server: ForkServer, scratch: Path) -> Holdings:
    pid = server.pid
    assert pid
    return Holdings(
        scenarios,
        len(list(Path(f"/proc/{pid}/fd").iterdir())),
        len(list(Path(f"/proc/{pid}/task").iterdir())),
        _rss_mib(str(pid)),
        len(descendants(pid)),
        len(list(Path("/proc/self/fd").iterdir())),
        _rss_mib("self"),
        len(list(scratch.iterdir())),
    )


def leaks(first: Holdings, last: Holdings) -> list[str]:
    """What grew between two moments at which no scenario ran; empty when nothing did."""
    allowed = {"server_rss_mib": RSS_SLACK_MIB, "parent_rss_mib": RSS_SLACK_MIB, "parent_fds": FD_SLACK}
    return [
        f"{f.name}: {getattr(first, f.name)} -> {getattr(last, f.name)}"
        for f in fields(Holdings)[1:]
        if getattr(last, f.name) > getattr(first, f.name) + allowed.get(f.name, 0)
    ]


def soak(scenarios: int, jobs: int, system: str, say: Callable[[str], None]) -> tuple[Holdings, Holdings, list[str]]:
    """Run that many; what was held before and after, and the outcomes that were not as expected."""
    plugins = ["tests.unit.world_stub"]
    wrong: list[str] = []
    counts: Counter[str] = Counter()
    with (
        tempfile.TemporaryDirectory(dir=RAM_DISK if RAM_DISK.is_dir() else None) as folder,
        ForkServer(plugins=plugins, **server_options(_scenario(system))) as server,
        ThreadPoolExecutor(jobs) as threads,
    ):
        scratch = Path(folder)

        def one(number: int) -> None:
            fault = INCIDENTS[number // EVERY % len(INCIDENTS)] if number % EVERY == 0 else ""
            outcome = _run(server, scratch / str(number), system, fault)
            counts[fault or "clean"] += 1
            problem = _unexpected(fault, outcome, managers=1 if system == "megatron-core" else 0)
            if problem:
                wrong.append(f"scenario {number} ({fault or 'clean'}): {problem}")

        list(threads.map(one, range(2 * EVERY)))  # whatever is allocated once
        first = last = holdings(0, server, scratch)
        say("  ".join(f"{f.name:>14}" for f in fields(Holdings)))
        say(_row(first))
        chunk = max(1, scenarios // 10)
        for start in range(0, scenarios, chunk):
            list(threads.map(one, range(start, min(start + chunk, scenarios))))
            last = holdings(min(start + chunk, scenarios), server, scratch)
            say(_row(last))
    say(", ".join(f"{name} {count}" for name, count in sorted(counts.items())))
    return first, last, wrong


def _scenario(system: str) -> Scenario:
    """What runs between the incidents, on two ranks."""
    program = "build step" if system == "stub" else "build step step save build load step"
    axes = {"system": system, "mesh": "1x2x1", "program": program}
    if system == "megatron-core":
        axes |= {"sharding": "zero1", "dtype": "bf16/master=fp32", "optimizer": "adamw/impl=multi_tensor"}
        axes |= {"checkpoint": "fully_reshardable"}
    return Scenario().with_axes(axes)


def _run(server: ForkServer, directory: Path, system: str, fault: str) -> JobOutcome:
    directory.mkdir()
    if fault:
        deadline_s = 5.0 if fault == "hang" else 120.0
        scenario = replace(_scenario("stub"), faults=(fault,))
    else:
        scenario, deadline_s = _scenario(system), 120.0
    try:
        return server.submit(Job(scenario, 0, directory, deadline_s)).result()
    finally:
        shutil.rmtree(directory)


def _unexpected(fault: str, outcome: JobOutcome, managers: int) -> str:
    """What is not as the fault should have it, or nothing. managers: processes that a clean session leaves behind."""
    as_expected = {
        "": outcome.ok and outcome.strays == managers,
        "hang": outcome.timed_out and len(outcome.stuck) == 2,
        "kill": outcome.died == ((1, "signal SIGKILL"),) and outcome.first_failed == 1,
        "raise": bool(outcome.errors) and outcome.first_failed == 1 and outcome.errors[0].type == "KeyError",
        "daemon": outcome.ok and outcome.strays == 1,
    }
    return "" if as_expected[fault] else repr(outcome)


def _row(held: Holdings) -> str:
    return "  ".join(f"{getattr(held, f.name):>14}" for f in fields(Holdings))


def _rss_mib(process: str) -> int:
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) >> 10
    return 0


def descendants(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            found += [child, *descendants(child)]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scenarios", type=int, default=2000)
    parser.add_argument("--system", choices=("stub", "torch-fsdp2", "megatron-core"), default="stub")
    parser.add_argument("-j", "--jobs", type=int, default=3)
    options = parser.parse_args()
    started = time.monotonic()
    first, last, wrong = soak(options.scenarios, options.jobs, options.system, lambda line: print(line, flush=True))
    print(f"{options.scenarios} scenarios in {time.monotonic() - started:.0f} s")
    grown = leaks(first, last)
    print("grew: " + "; ".join(grown) if grown else "nothing grew")
    for problem in wrong:
        print("unexpected:", problem)
    sys.exit(bool(grown or wrong))


if __name__ == "__main__":
    main()
