"""Systems that differ from a real one in a part or two only: a library with a defect planted in it, one that is
repaired, a contract that believes too much.

A plugin makes one with `with_parts` or `with_ranks` and registers it; everything else that is asked of a system stays
the original's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from shardproof.protocol.system import System


@dataclass(frozen=True)
class Variant(System):
    """instead: an entry of the original → `module:attribute`, in full, of what stands in its place."""

    instead: Mapping[str, str] = field(default_factory=dict, hash=False)

    def entry(self, name: str) -> str:
        return self.instead.get(name) or super().entry(name)


def with_parts(system: System, name: str, **parts: str) -> Variant:
    """The system under another name, with some of its parts exchanged.

    Args:
        parts: a field of `System` that holds an entry, such as `rank` or `contract_entry` → `module:attribute`.
    """
    values = {field.name: getattr(system, field.name) for field in fields(System)}
    return Variant(**values | {"name": name}, instead={values[part]: entry for part, entry in parts.items()})


def with_ranks(system: System, ranks: str, name: str) -> Variant:
    """The system under another name, with another class of ranks: `module:class`."""
    return with_parts(system, name, rank=ranks)
