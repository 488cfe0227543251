"""Which known defects somebody means who has a number, an address or a word: what `shardproof known` prints.

A number is one of an issue or a pull request, as in `megatron-core-2777` or in an upstream address, and matches whole;
a word matches anywhere in an entry's id, texts, addresses and names of regressions, with or without its ending:
*swapped* finds *swap*, and *moments* finds *moment*. Public bugs that are planted in the reference as faults
are found in the same way. A trainer has its entries beside its file: the caller says which trainers are looked through.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Sequence

from shardproof.faults.catalogue import CATALOGUE, Fault
from shardproof.issues.findings import Finding, section_of
from shardproof.issues.upstream_links import address_of
from shardproof.protocol.system import System


def lookup(words: Sequence[str], systems: Iterable[System]) -> tuple[list[Finding], list[Fault]]:
    """Finds the entries and the faults that match all words. Without words these are all entries and no fault."""
    found = [f for system in systems if system.under_test for f in section_of(system).findings]
    if not words:
        return found, []
    findings = [finding for finding in found if _matches(words, _of_finding(finding))]
    return findings, [fault for fault in CATALOGUE.values() if _matches(words, _of_fault(fault))]


def _of_finding(finding: Finding) -> list[str]:
    known = finding.novelty
    texts = [finding.id, finding.what, known.harm, known.trigger, known.upstream]
    return [*texts, *known.also, *known.related, *finding.regressions]


def _of_fault(fault: Fault) -> list[str]:
    return [fault.id, fault.doc, *fault.bug_ids, *filter(None, map(address_of, fault.bug_ids))]


def _matches(words: Sequence[str], texts: Sequence[str]) -> bool:
    return all(any(_is_in(word.strip().lower(), text.lower()) for text in texts) for word in words)


def _is_in(word: str, text: str) -> bool:
    number = word.lstrip("#")
    if number.isdigit():
        return re.search(rf"(?<![0-9]){number}(?![0-9])", text) is not None
    if of_repository := re.fullmatch(r"([\w./-]+)#(\d+)", word):
        return all(_is_in(part, text) for part in of_repository.groups())
    return _stem(word.rstrip("/")) in text


def _stem(word: str) -> str:
    """A word without an ending: `swap` of *swapped*; any other text, such as an address, as it is."""
    stem = re.fullmatch(r"([a-z]{4,}?)(?:ed|ing|es|s)", word)
    return re.sub(r"([bdgmnprt])\1$", r"\1", stem[1]) if stem else word


def described(finding: Finding, file: str = "") -> Iterator[str]:
    """Tells an entry in lines: its harm, its trigger, its public address, and commands that show the defect.

    Args:
        file: of the trainer that the entry belongs to, which commands have to name.
    """
    known = finding.novelty
    yield f"{finding.id}  ({', '.join(finding.severity)}; since {finding.since}; fixed: {finding.fixed or 'no'})"
    yield f"  {known.harm}"
    yield f"  when: {known.trigger} ({known.reach})"
    unknown = f"not found on {known.searched}" if known.searched else f"as {finding.cause}, whose code it is"
    yield f"  public: {known.upstream or unknown}"
    plugin = f" --plugin {shlex.quote(file)}" if file else ""
    for regression, name in list(zip(finding.regressions, finding.scenarios, strict=True))[:1]:
        yield f"  shows it:       shardproof run {name}{plugin}"
        if finding.cure:
            # all cures: another defect may be seen as soon as this one is gone
            yield f"  cured:          shardproof run {name} --system {finding.system}@+cured{plugin}"
        if regression not in finding.unscripted:
            yield f"  for upstream:   shardproof export {name}{plugin}"


def planted(fault: Fault) -> Iterator[str]:
    """Tells a fault in lines: the public bugs behind the fault, and the command that plants it."""
    yield f"fault {fault.id}: {fault.doc}"
    yield f"  public: {', '.join(address_of(bug) or bug for bug in fault.bug_ids) or 'no'}"
    yield f"  plant it:       shardproof faults --fault {fault.id}"
