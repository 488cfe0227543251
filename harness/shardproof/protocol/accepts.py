"""What a system accepts: an allow-list of axes, and limits within it.

A system says of every axis which values it understands. An axis that it does not mention must keep its default, and a
value that it does not list is refused, so that a new axis, or a new value of an old one, is refused by every system
until one declares it. For example, FSDP2's list says `sharding=Only("fully_shard", …)`: when `zero2` was added to the
axis for another system, FSDP2 refused it without a change of its own, with one honest reason.

What remains within the allowed values is cut down by *limits* (the library, or our way of driving it, refuses a
combination: the verdict is `unsupported`, with the reason and where the library says so) and by *constraints* (the
combination has no single right answer, or repeats another scenario: a walk leaves it out, and a scenario file that asks
for it is bad input).

Imports no library and no system.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, Protocol

from shardproof.loading import as_loaded
from shardproof.models import model_spec
from shardproof.program import changes, kinds_of, load_mesh, moves, named_programs
from shardproof.protocol.features import Feature
from shardproof.scenario import AXES, Scenario


@dataclass(frozen=True)
class LibraryError:
    """What the library raises: the exception type's name, a part of its message, and the operation that raises.

    axes: of a scenario that shows it, in text form; what they lack is that of the system's plain scenario. The
    conformance kit runs it. may_hang: before the library refuses, its ranks may wait for each other for ever.
    """

    kind: str
    message: str
    op: str
    axes: Mapping[str, str] = field(default_factory=dict, hash=False)
    may_hang: bool = False


MODULES_KEEP = {
    "opaque": "bytes of their own that only the reference makes",
    "draws": "random generators that are saved with the model",
    "quantised": "fp8 weights beside the parameters that the optimizer steps",
}
"""What a module of a model may keep beside parameters and buffers, as `ModuleSpec` names it, and in words."""


@dataclass(frozen=True)
class Limit:
    """A set of scenarios that a system refuses.

    * id: stable name.
    * refuses: whether a scenario is one of them; it reads few axes, the most telling first, so that plans can tabulate
      it.
    * reason: for the reader.
    * source: where the library says so.
    * error: its error; None where the combination has no meaning for this system, or is not driven here.
    """

    id: str
    refuses: Callable[[Scenario], bool]
    reason: str
    source: str = ""
    error: LibraryError | None = None


@dataclass(frozen=True)
class Constraint:
    """One rule of exclusion.

    * id: stable name.
    * reason: for the reader.
    * excludes: whether a scenario is left out.
    * repeats: it is sound but does what another one does: walks leave it out, a scenario file may still ask for it.
    """

    id: str
    reason: str
    excludes: Callable[[Scenario], bool]
    repeats: bool = False


class Allowed(Protocol):
    """A set of values for an axis, or for a part of an axis such as `dtype.param`, that a system understands."""

    def refuses(self, value: Any) -> bool:
        """Whether a typed value is not one of them."""

    @property
    def text(self) -> str:
        """The allowed values, for a reader."""


@dataclass(frozen=True)
class Anything:
    """Every value there can be: of numbers, meshes, models and the like, which have no list."""

    def refuses(self, value: Any) -> bool:
        return False

    @property
    def text(self) -> str:
        return "anything"


class Only:
    """The values given, and no other. None stands for a stage of a dtype policy that is left to the stage before.

    Args:
        because: a clause that says why, for the reader.
    """

    def __init__(self, *values: Any, because: str = "") -> None:
        self.values, self.because = values, because

    def refuses(self, value: Any) -> bool:
        return value not in self.values

    @property
    def text(self) -> str:
        listed = ", ".join("unset" if value is None else str(value) for value in self.values)
        return listed + (f" ({self.because})" if self.because else "")


@dataclass(frozen=True)
class Words:
    """An axis whose value is a set of words joined by `+`, such as a system's own switches in `options`. `meaning`
    documents every allowed word. An axis of the ranks that load may be left as it is."""

    meaning: Mapping[str, str] = field(hash=False)

    def refuses(self, value: Sequence[str] | None) -> bool:
        return value is not None and not set(value) <= self.meaning.keys()

    @property
    def text(self) -> str:
        return ", ".join(self.meaning) or "none"


@dataclass(frozen=True)
class Formats:
    """Checkpoint formats, each with the switches that may follow it after a `+`, in any order. The first is the
    plainest: what a program that saves nothing has."""

    switches: Mapping[str, Sequence[str]] = field(hash=False)

    def refuses(self, value: str) -> bool:
        form, *given = value.split("+")
        return form not in self.switches or not set(given) <= set(self.switches[form]) or len(set(given)) != len(given)

    @property
    def plainest(self) -> str:
        return next(iter(self.switches))

    @property
    def text(self) -> str:
        return ", ".join("".join([form, *(f"[+{s}]" for s in given)]) for form, given in self.switches.items())


class Loads:
    """Relations of the load mesh to the saving one, and every mesh that is spelled out."""

    def __init__(self, *relations: str) -> None:
        self.relations = relations

    def refuses(self, value: str) -> bool:
        return value not in self.relations and not value[:1].isdecimal()

    @property
    def text(self) -> str:
        return f"{', '.join(self.relations)}, or a mesh"


@dataclass(frozen=True)
class Operations:
    """Programs made of these operations. because: why the others are not there."""

    kinds: tuple[str, ...]
    because: str = ""

    def refuses(self, value: str) -> bool:
        return not kinds_of(value) <= {*self.kinds, "reshard", "restart"}

    @property
    def text(self) -> str:
        programs = [name for name, words in named_programs().items() if not self.refuses(words)]
        reason = f"; {self.because}" if self.because else ""
        return f"programs of {', '.join(self.kinds)} ({', '.join(programs)}){reason}"


class Faults:
    """Faults that strike a system from outside; logical faults mutate the reference."""

    def __init__(self, *, logical: bool = False) -> None:
        self.logical = logical

    def refuses(self, value: Sequence[str]) -> bool:
        return any(fault.startswith("boundary.") is self.logical for fault in value)

    @property
    def text(self) -> str:
        if self.logical:
            return "logical faults (boundary faults strike real ranks, and this system runs in lockstep)"
        return "boundary faults (logical faults mutate the reference, and this system runs unmodified)"


class Parts:
    """What is allowed of each part of a value that is made of several, such as a dtype policy; the parts that are not
    named must keep their default."""

    def __init__(self, whole: type, /, **allowed: Allowed) -> None:
        self.whole, self.allowed = whole, allowed
        unknown = allowed.keys() - {f.name for f in fields(whole)}
        if unknown:
            raise TypeError(f"{whole.__name__} has no {', '.join(sorted(unknown))}")

    def parts(self) -> dict[str, Allowed]:
        """For every part of a structured axis, the allowed values; a part that the system does not list may only have
        its default."""
        defaults = vars(self.whole())
        return {name: self.allowed.get(name, Only(default)) for name, default in defaults.items()}


NUMBERS = {name: Anything() for name in ("lr", "weight_decay", "beta1", "beta2", "eps", "momentum")}
"""Parts of an optimizer that every system takes as they come."""

EVERY_STEP = ("build", "step", "overflow", "save", "load", "load_model_only", "reload_params", "unfreeze")
"""Every operation of a program, but for what a loop that a library closes cannot do from outside."""

OPEN_LOOP = (
    "accumulate", "compute_gradients", "apply_gradients", "keep", "recall", "save_kept", "load_optimizer_only",
    "load_schedule_only", "add_group", "replace_params", "begin_save", "finish_save",
)  # fmt: skip
"""What takes a training loop that is the user's own: halves of a step, state dicts in memory, groups that join, a save
that goes on beside steps."""

_ALWAYS = ("system", "version")


class Accepts:
    """The allow-list of a system, its limits and its constraints.

    Args:
        name: of the system, for reasons. limits, constraints: within what the axes allow; see the module's text.
        keeps: of what modules may keep beside parameters and buffers (`MODULES_KEEP`), what the system has: a model
            with anything else would run as if it had it not.
        features: what limits ask for with `shardproof.protocol.features.lacks`, so that a tree's source is read for it.
        axes: axis → what is allowed of it, `Parts` for `dtype`, `optimizer` and `offload`.
    """

    def __init__(
        self,
        name: str,
        *,
        limits: Sequence[Limit] = (),
        constraints: Sequence[Constraint] = (),
        keeps: Collection[str] = (),
        features: Sequence[Feature] = (),
        **axes: Allowed | Parts,
    ) -> None:
        unknown = axes.keys() - set(AXES)
        if unknown:
            raise TypeError(f"a scenario has no axis {', '.join(sorted(unknown))}")
        self.name, self.axes, self.own_limits, self.constraints = name, axes, tuple(limits), tuple(constraints)
        self.features = tuple(features)
        self.lacks = {what: told for what, told in MODULES_KEEP.items() if what not in keeps}

    @cached_property
    def limits(self) -> tuple[Limit, ...]:
        """Everything that the system refuses: first what its allow-list lacks, an axis or part of one at a time."""
        default = Scenario()
        lists: list[Limit | None] = []
        for axis in AXES:
            if axis in _ALWAYS:
                continue
            allowed = self.axes.get(axis, Only(getattr(default, axis)))
            if isinstance(allowed, Parts):
                lists += [_part_limit(self.name, axis, part, each) for part, each in allowed.parts().items()]
            else:
                lists.append(_axis_limit(self.name, axis, allowed))
        lists += [_model_limit(self.name, what, told) for what, told in self.lacks.items()]
        return (*(limit for limit in lists if limit is not None), *self.own_limits)

    @cached_property
    def load_limits(self) -> tuple[Limit, ...]:
        """The same limits on ranks that load with dtypes, or a release, of their own."""
        return tuple(_limit_of_load(limit) for limit in self.limits)

    def refusal(self, scenario: Scenario) -> Limit | None:
        """The first limit that refuses a scenario; None where none does."""
        limits = (*self.limits, *self.load_limits) if changes(scenario) else self.limits
        return next((limit for limit in limits if limit.refuses(scenario)), None)

    @property
    def options(self) -> Mapping[str, str]:
        """Word of the `options` axis → what it does."""
        words = self.axes.get("options")
        return words.meaning if isinstance(words, Words) else {}

    @property
    def plainest_checkpoint(self) -> str:
        """The checkpoint format that is filled in for a program without a save, where the format has no effect."""
        formats = self.axes.get("checkpoint")
        return formats.plainest if isinstance(formats, Formats) else Scenario().checkpoint

    @property
    def devices(self) -> tuple[str, ...]:
        """Devices that the system runs on."""
        devices = self.axes.get("device")
        return devices.values if isinstance(devices, Only) else (Scenario().device,)


def _limit_of_load(limit: Limit) -> Limit:
    """The same limit on the ranks that load, where they have dtypes or a release of their own."""

    def refuses(scenario: Scenario) -> bool:
        return changes(scenario) and not limit.refuses(scenario) and limit.refuses(as_loaded(scenario))

    return Limit(f"{limit.id}-load", refuses, f"after the load: {limit.reason}", limit.source)


def _model_limit(system: str, what: str, told: str) -> Limit:
    def has(model: str) -> bool:
        return any(getattr(module, what) for module in model_spec(model).modules)

    return Limit(f"model-{what}", lambda s: s.fact("model", has), f"{system} has no modules with {told}")


def _axis_limit(system: str, axis: str, allowed: Allowed) -> Limit | None:
    if isinstance(allowed, Anything):
        return None
    reason = f"{system} has these values of {axis}: {allowed.text}"
    return Limit(axis, _refuses(axis, allowed.refuses), reason)


def _part_limit(system: str, axis: str, part: str, allowed: Allowed) -> Limit | None:
    if isinstance(allowed, Anything):
        return None

    def refuses(value: Any) -> bool:
        return allowed.refuses(getattr(value, part))

    reason = f"{system} has these values of {axis} {part}: {allowed.text}"
    return Limit(f"{axis}-{part}", _refuses(axis, refuses), reason)


def _refuses(axis: str, value: Callable[[Any], bool]) -> Callable[[Scenario], bool]:
    """Whether a scenario has a value that is refused. What is allowed of `mesh` binds the ranks that load as well: a
    system of two ranks cannot load on the four that `load=grow` asks for."""
    if axis != "mesh":
        return lambda scenario: scenario.fact(axis, value)

    def refuses(scenario: Scenario) -> bool:
        there = load_mesh(scenario) if moves(scenario) else None
        return scenario.fact(axis, value) or (there is not None and value(there))

    return refuses
