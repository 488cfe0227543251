"""The walk from a trainer's attributes to everything that may hold state.

The walk is by breadth, so that an object that hangs at several places has its shortest name, and the first of equally
short ones. Each object is met once. Tensors and positions inside a module, a scheduler, a scaler, a
dataset, or a loader with a state of its own are *covered*: `modules` reads the one, and the others tell themselves what
of them is state. The walk goes on through those all the same, since optimizers and generators may hang there. It ends
at objects that are never state, such as functions, process groups and loggers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from shardproof.trainer.rank.kinds import (
    CONTAINER,
    DATASET,
    LOADER,
    MODULE,
    OBJECT,
    OPTIMIZER,
    PASSIVE,
    SCALER,
    SCHEDULER,
    STATEFUL,
    children_of,
    kind_of,
    of_data,
)

DEEPEST = 12
MOST_OBJECTS = 50_000
MOST_CHILDREN = 10_000
"""Of one container; more is data and no state."""

_OF_OPTIMIZERS = frozenset({"state", "param_groups", "defaults", "_param_groups", "_state"})
"""Attributes that `optimizers` reads."""


_SPEAKS = frozenset({MODULE, SCHEDULER, SCALER, DATASET, LOADER})
_ENTERED = frozenset({CONTAINER, OBJECT, OPTIMIZER, STATEFUL, *_SPEAKS})


@dataclass(frozen=True)
class Met:
    """An object that the walk came to.

    * covered: something above it speaks for its tensors and positions.
    * named: the trainer's own `state()` gives it, by itself or inside of containers.
    * holder: the path of what it was met in; empty for an attribute of the trainer.
    """

    path: str
    value: Any
    kind: str
    depth: int = 0
    covered: bool = False
    named: bool = False
    holder: str = ""

    @property
    def word(self) -> str:
        """The last word of the path."""
        return self.path.rpartition(".")[2]


@dataclass
class Walk:
    """Everything that was met, in order, and which object holds which: identity → identities. `cut` names containers
    and depths at which the walk stopped."""

    met: list[Met] = field(default_factory=list)
    holds: dict[int, list[int]] = field(default_factory=dict)
    cut: list[str] = field(default_factory=list)

    def below(self, start: int) -> Iterator[int]:
        """The identities of all objects that hang on an object, at any depth."""
        seen, queue = {start}, [start]
        while queue:
            for child in self.holds.get(queue.pop(), ()):
                if child not in seen:
                    seen.add(child)
                    queue.append(child)
                    yield child


def walk(roots: Mapping[str, object], named: Collection[str] = ()) -> Walk:
    """Meet everything that can be reached from `roots`. named: which of these a trainer's own `state()` gives; they
    come first, so that what hangs elsewhere too counts as named."""
    found = Walk()
    seen: set[int] = set()
    ordered = sorted(roots.items(), key=lambda root: root[0] not in named)
    queue = deque(Met(name, value, kind_of(value, name), named=name in named) for name, value in ordered)
    while queue:
        here = queue.popleft()
        if id(here.value) in seen:
            continue
        seen.add(id(here.value))
        found.met.append(here)
        if len(seen) > MOST_OBJECTS:
            found.cut.append(here.path)
            break
        queue.extend(_entered(here, found))
    return found


def _entered(here: Met, found: Walk) -> Iterator[Met]:
    """What an object holds, if the walk goes on into it."""
    if here.kind not in _ENTERED:
        return
    children = list(_children(here))
    lively = [(name, child, kind) for name, child, kind in children if kind != PASSIVE]
    named = here.named and here.kind == CONTAINER
    if len(children if named else lively) > MOST_CHILDREN or (lively and here.depth >= DEEPEST):
        found.cut += [] if here.covered else [here.path]
        return
    found.holds[id(here.value)] = [id(child) for _, child, _ in lively]
    covered = here.covered or here.kind in _SPEAKS or of_data(here.word, here.value)
    for name, child, kind in lively:
        yield Met(f"{here.path}.{name}", child, kind, here.depth + 1, covered, named, here.path)


def _children(here: Met) -> Iterator[tuple[str, Any, str]]:
    for name, child in children_of(here.value):
        if here.kind != OPTIMIZER or not (name in _OF_OPTIMIZERS or name.startswith("_optimizer_")):
            yield name, child, kind_of(child, name)
