"""What a system under test is: all that the core may ask of one.

A system is a training library, or a part of one, that scenarios run on. It lives in a package of its own:

    accepts.py    which scenarios it accepts: an allow-list of axes, then limits (`shardproof.protocol.accepts`)
    contract.py   what it promises, so that an oracle can say what must come out (`shardproof.oracle.contract`)
    stored.py     how its checkpoints are read back, and what they must hold (`Stored`)
    rank/         what runs on every rank, with the real library (`RankSystem`)

`System` names these by entry, `module:attribute` relative to the package, and imports each when it is first asked for:
the parent process plans and reports without the library, and without torch. The first three never import `rank/`: an
oracle that shares arithmetic with what it judges proves nothing.

What is data lies beside the scenarios, in `scenarios/<name>/`: how walks go over the system (`walk.toml`), its
releases, its known issues and their regressions. docs/adding-a-system.md adds one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from shardproof.entry import resolve
from shardproof.models import ModelSpec
from shardproof.observe.logical import Logical
from shardproof.observe.record import Record
from shardproof.oracle.contract import Contract
from shardproof.program import Op
from shardproof.protocol.accepts import Accepts
from shardproof.scenario import Mesh, Scenario
from shardproof.tables import SHIPPED

if TYPE_CHECKING:
    from shardproof.protocol.checkpoint_layout import Layout
    from shardproof.readers.vocabulary import Vocabulary


@dataclass(frozen=True)
class RankContext:
    """What a rank knows.

    rank: global rank in `mesh`, row-major. directory: the scenario's own folder, shared by its ranks and sessions;
    checkpoints go to `directory / "checkpoint{n}"`. contract: the system's. fault: the boundary fault that is given
    this context; empty for the system's own.
    """

    scenario: Scenario
    model: ModelSpec
    mesh: Mesh
    rank: int
    directory: Path
    contract: Contract
    fault: str = ""

    def checkpoint_path(self, op: Op) -> Path:
        return self.directory / f"checkpoint{op.checkpoint}"

    def struck(self) -> None:
        """Leave a note that the fault strikes now. It outlives the rank, which the fault may be about to kill."""
        strike_note(self.directory, self.fault).touch()

    def event_occurred(self) -> None:
        """Leave a note that the event is there which the fault is to strike, of many, whatever there is in it."""
        event_note(self.directory, self.fault).touch()


def strike_note(directory: Path, fault: str) -> Path:
    """The file that is there once a boundary fault has struck in a scenario with this folder."""
    return directory / f"{fault}.struck"


def event_note(directory: Path, fault: str) -> Path:
    """The file that is there once the event came that a boundary fault was to strike."""
    return directory / f"{fault}.came"


class RankSystem(Protocol):
    """The system on one rank. Every method runs on all ranks of the session, in program order.

    Methods mutate the system's own state and raise what the library raises. `observe` must change nothing.
    """

    def build(self, op: Op) -> None:
        """Construct model and optimizer anew, with parameters from the initialisation seed `op.init_seed`."""

    def step(self, op: Op) -> None:
        """Run all microbatches of iteration `op.iteration`, reduce, clip and unscale as asked, and step."""

    def overflow(self, op: Op) -> None:
        """As `step`, with one infinite gradient element on one rank: the loss scaler must leave the step out."""

    def save(self, op: Op) -> None:
        """Write a checkpoint to `RankContext.checkpoint_path(op)`; return when its files are complete."""

    def load(self, op: Op) -> None:
        """Read checkpoint `op.checkpoint` into the model, optimizer and schedule that exist now."""

    def load_model_only(self, op: Op) -> None:
        """Read its parameters and buffers only, as finetuning does."""

    def reload_params(self, op: Op) -> None:
        """Refresh the masters that the optimizer has from the model's parameters; nothing where it has none."""

    def unfreeze(self, op: Op) -> None:
        """Make the parameters that the model marks `later` trainable."""

    def observe(self, op: Op) -> Iterable[Record]:
        """What this rank holds after `op`, by the table in `shardproof.observe.record`. Changes nothing."""


class Stored(Protocol):
    """A system's checkpoints as the judge reads them, without torch and without the library.

    vocabulary: the names beyond plain torch that their pickles have.
    """

    vocabulary: Vocabulary

    def read(self, path: Path, op: Op, scenario: Scenario) -> list[Record]:
        """The `written` records of the checkpoint that the save `op` of a scenario left at `path`.

        Raises:
            CheckpointError: missing, truncated, foreign, inconsistent or hostile.
        """

    def must_hold(self, live: Logical, op: Op, scenario: Scenario) -> Logical:
        """What that checkpoint must hold, from the oracle's live values after the save."""


