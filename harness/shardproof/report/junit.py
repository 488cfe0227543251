"""JUnit XML, as GitLab, GitHub actions and Jenkins read it.

One test case a scenario, its name starting with the scenario's id, since GitLab drops duplicate names; the file stays
below GitLab's 30 MB. Elements and attributes are those that Jenkins' schema knows (`tests/junit.xsd`). A known issue is
`skipped` with its id, so that a nightly stays green and still says so; `unknown` and a planned scenario without a
verdict are an `error`, so that nothing vanishes.
"""

from __future__ import annotations

import re
from xml.etree.ElementTree import Element, SubElement, indent, tostring

from shardproof.report.model import Report
from shardproof.report.text import render_result
from shardproof.result import Result
from shardproof.scenario import Scenario
from shardproof.verdict import Verdict
from shardproof.wording.lines import headline

NAME_CHARACTERS = 250
MESSAGE_CHARACTERS = 1000
TOTAL_BYTES = 20_000_000

_NOT_XML = re.compile("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def render_junit(report: Report) -> str:
    """The report as a JUnit XML document."""
    root = Element("testsuites", name="shardproof")
    suites: dict[str, Element] = {}
    body_characters = min(8000, TOTAL_BYTES // 4 // max(1, len(report.failures)))
    for result in report.results:
        case = _case(_suite(root, suites, result.system, report), result.scenario, result.system, result.duration_s)
        _outcome(case, result, body_characters, report.place + report.again)
    for scenario in report.missing:
        case = _case(_suite(root, suites, scenario.system, report), scenario, scenario.system, 0.0)
        SubElement(case, "error", type="missing", message="planned, but there is no verdict: the run was interrupted")
    for suite in suites.values():
        _count(suite)
    indent(root)
    return tostring(root, encoding="unicode", xml_declaration=False).join(
        ('<?xml version="1.0" encoding="utf-8"?>\n', "\n")
    )


def _suite(root: Element, suites: dict[str, Element], system: str, report: Report) -> Element:
    if system not in suites:
        suites[system] = SubElement(root, "testsuite", name=_xml(system), timestamp=report.run.started_at)
        properties = SubElement(suites[system], "properties")
        for name, value in {"run": report.run.id, "seed": str(report.run.seed), **report.run.versions}.items():
            SubElement(properties, "property", name=_xml(name), value=_xml(value))
    return suites[system]


def _case(suite: Element, scenario: Scenario, system: str, duration_s: float) -> Element:
    name = f"{scenario.id} {scenario}"[:NAME_CHARACTERS]
    return SubElement(suite, "testcase", classname=_xml(system), name=_xml(name), time=f"{duration_s:.3f}")


def _outcome(case: Element, result: Result, body_characters: int, options: str) -> None:
    """Adds to a test case the outcome of its scenario. options: of the command that replays the result."""
    message = _xml(headline(result)[:MESSAGE_CHARACTERS])
    if result.verdict is Verdict.PASS:
        return
    if result.verdict is Verdict.UNSUPPORTED:
        SubElement(case, "skipped", message=f"{result.counts_as.value}: {message}")
        return
    if result.known_issue is not None:
        SubElement(case, "skipped", message=_xml(f"{result.counts_as.value}: {result.standing}: ") + message)
        return
    tag = "error" if result.verdict is Verdict.UNKNOWN else "failure"
    outcome = SubElement(case, tag, type=result.verdict.value, message=f"{result.counts_as.value}: {message}")
    body = f"{result.replay}{options}\n\n{render_result(result)}"
    outcome.text = _xml(body if len(body) <= body_characters else body[:body_characters] + "…\n")


def _count(suite: Element) -> None:
    cases = suite.findall("testcase")
    suite.set("tests", str(len(cases)))
    for tag, attribute in (("failure", "failures"), ("error", "errors"), ("skipped", "skipped")):
        suite.set(attribute, str(sum(1 for case in cases if case.find(tag) is not None)))
    suite.set("time", f"{sum(float(case.get('time', '0')) for case in cases):.3f}")


def _xml(text: str) -> str:
    """The text without the characters that XML 1.0 cannot express."""
    return _NOT_XML.sub("\ufffd", text)
