"""How much work things are, counted where it cannot vary: calls of our own functions, and modules that are imported.

Seconds depend on the machine and on who else uses it; on a busy one they double. Calls of functions under
`harness/shardproof/` do not, and they grow with what made things slow here before: a rule that is asked hundreds of
thousands of times, a table that is built again, a heavy import on a cold path. So a test (`tests/golden/test_work.py`)
compares these counts with those recorded in `tests/golden/work.toml`, and `make bench` prints them beside the seconds.

    python -m benchmarks.work             print what is counted beside what is recorded
    python -m benchmarks.work --renew     record what is counted

A record alone lets work grow a little with every renewal: planning a nightly once came from one million calls to more
than four within days, each step of it recorded. So a record may be renewed only with the reason in the commit, and
beside it stands a ceiling (`CEILINGS`), which `--renew` does not touch: so many calls for each scenario that is
planned. A space may grow, and with it the count, but the work for each of its scenarios may not.

Everything is counted in a process of its own, with a fixed hash seed, and nothing remembered from an earlier one.

*Verifies*: the number of calls of Python functions of ours, and the number of modules.
*Does not verify*: seconds, what numpy and torch do inside, and calls of methods that `dataclass` makes.
"""

from __future__ import annotations

import contextlib
import cProfile
import io
import os
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "tests" / "golden" / "work.toml"
RENEW = "python -m benchmarks.work --renew"
TOLERANCE = 0.1
"""How much more than recorded is too much, and how much less is worth recording."""

ENVIRONMENT = {"PYTHONHASHSEED": "0", "ATEN_CPU_CAPABILITY": "default", "OMP_NUM_THREADS": "1"}


def plan_nightly() -> int:
    """Calls of `shardproof plan nightly`, its imports included."""
    return calls(lambda: command("plan", "nightly"))


def plan_nightly_again() -> int:
    """The same once more, where what the walks came to is kept."""
    command("plan", "nightly")
    _forget()
    return calls(lambda: command("plan", "nightly"))


def _forget() -> None:
    """Drop the modules of ours, so that a second command imports and reads as much as it would in a new process."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "shardproof"]:
        del sys.modules[name]


def planned_nightly() -> int:
    """Scenarios of `shardproof plan nightly`."""
    from shardproof.space.files import load_space
    from shardproof.space.plan import make_plan

    return len(make_plan([load_space("nightly")]).scenarios)


def reference_scenario() -> int:
    """Calls of the scenario of `bench_reference`, after one like it, as in a run."""
    from shardproof.models import ZOO
    from shardproof.observe.assemble import assemble
    from shardproof.program import expand
    from shardproof.protocol.registry import contract_of
    from shardproof.reference import system as reference
    from shardproof.scenario import Scenario

    from benchmarks import bench_reference

    ZOO["bench12"] = bench_reference.bench_model()
    scenario = Scenario().with_axes(bench_reference.AXES)
    last = expand(scenario)[-1].index
    records = reference.run(*contract_of(scenario).resolve(scenario), observe_ops=(last,))
    truth, _ = assemble(record for record in records if record.where == "live")
    bench_reference.one(truth, (last,))
    return calls(lambda: bench_reference.one(truth, (last,)))


def judged_scenario() -> int:
    """Calls of judging a scenario of FSDP2, twin and reference included; the reference's records stand for the
    ranks'."""
    from shardproof.laboratory.judge import ResolvedScenario, judge
    from shardproof.reference import system as reference
    from shardproof.scenario import Scenario

    axes = {"system": "torch-fsdp2", "mesh": "1x2x1", "model": "twins", "dtype": "mixed", "program": "resume"}
    case = ResolvedScenario.from_scenario(Scenario().with_axes(axes))
    records = reference.run(case.inputs, case.placement)
    return calls(lambda: judge(case, records))


def modules_of(*words: str) -> Callable[[], int]:
    """Counts the modules that a command imports, beyond those of an interpreter without site packages, whose `.pth`
    files import what they like. A package that is not ours and not Python's counts as one, so that its releases make no
    difference."""

    def count() -> int:
        own = {"shardproof", *sys.stdlib_module_names}
        found = _imported("-m", "shardproof", *words) - _imported("-S", "-c", "pass")
        tops = {name: name.partition(".")[0] for name in found}
        return len({name if top in own else top for name, top in tops.items()})

    return count


