"""What `load_state_dict` of a module was given and did not take, and what it lacked: with `strict=False` torch says so
in what it returns, and nothing raises."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import nn


class _OfModule(NamedTuple):
    """What the calls for one module came to. lacks: the keys that no call was given. unknown: keys that a call did not
    take."""

    kind: str
    lacks: list[str]
    unknown: list[str]


class LoadedKeys:
    """What the calls since the latest question say, those for one module together."""

    def __init__(self) -> None:
        self._told: dict[int, _OfModule] = {}

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Inside, what the calls return is looked at."""
        plain = nn.Module.load_state_dict

        @functools.wraps(plain)
        def load_state_dict(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            returned = plain(module, *args, **kwargs)
            lacks, unknown = (list(getattr(returned, name, ())) for name in ("missing_keys", "unexpected_keys"))
            before = self._told.get(id(module))
            if before:
                lacks = [key for key in before.lacks if key in {*lacks}]
                unknown = [*before.unknown, *(key for key in unknown if key not in before.unknown)]
            self._told[id(module)] = _OfModule(type(module).__name__, lacks, unknown)
            return returned

        nn.Module.load_state_dict = load_state_dict  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            nn.Module.load_state_dict = plain  # type: ignore[method-assign]

    def taken(self) -> list[str]:
        """The sentences, each once; what follows begins anew."""
        told, self._told = dict.fromkeys(of_keys(*each) for each in self._told.values()), {}
        return [*filter(None, told)]


def of_keys(kind: str, lacks: Sequence[str], unknown: Sequence[str]) -> str:
    """A sentence on the keys of a call; empty where it took all, and lacked none.

    Args:
        kind: the class of the module. lacks, unknown: the keys that were not given, and those that it does not know.
    """
    parts = [
        f"{text} {len(keys)} key{'s' * (len(keys) != 1)}, such as {keys[0]}"
        for text, keys in (("is not given", lacks), ("does not take", unknown))
        if keys
    ]
    return f"`load_state_dict` of {kind} with `strict=False` {' and '.join(parts)}" if parts else ""
