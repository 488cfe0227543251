"""Whether the newest release of a library, or the newest commit of a clone, still has a failure.

It is the first question of a maintainer. It is answered only where the export was asked to look (`--newest`,
`--clone`), since a release may have to be installed for it; where it was not, the issue says so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from packaging.version import Version

from shardproof.errors import UsageError
from shardproof.protocol.registry import system_named
from shardproof.protocol.releases import package_of
from shardproof.result import Result
from shardproof.scenario import Scenario
from shardproof.verdict import Verdict

HEAD = "git:HEAD"


@dataclass(frozen=True)
class Newest:
    """What was found. short: in a few words. text: for the reader of an issue. there: False only where the failure is
    known to be gone."""

    short: str
    text: str
    there: bool = True


def not_asked(result: Result) -> Newest:
    """Nothing was run but the release on which the failure was seen."""
    is_newest = _declared(result) == result.version.partition("+")[0]
    seen = f"{_library(result)} {result.version}" + (", the newest release that is known here" if is_newest else "")
    return Newest(
        f"not asked: give a clone, `--clone {result.system}=DIR`",
        f"Seen on {seen}. {'The' if is_newest else 'Neither a newer release nor the'} main branch was "
        f"{'not ' if is_newest else ''}tried for this issue.",
    )


def on_newest(result: Result, examined: Callable[[Scenario], Result], *, cloned: bool) -> Newest:
    """Run the scenario of a result once more: on the newest commit of a clone, or else on the newest declared release.

    Args:
        examined: runs a scenario. cloned: whether the caller has a clone of the library.
    """
    newest = HEAD if cloned else _declared(result)
    if not newest or newest == result.version.partition("+")[0]:
        return not_asked(result)
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