def _imported(*words: str) -> set[str]:
    """The modules that a run of Python imports."""
    command = [sys.executable, "-X", "importtime", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    lines = (line for line in done.stderr.splitlines() if line.startswith("import time:"))
    return {line.rpartition("|")[2].strip() for line in lines} - {"imported package"}


MEASURES: Mapping[str, Mapping[str, Callable[[], int]]] = {
    "calls": {
        "plan nightly": plan_nightly,
        "plan nightly again": plan_nightly_again,
        "a scenario of the reference": reference_scenario,
        "judging a scenario of FSDP2": judged_scenario,
    },
    "modules": {
        "--help": modules_of("--help"),
        "list": modules_of("list"),
        "plan smoke": modules_of("plan", "smoke"),
    },
}
"""What is counted → of what → how."""

CEILINGS: Mapping[tuple[str, str], tuple[int, Callable[[], int]]] = {("calls", "plan nightly"): (70, planned_nightly)}
"""Of what there may be at most so many for each of something, which a function counts."""


def command(*words: str) -> None:
    """Run a command line in this process, and drop what it prints."""
    from shardproof.cli.main import entry

    with contextlib.redirect_stdout(io.StringIO()):
        status = entry(words)
    if status:
        raise RuntimeError(f"shardproof {' '.join(words)} ended with status {status}")


def calls(work: Callable[[], object]) -> int:
    """How many calls of functions under `harness/shardproof/` some work makes."""
    ours = str(ROOT / "harness") + os.sep
    profile = cProfile.Profile(builtins=False)
    profile.runcall(work)
    entries = profile.getstats()
    return sum(
        entry.callcount
        for entry in entries
        if not isinstance(entry.code, str) and entry.code.co_filename.startswith(ours)
    )


@dataclass(frozen=True)
class Count:
    """What was counted of something, and what is recorded; None where nothing is. ceiling: how much it may be at most,
    whatever is recorded; None for any."""

    kind: str
    name: str
    found: int
    recorded: int | None
    ceiling: int | None = None

    @property
    def is_too_much(self) -> bool:
        return self.recorded is None or self.found > self.recorded * (1 + TOLERANCE)

    @property
    def is_above_ceiling(self) -> bool:
        return self.ceiling is not None and self.found > self.ceiling

    @property
    def is_less(self) -> bool:
        return self.recorded is not None and self.found < self.recorded * (1 - TOLERANCE)

    @property
    def line(self) -> str:
        """For a reader, with what to do about it."""
        change = "" if self.recorded is None else f" ({100 * (self.found / self.recorded - 1):+.1f} %)"
        said = f"{self.name}: {self.found:,} {self.kind}, recorded {self.recorded or 0:,}{change}"
        if self.is_above_ceiling:
            return f"{said}; above the ceiling of {self.ceiling:,}, which no record lifts: make it less work"
        if self.is_too_much:
            return f"{said}; too many: find out why, or record them with {RENEW} and say why in the commit"
        return f"{said}; fewer: record them with {RENEW}" if self.is_less else said


def count(kind: str, name: str) -> Count:
    """Count one thing in a fresh process, which finds nothing kept.

    Raises:
        RuntimeError: it failed there, with what it said.
    """
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("COV", "SHARDPROOF_"))}
    with tempfile.TemporaryDirectory() as empty:
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.work", kind, name], cwd=ROOT, capture_output=True, text=True,
            env={**environment, **ENVIRONMENT, "SHARDPROOF_CACHE": empty}, check=False,
        )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"counting {kind} of {name} failed: {done.stderr[-2000:]}")
    most = ceiling(kind, name)
    return Count(kind, name, int(done.stdout), recorded().get(kind, {}).get(name), most)


def ceiling(kind: str, name: str) -> int | None:
    """How much something may be at most; None for any."""
    if (kind, name) not in CEILINGS:
        return None
    each, number = CEILINGS[kind, name]
    return each * number()


def recorded() -> dict[str, dict[str, int]]:
    """Kind → name → what is recorded."""
    return tomllib.loads(RECORD.read_text("utf-8")) if RECORD.is_file() else {}


def renew() -> None:
    """Count everything and record it."""
    lines = ["# How much work things are; `python -m benchmarks.work --renew` writes it. See benchmarks/work.py."]
    for kind, measures in MEASURES.items():
        lines += ["", f"[{kind}]", *(f'"{name}" = {count(kind, name).found}' for name in measures)]
    RECORD.write_text("\n".join(lines) + "\n", "utf-8")


def main(words: list[str]) -> None:
    match words:
        case []:
            for kind, measures in MEASURES.items():
                for name in measures:
                    print(count(kind, name).line, flush=True)
        case ["--renew"]:
            renew()
        case [kind, name]:
            print(MEASURES[kind][name]())


if __name__ == "__main__":
    main(sys.argv[1:])
