"""The laboratory: observes scenarios in the right world, has them judged, and confirms failures.

For each scenario it

1. asks the system whether a limit refuses it; then the verdict is `unsupported`, and nothing runs;
2. has the sessions of the program run by fresh ranks, one after the other, until one fails (`_forked`), or the
   reference by a worker (`_lockstep`);
3. hands what was observed to the caller, which stores it;
4. has a warm worker judge it (`shardproof.laboratory.judge`);
5. after a failure does 2 to 4 once more. The same failure: the verdict stands. Another, or none: `nondeterministic`.

One thread takes one scenario through all of that. Ranks and judges are other processes, so that a few threads keep
every core busy. Whatever goes wrong on our side becomes `unknown`, never a pass; a full disk stops the run.
"""

from __future__ import annotations

import json
import shutil
import struct
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Self, TypeVar

from shardproof.errors import NO_SPACE, HarnessError, NotImportableError, ServerLostError, UsageError, sentence_of
from shardproof.faults.boundary import all_came, never_struck
from shardproof.laboratory.run_verdict import Attempt, failures_of, refused_in, result_of, same_failure
from shardproof.laboratory.witness import Witnesses
from shardproof.loading import as_loaded
from shardproof.ownership import in_one_line
from shardproof.program import WRITES, expand, sessions
from shardproof.protocol.registry import all_systems
from shardproof.protocol.system import System
from shardproof.result import Reproduced, Result
from shardproof.scenario import DEVICES, Scenario
from shardproof.scratch import PREFIX, HeldFolder
from shardproof.store import StoreFull
from shardproof.verdict import Verdict
from shardproof.world import preflight, shapes
from shardproof.world.bounds import require_world
from shardproof.world.environments import Environments
from shardproof.world.interpreter import interpreter
from shardproof.world.job import Job, JobOutcome, RankError
from shardproof.world.resolved import Resolved
from shardproof.world.server import ForkServer

Observed = Callable[[Scenario, bytes], None]
T = TypeVar("T")

JUDGE = "shardproof.laboratory.judge:serve"
JUDGE_DEADLINE_S = 120.0
RAM_DISK = Path("/dev/shm")
RAM_DISK_BYTES = 512 << 20  # a smaller one, such as the 64 MiB of a container, cannot hold checkpoints
LEAST_FREE_BYTES = 1 << 20  # with less than this left on the scratch disk, a failure says nothing about the system
PLENTY_BYTES = 256 << 20  # with more than this free, a library that says "no space" is mistaken


@dataclass(frozen=True)
class _How:
    """How often the deadline its sessions may take, and whether its ranks are cold (`shardproof.world.shapes`)."""

    patience: float = 1.0
    cold: bool = False


_ONCE = _How()


