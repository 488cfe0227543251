"""The walk from a trainer's attributes to everything that may hold state.

The walk is by breadth, so that an object that hangs at several places has its shortest name, and the first of equally
short ones. Each object is met once. Tensors and positions inside a module, a scheduler, a scaler, a
dataset, or a loader with a state of its own are *covered*: `modules` reads the one, and the others tell themselves what
of them is state. The walk goes on through those all the same, since optimizers and generators may hang there. It ends
at objects that are never state, such as functions, process groups and loggers.

Some frameworks give a module a reference to whatever trains it, as Lightning does with `_trainer`. Such an *owner* is
an object that hangs on a module or a loader and refers back to it. It holds more than state: callbacks, folders, how
far this run is to go. So it is entered last, and of what is met there and nowhere else only `OF_AN_OWNER` counts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from shardproof.trainer.rank.kinds import (
    CONTAINER,
    DATASET,
    GENERATOR,
    LOADER,
    MODULE,
    OBJECT,
    OPTIMIZER,
    PASSIVE,
    SCALER,
    SCHEDULER,
    STATEFUL,
    TENSOR,
    children_of,
    kind_of,
    of_data,
)

DEEPEST = 12
DEEPEST_AGAIN = 3
"""At which depth it is still noted that an object that was met hangs somewhere else too."""

MOST_OBJECTS = 50_000
MOST_NAMED = 3
MOST_CHILDREN = 10_000
"""Of one container; more is data and no state."""

_OF_OPTIMIZERS = frozenset({"state", "param_groups", "defaults", "_param_groups", "_state", "_all_state_dicts"})
"""Attributes that `optimizers` reads, and what torch's ZeRO gathers for a checkpoint."""


_PIPELINING, _OF_STAGES = "torch.distributed.pipelining.", ("_stage", "_stages")
"""A schedule of torch's pipelines, and a stage, hold buffers to receive into and what is under way; state are the
modules of the stages alone."""

_SPEAKS = frozenset({MODULE, SCHEDULER, SCALER, DATASET, LOADER})
_ENTERED = frozenset({CONTAINER, OBJECT, OPTIMIZER, STATEFUL, *_SPEAKS})

OF_AN_OWNER = frozenset({MODULE, OPTIMIZER, SCHEDULER, SCALER, TENSOR, CONTAINER})
"""Kinds of what counts beyond an owner: what is state wherever it hangs, such as the wrapper around a module, and the
places of tensors, from which those of an optimizer have their names."""

_TOLD = frozenset({STATEFUL, LOADER, GENERATOR})
"""Kinds of what is told to be left out beyond an owner."""


@dataclass(frozen=True)
class Met:
    """An object that the walk came to.

    * covered: something above it speaks for its tensors and positions.
    * named: the trainer's own `state()` gives it, by itself or inside of containers.
    * holder: the path of what it was met in; empty for an attribute of the trainer.
    * of: the identity of the module or the loader that it is an attribute of, by itself or inside of containers; 0 of
      anything else.
    * owner: the path of the owner beyond which it was met; empty for all that is met without one.
    """

    path: str
    value: Any
    kind: str
    depth: int = 0
    covered: bool = False
    named: bool = False
    holder: str = ""
    of: int = 0
    owner: str = ""

    @property
    def word(self) -> str:
        """The last word of the path."""
        return self.path.rpartition(".")[2]


@dataclass
class Walk:
    """Everything that was met and counts, in order, and which object holds which: identity → identities. `cut` names
    containers and depths at which the walk stopped; `left` an owner, and what has a state beyond it and was left out;
    `again` the further paths of modules, optimizers and schedulers, by identity.
    """

    met: list[Met] = field(default_factory=list)
    holds: dict[int, list[int]] = field(default_factory=dict)
    cut: list[str] = field(default_factory=list)
    left: dict[str, list[str]] = field(default_factory=dict)
    again: dict[int, list[str]] = field(default_factory=dict)

    def below(self, start: int) -> Iterator[int]:
        """The identities of all objects that hang on an object, at any depth."""
        seen, queue = {start}, deque([start])
        while queue:
            for child in self.holds.get(queue.popleft(), ()):
                if child not in seen:
                    seen.add(child)
                    queue.append(child)
                    yield child


def walk(roots: Mapping[str, object], named: Collection[str] = ()) -> Walk:
    """Meet everything that can be reached from `roots`. named: which of these a trainer's own `state()` gives; they
    come first, so that what hangs elsewhere too counts as named."""
    found = _walk(roots, named, frozenset())
    hanging = [met for met in found.met if met.of and met.kind in (OBJECT, STATEFUL)]
    owners = frozenset(id(met.value) for met in hanging if met.of in found.below(id(met.value)))
    return _without_what_owners_hold(_walk(roots, named, owners)) if owners else found


_PLAIN = (bool, int, float, complex, str, bytes, type(None))


def _walk(roots: Mapping[str, object], named: Collection[str], owners: frozenset[int]) -> Walk:
    """The walk, which comes to owners, by identity, when there is nothing else left."""
    found = Walk()
    seen: set[int] = set()
    ordered = sorted(roots.items(), key=lambda root: root[0] not in named)
    queue = deque(Met(name, value, kind_of(value, name), named=name in named) for name, value in ordered)
    later: deque[Met] = deque()
    while queue or later:
        here = queue.popleft() if queue else later.popleft()
        plain = type(here.value) in _PLAIN  # two names for one number are no more than for two numbers that are equal
        if id(here.value) in seen and not plain:
            if here.kind in (MODULE, OPTIMIZER, SCHEDULER) and here.depth <= DEEPEST_AGAIN:
                found.again.setdefault(id(here.value), []).append(here.path)
            continue
        seen.add(id(here.value))
        found.met.append(here)
        if len(found.met) > MOST_OBJECTS:
            found.cut.append(here.path)
            break
        for child in _entered(here, found):
            if child.of and id(child.value) in owners and not here.owner:
                later.append(replace(child, owner=child.path))
            else:
                queue.append(child)
    return found


def _without_what_owners_hold(found: Walk) -> Walk:
    """The walk without what does not count beyond an owner."""
    for met in found.met:
        if met.owner and met.kind in _TOLD:
            found.left.setdefault(met.owner, []).append(met.path)
    found.met = [met for met in found.met if not met.owner or met.kind in OF_AN_OWNER]
    return found


def of_owner(left: Sequence[str]) -> str:
    """What is told of an owner, beyond which so much has a state and was left out."""
    names = ", ".join([*left[:MOST_NAMED], *(["…"] if len(left) > MOST_NAMED else [])])
    return (
        "it refers back to what it hangs on; of what it holds modules, optimizers, schedulers and scalers alone are "
        f"looked at, and left out: {names}; give in `state()` what is state"
    )


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
    of = id(here.value) if here.kind in (MODULE, LOADER) else here.of if here.kind == CONTAINER else 0
    for name, child, kind in lively:
        yield Met(f"{here.path}.{name}", child, kind, here.depth + 1, covered, named, here.path, of, here.owner)


def _children(here: Met) -> Iterator[tuple[str, Any, str]]:
    pipelined = type(here.value).__module__.startswith(_PIPELINING)
    for name, child in children_of(here.value):
        if pipelined and name not in _OF_STAGES and kind_of(child, name) != MODULE:
            continue
        if here.kind != OPTIMIZER or not (name in _OF_OPTIMIZERS or name.startswith("_optimizer_")):
            yield name, child, kind_of(child, name)
