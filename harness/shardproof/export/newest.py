"""Whether the newest release of a library, or the newest commit of a clone, still has a failure.

It is the first question of a maintainer. It is answered only where the export was asked to look (`--newest`,
`--clone`), since a release may have to be installed for it; where it was not, the issue says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from packaging.version import Version

from shardproof.errors import UsageError
from shardproof.issues.known_issues import bound_of
from shardproof.issues.on_main import BRANCHES, OnMain
from shardproof.protocol.registry import system_named
from shardproof.protocol.releases import package_of
from shardproof.result import Result
from shardproof.scenario import Scenario
from shardproof.verdict import Verdict

HEAD = "git:HEAD"

PYTHON = "3.11"
"""Under which Python the declared releases were listed: pip leaves out a newer release that asks for a newer one."""


@dataclass(frozen=True)
class Newest:
    """What was found. short: in a few words. text: for the reader of an issue. there: False only where the failure is
    known to be gone."""

    short: str
    text: str
    there: bool = True


NOTHING: Mapping[str, str] = {}
"""What an entry without `releases` has recorded."""


def not_asked(result: Result, recorded: Mapping[str, str] = NOTHING, on_main: OnMain | None = None) -> Newest:
    """Nothing was run now but the release on which the failure was seen.

    Args:
        recorded: release or commit → what the entry of the failure says that came of its scenario there.
        on_main: what it says of the main branch, where that was read.
    """
    is_newest = _declared(result) == result.version.partition("+")[0]
    lacking = [
        *(["a newer release"] if not is_newest and not any(_is_newer(name, result) for name in recorded) else []),
        *(["the main branch"] if on_main is None and not was_run_on_main(recorded) else []),
    ]
    seen = f"{_library(result)} {result.version}" + (
        f", the newest release for Python {PYTHON} that we know of on PyPI" if is_newest else ""
    )
    return Newest(
        f"not asked: give a clone, `--clone {result.system}=DIR`",
        f"Seen on {seen}." + (f" Not tried for this issue: {' and '.join(lacking)}." if lacking else ""),
    )


def was_run_on_main(recorded: Mapping[str, str]) -> bool:
    """Whether an entry records a run on a commit of the main branch."""
    return any(name.startswith(BRANCHES) for name in recorded)


def _is_newer(name: str, result: Result) -> bool:
    bound = bound_of(name)
    return name.startswith(BRANCHES) or (
        bound is not None and bound.version > Version(result.version.partition("+")[0])
    )


def on_newest(result: Result, examined: Callable[[Scenario], Result], *, cloned: bool) -> Newest | None:
    """Run the scenario of a result once more: on the newest commit of a clone, or else on the newest declared release;
    None where the failure was seen on that one already.

    Args:
        examined: runs a scenario. cloned: whether the caller has a clone of the library.
    """
    newest = HEAD if cloned else _declared(result)
    if not newest or newest == result.version.partition("+")[0]:
        return None
    what = "the newest commit of the clone that was tried" if cloned else "the newest release"
    seen = f"Seen on {_library(result)} {result.version}. "
    try:
        now = examined(replace(result.scenario, version=newest))
    except UsageError as error:
        why = str(error).partition("\n")[0]
        return Newest(f"could not run: {why}", f"{seen}On {what} it could not be tried: {why}.")
    older = Version(now.version).release < Version(result.version).release
    on = f"{what}, {_library(result)} {now.version}" + (", which is older than that release" if older else "")
    if now.verdict is Verdict.PASS:
        return Newest(f"gone on {now.version}", f"{seen}Gone on {on}.", there=False)
    if now.verdict is result.verdict and now.failed_op == result.failed_op:
        return Newest(f"there on {now.version}", f"{seen}Still there on {on}: the same run fails at the same call.")
    return Newest(
        f"{now.verdict.value} on {now.version}: look at it",
        f"{seen}Another outcome on {on}: {now.signature or now.reason or now.verdict.value}.",
    )


def _declared(result: Result) -> str:
    """The newest declared release of the library under test; empty where there is none."""
    try:
        system = system_named(result.system)
        return package_of(system).newest.version if system.under_test else ""
    except UsageError:  # a library of a plugin, without declared releases
        return ""


def _library(result: Result) -> str:
    try:
        return system_named(result.system).under_test or result.system
    except UsageError:  # a system of a plugin that is not there now
        return result.system
