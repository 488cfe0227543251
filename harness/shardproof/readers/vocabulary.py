"""The class names, beyond plain torch, that may occur in the pickles of known systems' checkpoints.

A pickle names classes and functions. The readers execute none of them, and refuse every name that they do not know, so
that a hostile file is seen as one. What only one library writes, its system says in a `Vocabulary` (of
its `shardproof.protocol.system.Stored`); `known` is that of all systems together, since `shardproof
inspect` does not know who wrote a file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from shardproof.readers.symbolic import Name

Decode = Callable[[object], Any]
"""The plain value of a part of a parsed pickle (`shardproof.readers.values.decode`)."""


@dataclass(frozen=True)
class Vocabulary:
    """Names and what they are taken as.

    words: as text, such as the class of an optimizer that someone stored in its param groups. objects: classes whose
    instances are taken as a dict of their attributes, with the class's name under `class` and what the constructor got
    under `args`. tensors: functions that make a tensor: name → `f(args, decode)`, which gives a `values.Tensor` or
    `values.Quantised`, or None where the arguments are damaged. metadata: classes that stand for DCP's `Metadata` and
    have its fields.
    """

    words: frozenset[Name] = frozenset()
    objects: frozenset[Name] = frozenset()
    tensors: Mapping[Name, Callable[[tuple[object, ...], Decode], Any]] = field(default_factory=dict)
    metadata: frozenset[Name] = frozenset()

    def __or__(self, other: Vocabulary) -> Vocabulary:
        return Vocabulary(
            self.words | other.words, self.objects | other.objects, {**self.tensors, **other.tensors},
            self.metadata | other.metadata,
        )  # fmt: skip


_providers: list[Callable[[], Iterable[Vocabulary]]] = []
_known = Vocabulary()


def provide(vocabularies: Callable[[], Iterable[Vocabulary]]) -> None:
    """Have further names known; they are collected when the next checkpoint is read."""
    _providers.append(vocabularies)


def known() -> Vocabulary:
    """Every name that is known."""
    global _known
    while _providers:
        for vocabulary in _providers.pop(0)():
            _known = _known | vocabulary
    return _known
