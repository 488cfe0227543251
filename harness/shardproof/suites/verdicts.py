"""The outcome of each test of a suite, the committed list of expected outcomes, and the differences between both.

A list of verdicts is a TOML file. Of a test function it gives the number of cases that ended as most of them did, and
lists the others. Behind a failure stands its reason.

    [passed]
    "test_optimizer.py::test_chained_optimizer" = 1
    "test_optimizer.py::test_precision_aware_optimizer" = 7

    [failed."kernel: transformer_engine_torch.generic_gemm"]
    "test_optimizer.py::test_precision_aware_optimizer" = ["bf16"]

    [skipped."Device compute capability 10.0 or higher required"]
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tomli_w

from shardproof.tables import load_toml

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
_APART = ("DistBackendError", "DistStoreError", "DistNetworkError", "gloo/", "ended without a verdict")


@dataclass(frozen=True, order=True)
class SuiteTestResult:
    """outcome: passed, failed or skipped. why: of a failure or a skip; empty for a pass."""

    outcome: str
    why: str = ""


def of_ranks(seen: Iterable[SuiteTestResult], reason: Callable[[str], str] = lambda why: "") -> SuiteTestResult:
    """The verdict of a test that ran on several ranks: failed if it failed on one; passed if it passed on one, since a
    test may skip ranks that it does not need. An error of communication is another rank's doing, where there is one.
    Where ranks failed differently, the first that did so for a declared reason counts: which of the others met what
    they leave behind, such as a folder that is removed already, is a matter of time.

    reason: what is said of an error instead, empty for nothing.
    """
    verdicts = list(seen)
    failed = [verdict for verdict in verdicts if verdict.outcome == FAILED]
    if not failed:
        return next((one for one in verdicts if one.outcome == PASSED), verdicts[0])
    own = [one.why for one in failed if not any(word in one.why for word in _APART)] or [failed[0].why]
    return SuiteTestResult(FAILED, next((says for why in own if (says := reason(why))), own[0] or "no error was kept"))


def text_of(verdicts: Mapping[str, SuiteTestResult], heading: str) -> str:
    """A list of verdicts as the text of its file."""
    by_function: dict[str, Counter[SuiteTestResult]] = defaultdict(Counter)
    for test, verdict in verdicts.items():
        by_function[_function(test)][verdict] += 1
    most = {function: min(of, key=lambda one: (-of[one], one)) for function, of in by_function.items()}
    by_verdict: dict[SuiteTestResult, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for test, verdict in verdicts.items():
        by_verdict[verdict][_function(test)].append(_case(test))
    document: dict[str, Any] = {"schema": 1}
    for verdict in sorted(by_verdict):
        found = by_verdict[verdict]
        table: dict[str, Any] = {
            function: len(of) if most[function] == verdict else sorted(of) for function, of in sorted(found.items())
        }
        if verdict.outcome == PASSED:
            document[PASSED] = table
        else:
            document.setdefault(verdict.outcome, {})[verdict.why] = table
    return f"# {heading}\n{tomli_w.dumps(document)}"


@dataclass(frozen=True)
class CommittedVerdicts:
    """A list of verdicts as it is committed. cases: by test. rest: by test function, the number of its other cases and
    the verdict that all of those have."""

    cases: Mapping[str, SuiteTestResult]
    rest: Mapping[str, tuple[int, SuiteTestResult]]

    @classmethod
    def read(cls, text: str, origin: str) -> CommittedVerdicts:
        """Read a file's text.

        Raises:
            UsageError: it is no TOML.
        """
        document = load_toml(text, origin)
        tables = [(SuiteTestResult(PASSED), document.get(PASSED, {}))]
        for outcome in (FAILED, SKIPPED):
            tables += [(SuiteTestResult(outcome, why), table) for why, table in document.get(outcome, {}).items()]
        cases: dict[str, SuiteTestResult] = {}
        rest: dict[str, tuple[int, SuiteTestResult]] = {}
        for verdict, table in tables:
            for function, found in table.items():
                if isinstance(found, int):
                    rest[function] = (found, verdict)
                else:
                    cases |= {f"{function}[{case}]" if case else function: verdict for case in found}
        return cls(cases, rest)

    def result_of(self, test: str) -> SuiteTestResult | None:
        """The verdict of a test; None where the list does not know it."""
        others = self.rest.get(_function(test))
        return self.cases.get(test) or (others[1] if others else None)

    def passing(self, function: str) -> tuple[set[str], int | None]:
        """The passing cases of a test function. Returns the set of passing cases and None; or, in a compact list, the
        set of failing cases and the total number of cases."""
        own = {test: verdict.outcome == PASSED for test, verdict in self.cases.items() if _function(test) == function}
        number, verdict = self.rest.get(function, (0, SuiteTestResult(FAILED)))
        if verdict.outcome == PASSED:
            return {test for test, passes in own.items() if not passes}, number + len(own)
        return {test for test, passes in own.items() if passes}, None

    def count(self, outcome: str) -> int:
        """How many tests have that outcome."""
        listed = sum(verdict.outcome == outcome for verdict in self.cases.values())
        return listed + sum(number for number, verdict in self.rest.values() if verdict.outcome == outcome)

    def by_reason(self, outcome: str) -> dict[str, int]:
        """How many tests have that outcome for each reason, the most frequent first."""
        found: dict[str, int] = defaultdict(int)
        for number, verdict in [*((1, one) for one in self.cases.values()), *self.rest.values()]:
            if verdict.outcome == outcome:
                found[verdict.why] += number
        return dict(sorted(found.items(), key=lambda item: (-item[1], item[0])))


def distinct_passing(lists: Sequence[CommittedVerdicts]) -> int:
    """How many tests pass in at least one of several lists of one suite, each counted once.

    Of some functions a list names only the cases that do not pass, and the number of the others; they are all the cases
    that the function has.
    """
    functions = {_function(test) for kept in lists for test in (*kept.cases, *kept.rest)}
    return sum(_distinct_cases([kept.passing(function) for kept in lists]) for function in functions)


def _distinct_cases(passing: Sequence[tuple[set[str], int | None]]) -> int:
    """The number of different cases of one test function that pass in at least one list; the argument has for each list
    the pair that `CommittedVerdicts.passing` returns."""
    named = {case for cases, total in passing if total is None for case in cases}
    but = [(cases, total) for cases, total in passing if total is not None]
    if not but:
        return len(named)
    return max(total for _, total in but) - len(set.intersection(*(cases for cases, _ in but)) - named)


def differences(kept: CommittedVerdicts, seen: Mapping[str, SuiteTestResult]) -> list[str]:
    """What is not as the list says, in one line a test. The reason of a skip may change; that of a failure may not."""
    lines = []
    for test, verdict in seen.items():
        expected = kept.result_of(test)
        if expected is None:
            lines.append(f"{test}: {verdict.outcome}, and is not in the list")
        elif expected.outcome != verdict.outcome or (verdict.outcome == FAILED and expected != verdict):
            lines.append(f"{test}: {_describe(verdict)}; expected {_describe(expected)}")
    missing = [test for test in kept.cases if test not in seen]
    counted: dict[str, int] = defaultdict(int)
    for test in seen:
        counted[_function(test)] += 1
    lines += [f"{test}: is in the list and was not collected" for test in missing]
    listed = Counter(map(_function, kept.cases))
    for function, (number, _) in kept.rest.items():
        if counted[function] != number + listed[function]:
            expected_cases = number + listed[function]
            lines.append(f"{function}: {counted[function]} cases were collected; the list has {expected_cases}")
    return lines


def _describe(verdict: SuiteTestResult) -> str:
    return f"{verdict.outcome} ({verdict.why})" if verdict.why else verdict.outcome


def _function(test: str) -> str:
    return test.partition("[")[0]


def _case(test: str) -> str:
    return test.partition("[")[2].removesuffix("]")
