"""What a system under test is: declared in the parent without importing it, executed by every rank.

A system has two halves. `SystemInfo` is data and pure functions: it lives in the parent, imports no
library, and says what the system supports and why not. `RankSystem` runs inside a rank process with the
real library; one instance lives for one session. Adding a system means writing both in one place and
registering the info; the conformance suite tests the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from harness.models import ModelSpec
from harness.observe.record import Record
from harness.program import Op
from harness.scenario import Mesh, Scenario


@dataclass(frozen=True)
class RankContext:
    """What a rank knows. directory: the scenario's own folder, shared by its ranks and sessions; checkpoints go
    to `directory / "checkpoint{n}"`. rank: global rank in `mesh`, row-major."""

    scenario: Scenario
    model: ModelSpec
    mesh: Mesh
    rank: int
    directory: Path

    def checkpoint_path(self, op: Op) -> Path:
        return self.directory / f"checkpoint{op.checkpoint}"


class RankSystem(Protocol):
    """The system on one rank. Every method runs on all ranks of the session, in program order.

    Methods mutate the system's own state and raise what the library raises. `observe` must change nothing.
    """

    def build(self, op: Op) -> None: ...
    def step(self, op: Op) -> None: ...
    def overflow(self, op: Op) -> None: ...
    def save(self, op: Op) -> None: ...
    def load(self, op: Op) -> None: ...
    def load_model_only(self, op: Op) -> None: ...
    def reload_params(self, op: Op) -> None: ...
    def unfreeze(self, op: Op) -> None: ...
    def observe(self, op: Op) -> Iterable[Record]: ...


class Refusal(Protocol):
    """One rule of what a system refuses. A rule of few axes each, so that plans can tabulate it."""

    @property
    def id(self) -> str: ...
    @property
    def reason(self) -> str: ...
    @property
    def refuses(self) -> Callable[[Scenario], bool]: ...


@dataclass(frozen=True)
class LibraryError:
    """What the library raises: the exception type's name, a part of its message, and the operation that raises."""

    kind: str
    message: str
    op: str


@dataclass(frozen=True)
class Limit:
    """A set of scenarios that the system refuses.

    id: stable name. refuses: whether a scenario is one of them. reason: for the reader. source: where the
    library says so. error: its error; None where the combination has no meaning for this system at all.
    """

    id: str
    refuses: Callable[[Scenario], bool]
    reason: str
    source: str = ""
    error: LibraryError | None = None


def first_reason(limits: Iterable[Refusal], scenario: Scenario) -> str | None:
    """Why the first of the limits that refuses a scenario does; None where none does."""
    return next((limit.reason for limit in limits if limit.refuses(scenario)), None)


def _one_variant(scenario: Scenario) -> str:
    return ""


def _nothing_to_choose(device: str) -> Mapping[str, str]:
    return {}


def _everything_exercised(scenario: Scenario) -> tuple[str, ...]:
    return ()


@dataclass(frozen=True)
class SystemInfo:
    """A system as the parent sees it.

    name: as in `--system`. doc: one line. world: `fork` (real ranks) or `lockstep` (one process).
    entry: `module:Class` of the RankSystem (`fork`) or of the lockstep runner. unsupported: the reason why
    the system refuses a scenario, or None. distributions: packages whose versions a result names.
    emulated: what is not the real thing, shown in every result. warm_up: `module:function` the server
    calls once before its first fork. limits: `unsupported` rule by rule, where it is made of rules.
    package: the distribution under test, installed beside ours by release (see scenarios/systems.toml); empty where the
    installed environment has it. variant: which of the system's environments a scenario needs, where a process can be
    only one of them; its server finds it in SHARDPROOF_VARIANT. options: switch of the `options` axis → what it does.
    not_exercised: what a scenario asks for that the world here cannot put to the test. owner_groups: hyperparameters
    are recorded by parameter, on the ranks that own some of it. devices: values of the `device` axis that it runs on;
    the registry refuses the others. library: `module:function` of the device, which imports the library and runs
    nothing of it; every rank calls it before its warnings count: a server of GPUs may not warm up. chosen: what
    ranks on a device get where there is a choice between the real and the emulated, and why; in every result.
    """

    name: str
    doc: str
    world: str
    entry: str
    unsupported: Callable[[Scenario], str | None]
    distributions: tuple[str, ...] = ()
    emulated: tuple[str, ...] = ()
    warm_up: str = ""
    limits: tuple[Refusal, ...] = ()
    package: str = ""
    variant: Callable[[Scenario], str] = _one_variant
    options: Mapping[str, str] = field(default_factory=dict)
    not_exercised: Callable[[Scenario], tuple[str, ...]] = _everything_exercised
    owner_groups: bool = False
    devices: tuple[str, ...] = ("cpu",)
    library: str = ""
    chosen: Callable[[str], Mapping[str, str]] = _nothing_to_choose