class Laboratory:
    """The warm servers and worker threads of a run.

    There is one server for each device, which judges and runs what the interpreter has installed, and one for each
    release of a library under test and for each trainer. All are started when first needed.

    Args:
        jobs: scenarios in progress at once. deadline_s: seconds one session's ranks may take.
        plugins: modules that ranks and workers import first. python: interpreter of ranks and workers.
        keep: folder that receives the logs of failed scenarios, one subfolder each. systems: those that scenarios will
            be of, where it is known; no server warms up for another one.
    """

    def __init__(
        self,
        *,
        jobs: int,
        deadline_s: float,
        plugins: Sequence[str] = (),
        python: str | None = None,
        keep: Path | None = None,
        systems: Collection[str] | None = None,
    ) -> None:
        self.jobs, self.deadline_s, self.keep = jobs, deadline_s, keep
        place = scratch_folder()
        self._held = HeldFolder(place, sweeps=place == RAM_DISK)
        self._scratch = self._held.path
        wanted = [info for info in all_systems() if systems is None or info.name in systems]
        warm_up = [
            *dict.fromkeys(
                info.entry(info.warm_up) for info in wanted if info.warm_up and not (info.package or info.judge_entry)
            )
        ]
        judges = dict.fromkeys(info.entry(info.judge_entry).partition(":")[0] for info in wanted if info.judge_entry)
        self._python, self._closing = python, False
        self._torches: dict[str, Laboratory] = {}  # interpreter → its laboratory
        self._home = self  # of the torch of this interpreter
        self._opening = threading.Lock()
        self.witness = Witnesses(lambda scenario: self.examine_one(scenario, confirm=False))
        self._another = partial(
            Laboratory, jobs=jobs, deadline_s=deadline_s, plugins=plugins, keep=keep, systems=systems
        )
        self._environments = Environments(python, plugins, self._scratch)
        self._servers = {
            device: ForkServer(
                python=python or sys.executable, warm_up=warm_up if device == "cpu" else (),
                plugins=("shardproof.laboratory.judge", *plugins, *judges), workers=jobs, scratch=self._scratch,
                device=device,
                ranks=any(info.world != "lockstep" and not info.judge_entry for info in wanted),
            )
            for device in DEVICES
        }  # fmt: skip

    def __enter__(self) -> Self:
        for server in self._servers.values():
            server.__enter__()
        self._servers["cpu"].start()  # whose workers judge all that runs on a CPU
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing = True
        with ExitStack() as stack:
            stack.callback(self._held.remove)
            for server in self._servers.values():
                stack.callback(server.__exit__, kind, error, trace)
            for laboratory in self._torches.values():
                stack.callback(laboratory.__exit__, kind, error, trace)
            stack.callback(self._environments.close)

    def examine(self, scenarios: Iterable[Scenario], observed: Observed) -> Iterator[Result]:
        """Results in the order in which they are reached; `observed` gets every packed observation before its verdict,
        save those of the reference that pass.

        Raises:
            StoreFull: the disk filled; results given out before stay valid.
        """
        return self.side_by_side(lambda scenario: self.examine_one(scenario, observed), scenarios)

    def side_by_side(self, work: Callable[[Scenario], T], scenarios: Iterable[Scenario]) -> Iterator[T]:
        """What `work` makes of each scenario, as many at once as the laboratory has jobs, in the order in which they
        are reached. What it raises ends all of it."""
        todo = iter(scenarios)
        pool = ThreadPoolExecutor(self.jobs, thread_name_prefix="scenario")
        ended: SimpleQueue[Future[T]] = SimpleQueue()

        def submit() -> int:
            scenario = next(todo, None)
            if scenario is None:
                return 0
            pool.submit(work, scenario).add_done_callback(ended.put)
            return 1

        try:
            running = sum(submit() for _ in range(2 * self.jobs))  # so that no thread waits for the caller
            while running:
                result = ended.get().result()
                running += submit() - 1
                yield result
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def examine_one(
        self, scenario: Scenario, observed: Observed = lambda scenario, blob: None, *, confirm: bool = True
    ) -> Result:
        """One scenario, from observation to verdict, which is confirmed unless the caller does without."""
        result = self._examined(scenario, observed)
        return self.confirmed(result) if confirm else result

    def confirmed(self, first: Result) -> Result:
        """A result after a second look: a failure is observed again in fresh ranks, and has to come again. They are
        cold (`shardproof.world.shapes`), so that nothing that was remembered can make a failure."""
        if not first.verdict.is_failure:
            return first
        patience = 2.0 if first.verdict is Verdict.HANG else 1.0  # a slow machine must not look like a hang
        second = self._examined(first.scenario, how=_How(patience, cold=True))
        took_s = first.duration_s + second.duration_s
        if second.verdict is Verdict.UNKNOWN:
            return replace(second, duration_s=took_s)
        if same_failure(first, second):
            told = second if first.error and first.error.type == "died" else first  # what was raised says more
            return replace(told, reproduced=Reproduced(1, 1), duration_s=took_s)
        reason = f"in fresh ranks the failure did not come again: {second.signature or second.verdict.value}"
        return replace(
            first, verdict=Verdict.NONDETERMINISTIC, reproduced=Reproduced(0, 1), reason=reason, duration_s=took_s
        )

    def _examined(
        self, scenario: Scenario, observed: Observed = lambda scenario, blob: None, how: _How = _ONCE
    ) -> Result:
        started = time.monotonic()
        try:
            software = self._environments.resolve(scenario.system, scenario.version)
            if (elsewhere := self._beside(software)) is not None:
                return elsewhere._examined(scenario, observed, how)
            if software.is_tree:
                software = self._environments.install(software)
            if reason := software.refusal(scenario):
                result = Result(scenario, scenario.system, software.version, Verdict.UNSUPPORTED, reason=reason)
            else:
                result = self._attempt(scenario, software, observed, how)
        except StoreFull:
            raise
        except NotImportableError as error:
            result = self._unknown(scenario, "")
            result = replace(result, reason=sentence_of(error, f"{result.system} {result.version}"))
        except (HarnessError, UsageError) as error:
            result = self._unknown(scenario, str(error))
        except Exception as error:
            if isinstance(error, OSError) and error.errno in NO_SPACE:
                raise StoreFull(f"no space left while observing scenario {scenario.id}: {error}") from error
            text = "".join(traceback.format_exception(error))
            reason = f"an error of shardproof's own: {in_one_line(type(error).__name__, str(error), text)}\n{text}"
            result = self._unknown(scenario, reason)
        return replace(result, duration_s=time.monotonic() - started)

    def _beside(self, software: Resolved) -> Laboratory | None:
        """The laboratory of the torch that a scenario of torch names, where it is not the one of this interpreter. Its
        ranks and its judges have that torch: what an optimizer of torch must come to, its own one says."""
        python = software.interpreter
        if python is interpreter(self._python):
            return None
        with self._opening:
            if python.path not in self._torches:
                opened = self._another(python=python.path).__enter__()
                opened._home = self
                self._torches[python.path] = opened
            return self._torches[python.path]

    def _unknown(self, scenario: Scenario, reason: str) -> Result:
        """A result without a verdict. It names the release as far as that can be told, since the release may be what
        the error is about."""
        version = scenario.version
        with suppress(HarnessError, UsageError):
            software = self._environments.resolve(scenario.system, version)
            version = software.version
            version = self._environments.install(software).version
        return Result(scenario, scenario.system, version, Verdict.UNKNOWN, reason=reason)

    def _attempt(self, scenario: Scenario, software: Resolved, observed: Observed, how: _How) -> Result:
        """What one run of a scenario shows. A server of ours that dies under it says nothing about the system: it is
        started again, once, and the result says so."""
        require_world(scenario)
        try:
            return self._attempt_once(scenario, software, observed, how)
        except ServerLostError as first:
            if self._closing:
                raise
            try:
                result = self._attempt_once(scenario, software, observed, how)
            except ServerLostError as second:
                raise HarnessError(f"{second}; the one before it: {first}") from second
            return replace(result, restarted=str(first))

    def _attempt_once(self, scenario: Scenario, software: Resolved, observed: Observed, how: _How) -> Result:
        if software.system.world == "lockstep":
            trial = self._lockstep(scenario)
            if trial.blob:
                observed(scenario, trial.blob)
            return result_of(scenario, software.system, trial, self._ran(software, scenario))
        software = self._environments.install(software)
        directory = Path(tempfile.mkdtemp(prefix=f"{scenario.id}-", dir=self._scratch))
        try:
            cold = how.cold or shapes.drawn(scenario.id)
            trial = self._forked(Job(scenario, 0, directory, self.deadline_s * how.patience, cold=cold), software)
            observed(scenario, trial.blob)
            trial.judgement = self._judged(scenario, software.system, directory, trial)
            trial.idle = never_struck(scenario, directory)
            trial.event_occurred = all_came(scenario, directory)
            result = result_of(scenario, software.system, trial, self._ran(software, scenario))
            if self.keep and result.verdict.is_failure:
                _keep_logs(directory, self.keep / scenario.id)
            return result
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    def _lockstep(self, scenario: Scenario) -> Attempt:
        started = time.monotonic()
        request = json.dumps({"scenario": scenario.axis_values(only_changed=True)}).encode()
        reply = self._servers["cpu"].call("shardproof.laboratory.judge:serve_reference", request, JUDGE_DEADLINE_S)
        (length,) = struct.unpack_from("<Q", reply)
        judgement, blob = json.loads(reply[8 : 8 + length]), reply[8 + length :]
        crash = judgement.pop("crash", None)
        outcomes = [JobOutcome((RankError(**crash),), (), 0, False, (), 0, 0.0, 0.0, (), ())] if crash else []
        return Attempt(blob, outcomes, judgement, {"lockstep": time.monotonic() - started})

    def run_ranks(
        self, scenario: Scenario, directory: Path, *, deadline_s: float | None = None, quiet: bool = False
    ) -> list[JobOutcome]:
        """Run a scenario's sessions in fresh ranks, also one that its system refuses, and judge nothing.

        Args:
            directory: the scenario's folder, which exists. deadline_s: of a session; the laboratory's without one.
            quiet: see `Job`.
        """
        software = self._environments.resolve(scenario.system, scenario.version)
        return self._forked(Job(scenario, 0, directory, deadline_s or self.deadline_s, quiet), software).outcomes

    def ask(self, target: str, request: Mapping[str, Any]) -> Any:
        """The answer of a warm worker to a request.

        Args:
            target: `module:function` that the worker calls. request: what it gets, and what it answers, is JSON.
        """
        reply = self._servers["cpu"].call(target, json.dumps(request).encode(), JUDGE_DEADLINE_S)
        return json.loads(reply)

    def _forked(self, job: Job, software: Resolved) -> Attempt:
        """Run every session of a job's scenario in fresh ranks, until one fails."""
        scenario, trial = job.scenario, Attempt()
        with ExitStack() as stack:
            server = stack.enter_context(self._server_of(scenario, software))
            for session in range(len(sessions(expand(scenario)))):
                if session == 1 and self._loads_elsewhere(scenario, software):
                    stack.close()  # who waits for a server holds none
                    laboratory, loading, its_software = self._that_loads(scenario)
                    server = stack.enter_context(laboratory._server_of(loading, its_software))
                outcome = server.submit(replace(job, session=session)).result()
                trial.outcomes.append(outcome)
                trial.phases_s[f"session {session}"] = outcome.duration_s
                if not outcome.ok:
                    _require_space(scenario, job.directory, outcome)
                    if session == 0 or not software.system.judge_entry:
                        break
        trial.blob = b"".join(p.read_bytes() for o in trial.outcomes for p in o.observations if p.exists())
        return trial

    def _loads_elsewhere(self, scenario: Scenario, software: Resolved) -> bool:
        """Whether the ranks that load need another server: of another release, or of another environment."""
        variant = software.system.variant
        return scenario.load_version != "same" or variant(as_loaded(scenario)) != variant(scenario)

    def _that_loads(self, scenario: Scenario) -> tuple[Laboratory, Scenario, Resolved]:
        """For a scenario that loads elsewhere: the laboratory of its release's torch, the scenario as those ranks see
        it, and the resolved software."""
        loading = as_loaded(scenario)
        software = self._home._environments.resolve(loading.system, loading.version)
        return self._home._beside(software) or self._home, loading, software

    def _server_of(self, scenario: Scenario, software: Resolved) -> AbstractContextManager[ForkServer]:
        if software.package is None:
            preflight.require_installed(software.system, software.release, software.installed)
        if software.package is not None or software.cures is not None or software.system.judge_entry:
            return self._environments.server(software, scenario)
        return nullcontext(self._servers[scenario.device])

    def _ran(self, software: Resolved, scenario: Scenario) -> dict[str, Any]:
        """What really ran, as fields of a `Result`: the release, and with which packages upstream never supported
        it."""
        found: dict[str, Any] = {"version": software.version}
        if software.package is not None and software.overlay is not None:
            found["outside_support"] = software.overlay.outside
        if scenario.load_version != "same":
            laboratory, _, its_software = self._that_loads(scenario)
            found["loaded_by"] = laboratory._environments.install(its_software).version
        torch = interpreter(self._python).release("torch")
        if torch and torch != interpreter().release("torch"):
            found["chosen"] = {**software.system.device_choices(scenario.device), "torch": torch.partition("+")[0]}
        if cured := self._environments.cured(software):
            found |= {"cured": cured.applied, "not_cured": dict(cured.left)}
        return found

    def _judged(self, scenario: Scenario, system: System, directory: Path, trial: Attempt) -> dict[str, Any]:
        started = time.monotonic()
        entry, request = JUDGE, judge_request(scenario, directory, trial.outcomes)
        if system.judge_entry:
            entry = system.entry(system.judge_entry)
            request |= {
                "directory": str(directory),
                "observations": [[str(path) for path in outcome.observations] for outcome in trial.outcomes],
                "failures": {name: vars(error) for name, error in failures_of(scenario, trial.outcomes).items()},
            }
        reply = self._servers[scenario.device].call(entry, json.dumps(request).encode(), JUDGE_DEADLINE_S)
        trial.phases_s["judge"] = time.monotonic() - started
        judgement: dict[str, Any] = json.loads(reply)
        return judgement


