"""A walk three times: with cold ranks, with ranks that remember within a run, and again with what that run has kept.
What does each take, and do ranks observe the same, bit for bit?

Cold ranks ask torch for all that others remember from earlier ranks (`harness/shardproof/world/shapes.py`) and from
earlier runs (`shapes_kept.py` beside it). Every observation of a scenario has a digest in the run's results; a digest
that differs is named, and the status is 1. What earlier runs of yours have kept is neither used nor changed.
"""

from __future__ import annotations

import argparse
import os
import resource
import sqlite3
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from shardproof.folders import CACHE_VARIABLE, cache_root
from shardproof.world.shapes import COLD


class Walk(NamedTuple):
    """What a walk took, in seconds of the clock and of all processors, and scenario → digest of what was observed."""

    clock_s: float
    processors_s: float
    digests: dict[str, str]


def cache_in(scratch: Path) -> Path:
    """A cache folder that has the installed releases of the user's own, and nothing of what is kept."""
    folder = scratch / "cache"
    folder.mkdir()
    for name in ("overlays", "walks"):
        (cache_root() / name).mkdir(parents=True, exist_ok=True)
        (folder / name).symlink_to((cache_root() / name).resolve())
    return folder


def walk(system: str, sample: list[str], out: Path, cache: Path, *, cold: bool) -> Walk:
    """Walk over a system's cured nightly."""
    command = ["run", "nightly", "--system", f"{system}@+cured", *sample, "--known", "--out", str(out), "-j", "2"]
    environment = {name: value for name, value in os.environ.items() if name != COLD}
    environment |= {CACHE_VARIABLE: str(cache), **({COLD: "1"} if cold else {})}
    before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run([sys.executable, "-m", "shardproof", *command], env=environment)
    after, clock_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter() - begun
    if done.returncode not in (0, 1):
        raise SystemExit(f"the walk ended with {done.returncode}")
    processors_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    with sqlite3.connect(out / "results.sqlite") as results:
        digests = dict(results.execute("SELECT scenario_id, digest FROM observations"))
    return Walk(clock_s, processors_s, digests)


def main() -> int:
    """Walk, and compare; 1 where a digest differs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--system", default="torch-fsdp2")
    parser.add_argument("--sample", type=int, help="scenarios, drawn by --seed; all without it")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    sample = ["--sample", str(given.sample), "--seed", str(given.seed)] if given.sample else []
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        cache = cache_in(scratch)
        walks = {
            name: walk(given.system, sample, scratch / name.replace(" ", "-"), cache, cold=name == "cold")
            for name in ("cold", "remembering", "the next night")
        }
    cold, *others = walks.values()
    apart = sorted({name for each in others for name in cold.digests if each.digests.get(name) != cold.digests[name]})
    for name, each in walks.items():
        print(f"{name:16} {each.clock_s:6.0f} s by the clock, {each.processors_s:6.0f} s of processors")
    print(f"{len(cold.digests) - len(apart)} of {len(cold.digests)} scenarios have the same observations, bit for bit")
    print(*apart, sep="\n")
    return int(bool(apart) or any(each.digests.keys() != cold.digests.keys() for each in others))


if __name__ == "__main__":
    sys.exit(main())
