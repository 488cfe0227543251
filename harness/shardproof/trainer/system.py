"""A trainer as a system: everything that a system has (ids, store, reports, sweeps, faults), for a user's file.

`register` makes a `TrainerSystem` of a file and has it known. A plugin's name may be such a file, so that every process
of a run knows the trainer: the parent and the judges by what its text says (`described`), and the ranks' server by
importing it. The system has no contract. Its oracle is the trainer itself, driven along other arms
(`shardproof.trainer.judge.cell`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.resources.abc import Traversable
from pathlib import Path

from packaging.requirements import Requirement

from shardproof.oracle.contract import Contract
from shardproof.program import is_arms
from shardproof.protocol import registry
from shardproof.protocol.accepts import Accepts, Anything, Faults, Only, Words
from shardproof.protocol.releases import Package, Release, package_of
from shardproof.protocol.system import System
from shardproof.scenario import DEVICES, Scenario
from shardproof.tables import SHIPPED
from shardproof.trainer.described import Described, described

HOME = "shardproof.trainer"
EMULATED = ("CUDA device, whose pinned memory a forked process does not share",)
RANK, JUDGE = "rank:Rank", "judge.cell:serve"
SUFFIX, ISSUES = ".shardproof", "issues.toml"
"""Of the folder beside a trainer's file that has its data, and the file of known defects in it."""
VARIANT = "SHARDPROOF_VARIANT"
"""The environment variable in which a server finds which trainer it is for."""


class Arms:
    """Programs of a trainer: its arms, and no list of operations."""

    text = "arms, or arms 1 1 resumed"

    def refuses(self, value: str) -> bool:
        """Whether a program is none of a trainer's."""
        return not is_arms(value)


@dataclass(frozen=True)
class CellWords(Words):
    """What may stand in a cell's `options`: the words of all axes, and those of values that an open axis takes."""

    trainer: Described

    def refuses(self, value: Sequence[str] | None) -> bool:
        """Whether one of the words is no value of an axis."""
        parts = (word.partition("=") for word in value or ())
        return not all(axis in self.trainer.axes and self.trainer.takes(axis, text) for axis, _, text in parts)


@dataclass(frozen=True)
class TrainerSystem(System):
    """A system whose rank drives a trainer. trainer: the description of the trainer's file."""

    trainer: Described | None = None

    @cached_property
    def accepts(self) -> Accepts:
        assert self.trainer is not None
        axes = self.trainer.axes
        words = {f"{axis}={text}": f"{axis} of the trainer" for axis, texts in axes.items() for text in texts}
        return Accepts(
            self.name,
            options=CellWords(words, self.trainer),
            program=Arms(),
            device=Only(*DEVICES),
            faults=Faults(),
            seed=Anything(),
        )

    @property
    def first_values(self) -> Mapping[str, str]:
        return {axis: texts[0] for axis, texts in self.trainer.axes.items()} if self.trainer else {}

    @cached_property
    def contract(self) -> Contract:
        return Contract()

    def variant(self, scenario: Scenario) -> str:
        return self.trainer.plugin if self.trainer else ""

    @property
    def folder(self) -> Traversable:
        """The folder `NAME.shardproof` beside the file, with `issues.toml`, `cures` and `regressions`, if there is
        one."""
        assert self.trainer is not None
        found: Traversable = self.trainer.file.with_suffix(SUFFIX)
        return found

    @property
    def own_package(self) -> Package | None:
        """What the trainer requires, as a package: the first is under test, the others stand beside it."""
        if self.trainer is None or not self.trainer.requires:
            return None
        first, *beside = map(Requirement, self.trainer.requires)
        release = Release(str(first.specifier).removeprefix("=="), beside=tuple(map(str, beside)))
        declared = declared_package(first.name)
        if declared:
            beside_it = release.beside or declared.closest(release.version).beside
            return replace(declared, beside=beside_it, releases=(replace(release, beside=beside_it),))
        imports = first.name.replace("-", "_")
        return Package(first.name, imports, imports, ("src", "."), release.beside, (release,))


def declared_package(distribution: str) -> Package | None:
    """What a built-in system says of a distribution, such as that megatron-core is imported as `megatron.core`."""
    systems = (system for system in registry.all_systems() if system.package == distribution and system.home != HOME)
    return next(map(package_of, systems), None)


def register(text: str) -> TrainerSystem:
    """Have the trainer of `FILE.py[:CLASS]` known as a system.

    Raises:
        UsageError: as `described`.
    """
    return register_described(described(text))


def shipped() -> dict[str, Path]:
    """Have the trainers that ship with entries of known defects known as systems: name → file, which is read and not
    run."""
    every = sorted(Path(str(SHIPPED / "trainers")).glob("*.py"))
    files = [file for file in every if (file.with_suffix(SUFFIX) / ISSUES).is_file()]
    return {register(str(file)).name: file for file in files}


def register_described(trainer: Described) -> TrainerSystem:
    """Have a trainer known as a system."""
    package = Requirement(trainer.requires[0]).name if trainer.requires else ""
    found = TrainerSystem(
        name=trainer.system,
        doc=trainer.doc,
        home=HOME,
        distributions=("torch", package) if package else ("torch",),
        package=package,
        is_torch=not package,
        stored_entry="",
        models_entry="models:MODELS",
        rank=RANK,
        judge_entry=JUDGE,
        warm_up="rank.warm:warm_up",
        emulated=EMULATED if trainer.emulates else (),
        export_entry="report.export:draft",
        trainer=trainer,
    )
    registry.register(found)
    return found
