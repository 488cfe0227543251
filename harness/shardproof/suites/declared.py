"""The upstream test suites that a system declares in its `upstream.toml`, as data.

    schema = 1
    commit = "55ac708251…"                     # of the clone; `tag` is its name for people
    tag = "core_v0.16.1"
    libraries = ["transformer-engine@2.20.2"]  # overlays, by package and release, that come before the clone
    beside = ["requests==2.34.2"]              # what the tests import besides, installed without dependencies
    paths = ["."]                              # folders of the clone that are on the path
    kernels = "te"                             # as the plugin's `--emulate`
    environment = ["NAME=VALUE"]               # variables that upstream's container sets
    aim = 600                                  # so many distinct tests should pass

    [[suite]]
    name = "optimizer"
    tests = ["tests/unit_tests"]               # files, folders, and options of pytest
    ranks = [1, 2]                             # at which a list of verdicts is kept
    kernels = "te-apex"                        # of this suite; may be left out

    [[reason]]                                 # why tests fail
    match = '(mamba_ssm) is not installed'     # a regular expression that is looked for in the error
    test = 'test_model'                        # only of tests whose name matches this; may be left out
    says = 'kernel: \\1'                       # what is kept instead of the error

A reason is what the list of verdicts says of a failure. An error that matches none is its own reason.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources.abc import Traversable

from shardproof.errors import UsageError
from shardproof.protocol.registry import all_systems, system_named
from shardproof.protocol.system import System
from shardproof.tables import Table, load_toml, text_of

FILE = "upstream.toml"
_KEYS = (
    "schema", "tag", "commit", "libraries", "beside", "paths", "kernels", "environment", "aim", "suite", "reason",
)  # fmt: skip


@dataclass(frozen=True)
class Suite:
    """tests: files or folders of the clone, and options of pytest. ranks: the worlds that have a list of verdicts.
    kernels: as the plugin's `--emulate`."""

    name: str
    tests: tuple[str, ...]
    ranks: tuple[int, ...]
    kernels: str


@dataclass(frozen=True)
class Reason:
    """match: looked for in an error. says: what stands for it. test: looked for in the test's name."""

    match: str
    says: str
    test: str = ""

    def explain(self, test: str, error: str) -> str:
        """The declared explanation for a failure, filled in from the error's text. Empty if test or error do not match
        the reason's patterns."""
        found = re.search(self.match, error)
        return found.expand(self.says) if found and re.search(self.test, test) else ""


@dataclass(frozen=True)
class Upstream:
    """The suites of a system and what they need; see the module's docstring for each field."""

    system: str
    tag: str
    commit: str
    libraries: tuple[str, ...]
    beside: tuple[str, ...]
    paths: tuple[str, ...]
    environment: tuple[str, ...]
    aim: int
    suites: tuple[Suite, ...]
    reasons: tuple[Reason, ...]
    folder: Traversable

    def suite(self, name: str) -> Suite:
        """The suite with the given name.

        Raises:
            UsageError: the system declares no such suite.
        """
        for suite in self.suites:
            if suite.name == name:
                return suite
        known = [suite.name for suite in self.suites]
        raise UsageError.of(f"suite of {self.system}", name, known, f"{self.system}/{known[0]}")

    def reason(self, test: str, error: str) -> str:
        """Why a test failed, by the first declared reason; empty where there is none."""
        return next((says for reason in self.reasons if (says := reason.explain(test, error))), "")

    def verdicts_file(self, suite: Suite, ranks: int) -> Traversable:
        """The committed list of verdicts, which may not be there."""
        return self.folder.joinpath("upstream", f"{suite.name}-{ranks}.toml")


def upstreams() -> Iterator[Upstream]:
    """Every system's that has suites."""
    for system in all_systems():
        if system.folder.joinpath(FILE).is_file():
            yield upstream_of(system.name)


def upstream_of(name: str) -> Upstream:
    """The declaration of a system.

    Raises:
        UsageError: there is no such system, it has no suites, or its file is malformed.
    """
    system: System = system_named(name)
    file, origin = system.folder.joinpath(FILE), f"{name}/{FILE}"
    if not file.is_file():
        having = [other.name for other in all_systems() if other.folder.joinpath(FILE).is_file()]
        raise UsageError.of(
            "system with suites of upstream's", name, having, f"{having[0] if having else 'name'}/SUITE"
        )
    known = Table(load_toml(text_of(file, origin), origin), origin)
    known.only(_KEYS, needed=("tag", "commit", "aim", "suite"))
    return Upstream(
        name, known.text("tag"), known.text("commit"), known.texts("libraries"), known.texts("beside"),
        known.texts("paths", (".",)), known.texts("environment"), int(known.positive("aim")),
        tuple(_suite(one, known.text("kernels", "apex")) for one in known.tables("suite")),
        tuple(map(_reason, known.tables("reason"))), system.folder,
    )  # fmt: skip


def _suite(known: Table, kernels: str) -> Suite:
    known.only(("name", "tests", "ranks", "kernels"), needed=("name", "tests", "ranks"))
    ranks = tuple(int(ranks) for ranks in known.numbers("ranks"))
    return Suite(known.text("name"), known.texts("tests"), ranks, known.text("kernels", kernels))


def _reason(known: Table) -> Reason:
    known.only(("match", "says", "test"), needed=("match", "says"))
    return Reason(known.text("match"), known.text("says"), known.text("test"))
