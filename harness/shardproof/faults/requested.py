"""Checks fault ids that a user typed, such as `boundary.skip-load@2`, and rejects unknown ids with close matches."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from shardproof.errors import MOST_GIVEN, UsageError


def require_faults(
    wanted: Iterable[str], *, logical: bool = True, boundary: bool = True, what: str = "--fault"
) -> None:
    """Refuse a fault that there is not, or an event of one that has none, with a UsageError.

    Args:
        logical, boundary: which kinds may be asked for. what: asked for them: an option, or the axis `faults`.
    """
    if not (asked := set(wanted)):
        return
    from shardproof.faults.boundary import BOUNDARY, boundary_fault
    from shardproof.faults.catalogue import CATALOGUE

    known = (*(CATALOGUE if logical else ()), *(BOUNDARY if boundary else ()))
    for fault in sorted(asked - set(known)):
        if not boundary or fault.partition("@")[0] not in BOUNDARY:
            raise unknown_fault(fault, known, what)
        boundary_fault(fault)


def unknown_fault(fault: str, known: Collection[str], what: str = "--fault") -> UsageError:
    """The error of a fault that there is not. It names those that are called much the same: all would fill a screen."""
    from difflib import get_close_matches  # which takes time to import, and is seldom needed

    shown = get_close_matches(fault[:MOST_GIVEN], known, n=3, cutoff=0.5) or sorted(known)[:3]
    others = len(known) - len(shown)
    rest = f" and {others} others; `shardproof list` shows them" if others else ""
    form = f"{what} {shown[0]}" if what.startswith("--") else f"{what}={shown[0]}"
    return UsageError.of(what, fault, f"{', '.join(shown)}{rest}", form, known)
