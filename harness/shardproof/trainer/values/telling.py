"""Which of many differences a sentence shows, and how it calls many parameters."""

from __future__ import annotations

from collections.abc import Sequence

from shardproof.diff import Difference

SMALL, LARGE = 4, 1024
"""Units in the last place: what is as small as rounding, and what is far larger."""


def most_telling(found: Sequence[Difference]) -> Difference:
    """The first difference or, where that is a count by which torch warns or is as small as rounding, the first of the
    same operation that is far larger."""
    first = found[0]
    small = first.kind == "bits" and (first.max_ulp or 0) <= SMALL
    if not small and not _is_a_warning(first):
        return first
    larger = (one for one in found if one.key.op == first.key.op and one.kind == "bits" and not _is_a_warning(one))
    return next((one for one in larger if not small or (one.max_ulp or 0) >= LARGE), first)


def one_or_many(names: Sequence[str]) -> str:
    """What a sentence calls parameters: the name of one, or how many there are and the first."""
    return names[0] if len(names) == 1 else f"{len(names)} parameters, such as {names[0]},"


def times(number: int, never: str = "never") -> str:
    """How often something happens, in words."""
    return {0: never, 1: "once", 2: "twice"}.get(number, f"{number} times")


def paragraphs(*texts: str) -> str:
    """Those of some texts that are not empty, each as a paragraph of an arm's sentence."""
    return "\n".join(filter(None, texts))


def _is_a_warning(one: Difference) -> bool:
    return one.key.fqn.endswith("._step_count")
