"""Faults that somebody asks for by their ids: that they are there."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from harness.errors import MOST_GIVEN, UsageError


def require_faults(wanted: set[str]) -> None:
    """Refuse a fault that there is not, with a UsageError."""
    if not wanted:
        return
    from harness.faults.boundary import BOUNDARY, boundary_fault
    from harness.faults.catalogue import CATALOGUE

    known = (*CATALOGUE, *BOUNDARY)
    for fault in sorted(wanted - set(known)):
        if fault.partition("@")[0] not in BOUNDARY:
            raise unknown_fault(fault, known)
        boundary_fault(fault)


def require_logical(wanted: Iterable[str]) -> None:
    """Refuse what is no logical fault, with a UsageError."""
    from harness.faults.catalogue import CATALOGUE

    for fault in wanted:
        if fault not in CATALOGUE:
            raise unknown_fault(fault, CATALOGUE)


def require_boundary(wanted: Iterable[str]) -> None:
    """Refuse what is no boundary fault, or names an event of one that has none, with a UsageError."""
    from harness.faults.boundary import BOUNDARY, boundary_fault

    for fault in wanted:
        if fault.partition("@")[0] not in BOUNDARY:
            raise unknown_fault(fault, BOUNDARY)
        boundary_fault(fault)


def unknown_fault(fault: str, known: Collection[str]) -> UsageError:
    """The error of a fault that there is not. It names those that are called much the same: all would fill a screen."""
    from difflib import get_close_matches  # which takes time to import, and is seldom needed

    shown = get_close_matches(fault[:MOST_GIVEN], known, n=3, cutoff=0.5) or sorted(known)[:3]
    others = len(known) - len(shown)
    rest = f" and {others} others; `shardproof faults` lists them" if others else ""
    return UsageError.of("--fault", fault, f"{', '.join(shown)}{rest}", f"--fault {shown[0]}")