def judge_request(scenario: Scenario, directory: Path, outcomes: Sequence[JobOutcome]) -> dict[str, Any]:
    """What `shardproof.laboratory.judge.serve` has to know of a scenario that ran in `directory`."""
    saves = [op for op in expand(scenario) if op.kind in WRITES]
    return {
        "scenario": scenario.axis_values(only_changed=True),
        "observations": [str(path) for outcome in outcomes for path in outcome.observations],
        "checkpoints": {op.checkpoint: str(directory / f"checkpoint{op.checkpoint}") for op in saves},
        "complete": all(outcome.ok for outcome in outcomes),
        "refused": refused_in(outcomes),
    }


def scratch_folder() -> Path:
    """Where observations and checkpoints of running scenarios go: in memory where there is room, else in TMPDIR.

    That a folder can be written is tried: a mount that is read-only, or out of inodes, may still look writable.
    """
    try:
        with tempfile.TemporaryDirectory(prefix=PREFIX, dir=RAM_DISK, ignore_cleanup_errors=True):
            if shutil.disk_usage(RAM_DISK).free >= RAM_DISK_BYTES:
                return RAM_DISK
    except OSError:
        pass
    return Path(tempfile.gettempdir())


def _require_space(scenario: Scenario, directory: Path, outcome: JobOutcome) -> None:
    """Stop the run if a session may have failed because the disk is full, which says nothing about the system.

    Not every library passes the errno on, so the free space is looked at as well.

    Raises:
        StoreFull: a rank says that there was no space, or there is next to nothing left.
    """
    free = shutil.disk_usage(directory).free
    said = any(error.errno in NO_SPACE for error in outcome.errors)
    if free < LEAST_FREE_BYTES or (said and free < PLENTY_BYTES):
        raise StoreFull(f"no space left for scenario {scenario.id}: {free} bytes are free in {directory}")


def _keep_logs(directory: Path, target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    for log in directory.glob("*.log"):
        if log.stat().st_size:
            shutil.copyfile(log, target / log.name)