@dataclass(frozen=True)
class System:
    """A system as the core sees it.

    * name: as in `--system`. doc: one line, for `list`. home: the package or module that holds it.
    * world: `fork` (real ranks) or `lockstep` (one process, the reference's).
    * distributions: packages whose versions a result names. package: the distribution under test, installed beside ours
      by release (`releases.toml`); empty where the installed environment has it. gpu_distributions: packages that it
      needs on a GPU only.
    * is_torch: whether the library under test is torch itself. It comes with the interpreter, and another release of it
      is another interpreter (`shardproof.world.torches`).
    * emulated: what is not the real thing on a CPU, shown in every result.
    * stands_on: other systems whose library this one runs on. Their cures are to be had here too
      (`shardproof.issues.cures`).
    * data: `PACKAGE/PATH` of the folder with its data; empty for `scenarios/<name>`.

    The other fields are entries, `module:attribute` below `home` (`:attribute` for one in `home` itself). An
    empty one is not there.

    * accepts_entry, contract_entry, stored_entry, rank: an `Accepts`, a `Contract`, a `Stored`, a class of
      `RankSystem`.
    * warm_up: called once in the server before its first fork.
    * library: called with the device by every rank before its warnings count. It imports the library and runs nothing
      of it, since a server of GPUs may not warm up.
    * variant_entry: `f(scenario)`: which of the system's environments a scenario needs, where a process can be only one
      of them. Its server finds the answer in SHARDPROOF_VARIANT.
    * not_exercised_entry: `f(scenario)`: what it asks for that ranks here cannot put to the test.
    * device_choices_entry: `f(device)`: what ranks get where real and emulated can be chosen between, and why.
    * models_entry, rules_entry: models and rules of diagnosis that only this system has.
    * predicates_entry: what its files may ask of a scenario, by name.
    * layouts_entry: kinds of checkpoint folders that only its library writes, for `shardproof diff`.
    * judge_entry: `f(payload)` that a worker calls in the place of the judge, of a system that is its own oracle
      (`shardproof.trainer`). Then each session runs whatever became of those before it.
    * export_entry: `f(case)`: a failure as a script of the library's own calls (`shardproof.export.script.Draft`).
    """

    name: str
    doc: str
    home: str
    world: str = "fork"
    distributions: tuple[str, ...] = ()
    package: str = ""
    is_torch: bool = False
    gpu_distributions: tuple[str, ...] = ()
    emulated: tuple[str, ...] = ()
    stands_on: tuple[str, ...] = ()
    data: str = ""
    accepts_entry: str = "accepts:ACCEPTS"
    contract_entry: str = "contract:CONTRACT"
    stored_entry: str = "stored:STORED"
    rank: str = "rank:Rank"
    warm_up: str = ""
    library: str = ""
    variant_entry: str = ""
    not_exercised_entry: str = ""
    device_choices_entry: str = ""
    models_entry: str = ""
    rules_entry: str = ""
    predicates_entry: str = ""
    layouts_entry: str = ""
    judge_entry: str = ""
    export_entry: str = ""

    @property
    def under_test(self) -> str:
        """The distribution under test, whose releases a scenario can name; empty for a system of ours."""
        return "torch" if self.is_torch else self.package

    @property
    def own_package(self) -> Any:
        """The `Package` under test, where a system declares one without a `releases.toml`; else None."""
        return None

    @property
    def first_values(self) -> Mapping[str, str]:
        """Of a system that has axes of its own in the words of `options`, each with the value that no word names."""
        return {}

    @cached_property
    def accepts(self) -> Accepts:
        accepts: Accepts = self._part(self.accepts_entry)
        return accepts

    @cached_property
    def contract(self) -> Contract:
        contract: Contract = self._part(self.contract_entry)
        return contract

    @cached_property
    def stored(self) -> Stored:
        stored: Stored = self._part(self.stored_entry)
        return stored

    @cached_property
    def models(self) -> Sequence[ModelSpec]:
        models: Sequence[ModelSpec] = self._part(self.models_entry) if self.models_entry else ()
        return models

    @cached_property
    def rules(self) -> Sequence[Any]:
        """Its own `shardproof.diagnosis.explanation.Rule`s."""
        rules: Sequence[Any] = self._part(self.rules_entry) if self.rules_entry else ()
        return rules

    @cached_property
    def predicates(self) -> Mapping[str, Callable[[Scenario], bool]]:
        """What `walk.toml` and `issues.toml` may ask of a scenario: name → whether it holds."""
        found: Mapping[str, Callable[[Scenario], bool]] = (
            self._part(self.predicates_entry) if self.predicates_entry else {}
        )
        return found

    @cached_property
    def layouts(self) -> Sequence[Layout[Any]]:
        """The kinds of checkpoint folders that only its library writes."""
        layouts: Sequence[Layout[Any]] = self._part(self.layouts_entry) if self.layouts_entry else ()
        return layouts

    @cached_property
    def export(self) -> Callable[[Any], Any] | None:
        """Makes the draft of a script from a case; None where the system has no scripts."""
        return self._part(self.export_entry) if self.export_entry else None

    def variant(self, scenario: Scenario) -> str:
        """Which environment a scenario's ranks need; empty where there is one only."""
        return str(self._part(self.variant_entry)(scenario)) if self.variant_entry else ""

    def not_exercised(self, scenario: Scenario) -> tuple[str, ...]:
        """What a scenario asks for that ranks here cannot put to the test."""
        return tuple(self._part(self.not_exercised_entry)(scenario)) if self.not_exercised_entry else ()

    def device_choices(self, device: str) -> Mapping[str, str]:
        """What ranks on a device get where there is a choice between the real and the emulated, and why.

        Raises:
            UsageError: the environment asks for something that is not there.
        """
        return dict(self._part(self.device_choices_entry)(device)) if self.device_choices_entry else {}

    def refusal(self, scenario: Scenario) -> str | None:
        """Why the system does not run a scenario; None where it does."""
        limit = self.accepts.refusal(scenario)
        return limit.reason if limit else None

    def entry(self, name: str) -> str:
        """An entry in full, such as `shardproof.systems.torch_fsdp2.rank:Rank`."""
        module, _, attribute = name.partition(":")
        return f"{self.home}.{module}:{attribute}" if module else f"{self.home}:{attribute}"

    @property
    def folder(self) -> Traversable:
        """The folder with its data; it need not exist."""
        if not self.data:
            return SHIPPED.joinpath(self.name)
        package, _, path = self.data.partition("/")
        return resources.files(package).joinpath(path)

    def _part(self, entry: str) -> Any:
        return resolve(self.entry(entry))
