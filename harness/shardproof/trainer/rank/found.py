"""The state of a trainer: found by walking from its attributes, and recorded as what this rank holds of it.

A trainer declares nothing. `State` looks at whatever hangs on it and tells the reader, line by line, what was found and
what could not be read; `records` gives the bits. Names are the same in every run of the same trainer, so that two runs
can be compared, and pieces of one logical tensor have one name on all ranks, so that they can be joined.

    role                          of what; under which name
    param, buffer                 modules: the model's own names, without what wrappers put into them; after the path
                                  from the trainer where there are several topmost modules
    exp_avg, exp_avg_sq, step, momentum, state
                                  optimizers (`optimizers`)
    setting                       param groups: `group{i}.{key}`, with the optimizer's path before it where there are
                                  several
    scheduler, scaler             what their `state_dict` has, by path
    rng                           generators, and the random states of Python, numpy and torch
    extra_state                   what any other object's `state_dict` has; tensors that hang on objects or in
                                  containers, but for those that a step makes anew by their name, such as `loss` or
                                  `batch`; whatever tensors and plain values the trainer's own `state()` names;
                                  `get_extra_state` of modules

Parameters, buffers, settings, counts of steps, schedulers, scalers and what `state()` names are *logical*: full copies
on several ranks must agree. What each rank may have for itself is not joined: random states, positions in data, and
tensors that merely hang somewhere outside modules and optimizers. Those have `rank{r}.` in front of their names.

Looking changes nothing. There is no collective, no `state_dict` of a module or an optimizer, and nothing is made that
is not there yet.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from shardproof.observe.logical import Value
from shardproof.observe.record import Record, whole
from shardproof.trainer.rank import kinds, random_states
from shardproof.trainer.rank.item import Item
from shardproof.trainer.rank.leaves import leaf_records, leaves
from shardproof.trainer.rank.modules import Modules, clean, said_of_weights, topmost
from shardproof.trainer.rank.optimizers import Optimizer, as_one, state_of, taken_by
from shardproof.trainer.rank.pieces import (
    At,
    Held,
    Unreadable,
    array_records,
    described,
    held,
    owned,
    records_beside,
    records_of,
)
from shardproof.trainer.rank.still import asked
from shardproof.trainer.rank.walk import Met, Walk, of_owner, walk
from shardproof.trainer.values.every_mesh import passes

EXTRA_STATE, RNG = "extra_state", "rng"
SMALL = 1 << 14
"""Elements of a tensor that an object gave as its state, of which later lines are looked at."""

GLOBAL = ("python", "numpy", "torch", "cuda")
"""The names of the random states that every process has."""


Alike = Callable[[str, tuple[str, ...]], bool]
"""Kind of objects, and the paths of this rank's → whether all ranks have the same. Where they have not, as under
pipeline parallelism, names keep the path of a rank's only module, or two ranks' modules would have the same names."""


def alone(kind: str, paths: tuple[str, ...]) -> bool:
    """The answer of a rank that has no other ranks beside it: its objects are the objects of all."""
    return True


class State:
    """What a trainer's `state()` holds on this rank: what was found, what could not be read, and the optimizers, by the
    latest look. Each call of `records` looks anew, so that what a trainer makes later is seen too. local: patterns of
    names of what is each rank's own. alike: whether all ranks have the same topmost objects of a kind. named: which of
    the roots the trainer's own `state()` gives, beside the attributes that every trainer's gives. folders: what texts
    are compared without, as `own_folders` has it."""

    def __init__(
        self, roots: Mapping[str, object], rank: int, world: int, local: Sequence[str] = (), alike: Alike = alone,
        named: Collection[str] = (), folders: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        self._folders = folders
        self._roots, self._rank, self._world, self._local, self._alike = roots, rank, world, local, alike
        self._named = named
        self._latest: Look | None = None

    @property
    def found(self) -> list[Item]:
        return self._seen.found

    @property
    def hidden(self) -> list[Item]:
        return self._seen.hidden

    @property
    def way(self) -> Walk:
        """Everything that hangs on the trainer, in the order of the walk."""
        return self._seen.way

    @property
    def parameters(self) -> dict[int, Held]:
        """The parameters of modules, by identity."""
        return self._seen.modules.parameters

    @property
    def buffers(self) -> dict[str, Callable[[], torch.Tensor | None]]:
        """The buffers of modules, by name, each as its module has it now."""
        return self._seen.modules.places

    @property
    def leaves(self) -> dict[str, torch.Tensor]:
        """The smaller tensors that objects gave as their state, by name."""
        return self._seen.leaves

    @property
    def frozen(self) -> set[int]:
        """The identities of those with `requires_grad=False`."""
        return self._seen.modules.frozen

    @property
    def optimizers(self) -> list[Optimizer]:
        return self._seen.optimizers

    def tie(self, one: str, other: str) -> str:
        """What two names of parameters are on this rank: `ONE`, `TWO` or `NOT_HERE`."""
        return self._seen.tie(one, other)

    def records(self, op: int) -> Iterator[Record]:
        """The records of the state as it is now. op: the number of the operation that has just run."""
        self._latest = self._look(op)
        yield from self._latest.records

    @property
    def _seen(self) -> Look:
        self._latest = self._latest or self._look(0)
        return self._latest

    def _look(self, op: int) -> Look:
        look = Look(At(op, self._rank, self._folders), walk(self._roots, self._named), self._local, self._alike)
        look.all()
        return look


class Look:
    """One look at everything that a walk met.

    A loader with a state of its own tells that of its sampler and its generator too, and may put them back only when
    its next epoch begins; so those are not looked at besides. A scheduler tells that of the schedulers in it.
    """

    def __init__(self, at: At, way: Walk, local: Sequence[str] = (), alike: Alike = alone) -> None:
        self.at, self.way, self._alike = at, way, alike
        self.records: list[Record] = []
        self.found: list[Item] = []
        self.hidden: list[Item] = []
        self.optimizers: list[Optimizer] = []
        self.modules = Modules(local)
        self._used: set[int] = set()
        self._leaves_told, self.leaves = set[tuple[str, str]](), dict[str, torch.Tensor]()
        self._tensors: dict[str, list[Met]] = {}
        self._told: dict[str, set[int]] = defaultdict(set)

    def all(self) -> None:
        """Fill `records`, `found` and `hidden`."""
        self._look_at_modules()
        self._look_at_optimizers()
        for kind in (kinds.SCHEDULER, kinds.SCALER, kinds.LOADER, kinds.STATEFUL):
            for met in self._outermost_first(kind):
                self._look_at_stateful(met, kind if kind in (kinds.SCHEDULER, kinds.SCALER) else EXTRA_STATE)
        for met in self.way.met:
            match met.kind:
                case kinds.GENERATOR:
                    self._look_at_generator(met)
                case kinds.TENSOR:
                    self._look_at_tensor(met)
                case kinds.CONTAINER if met.named:
                    self._look_at_values(met)
                case kinds.ITERATOR | kinds.FILE | kinds.OPAQUE | kinds.OBJECT | kinds.PASSIVE:
                    self._look_at_rest(met)
        self._look_at_global_generators()
        self._tell_tensors()
        self._miss()

    def tie(self, one: str, other: str) -> str:
        """What two names of parameters are on this rank: `ONE`, `TWO` or `NOT_HERE`."""
        return self.modules.tie(one, other)

    def _of_kind(self, kind: str) -> list[Met]:
        return [met for met in self.way.met if met.kind == kind]

    def _outermost_first(self, kind: str) -> list[Met]:
        """The objects of one kind, such as schedulers: a scheduler before the schedulers inside of it."""
        mets = self._of_kind(kind)
        inner = {id(met.value): {*self.way.below(id(met.value))} for met in mets}
        return sorted(mets, key=lambda met: sum(id(met.value) in held for held in inner.values()))

    def _find(self, met: Met, detail: str, kind: str | None = None) -> None:
        self._used.add(id(met.value))
        self.found.append(Item(met.path, kind or met.kind, detail))

    def _hide(self, name: str, kind: str, why: str) -> None:
        self.hidden.append(Item(name, kind, why))

    def _add(self, name: str, kind: str, records: Iterator[Record]) -> None:
        try:
            self.records += records
        except Unreadable as reason:
            self._hide(name, kind, f"{reason}; leave it out of `state()`, or give there what can be read of it")

    # --- modules

    def _look_at_modules(self) -> None:
        mets = {met.path: met for met in self._of_kind(kinds.MODULE)}
        self._used |= {id(met.value) for met in mets.values()}
        tops = topmost({path: met.value for path, met in mets.items()})
        alike = self._alike("modules", tuple(tops))  # of which every rank has to tell the others
        named = len(tops) > 1 or not alike
        for path, module in tops.items():
            self._look_at_module(mets[path], module, f"{path}." if named else "")
        for parameter in self.modules.params:
            self._add(parameter.names[0][0] if parameter.names else "", "module",
                      records_of(self.at, "param", parameter))  # fmt: skip
        for name, buffer in self.modules.buffers.items():
            fqn = owned(self.at.rank, name) if self.modules.is_local(name) else name
            self._add(name, "module", leaf_records(self.at, "buffer", fqn, buffer))
        for path, module in self.modules.extra:
            name = f"{path}._extra_state" if path and not path.endswith(".") else f"{path}_extra_state"
            self._ask(name, "module", EXTRA_STATE, module, module.get_extra_state)
        for path, why in said_of_weights({path: met.value for path, met in mets.items()}).items():
            self._hide(path, "module", why)
        for name, reason in self.modules.unread.items():
            self._hide(name, "module", f"{reason}; leave it out of `state()`, or give there what can be read of it")
        locals_ = [parameter.local for parameter in self.modules.params]
        if locals_ and _cuda_is_in_use() and not any(tensor.is_cuda for tensor in locals_):
            self._hide("device", "module", "CUDA is in use, and no parameter lies on a GPU: unless the trainer "
                       "offloads them all, what runs is a CPU; build the model on `cell.device`")  # fmt: skip

    def _look_at_module(self, met: Met, module: torch.nn.Module, prefix: str) -> None:
        params, buffers = len(self.modules.params), len(self.modules.buffers)
        before = {*self.modules.parameters}
        self.modules.add(module, prefix)
        names = [names for one in self.modules.params[params:] for names in one.names]
        kind = described([p for p in module.parameters() if id(p) in self.modules.parameters and id(p) not in before])
        words = _counted(len(names), "parameter") + (f" ({kind})" if kind else "")
        count = _counted(len(self.modules.buffers) - buffers, "buffer")
        self._find(met, f"{type(module).__name__}, {words}, {count}")

    # --- optimizers

    def _look_at_optimizers(self) -> None:
        targets = self._optimizers()
        elsewhere = {id(met.value): met.path for met in self._of_kind(kinds.TENSOR)}
        taken: set[tuple[str, str]] = set()
        alike = self._alike("optimizers", tuple(met.path for met in targets))
        named = len(targets) > 1 or not alike
        for met in targets:
            groups = [group for group in met.value.param_groups if isinstance(group, Mapping)]
            prefix = f"{met.path}." if named else ""
            optimizer = Optimizer(met.path, met.value, prefix, taken)
            records = list(optimizer.records(self.at, self.modules, elsewhere))
            self.records += records
            self.optimizers.append(optimizer)
            taken = taken | taken_by(records)
            self._used |= {id(tensor) for group in groups for tensor in group.get("params", ())}
            told = _counted(len(groups), "group") + optimizer.misses(self.modules)
            self._find(met, f"{type(met.value).__name__}, {told}")
            for name, reason in optimizer.unread.items():
                self._hide(name, "optimizer", reason)

    def _optimizers(self) -> list[Met]:
        """Every optimizer once: of a wrapper and what it wraps, the inner one, as far as both have the same state."""
        chosen, mets = list[Met](), as_one(self._of_kind(kinds.OPTIMIZER))
        for met in mets:
            inner = [other for other in mets if id(other.value) in self.way.below(id(met.value))]
            if inner and (not state_of(met.value) or any(state_of(o.value) is state_of(met.value) for o in inner)):
                self._used.add(id(met.value))
                continue
            if state_of(met.value) is None:
                self._look_at_one_without_state(met)
            elif not any(state_of(other.value) is state_of(met.value) for other in chosen):
                chosen.append(met)
        return chosen

    def _look_at_one_without_state(self, met: Met) -> None:
        """An optimizer that has no mapping `state`: the tensors in it are looked at, or nobody knows what it keeps."""
        below = {*self.way.below(id(met.value))} - self.modules.parameters.keys()
        if any(id(other.value) in below for other in self._of_kind(kinds.TENSOR)):
            self._find(met, f"{type(met.value).__name__}, which has no mapping `state`: its tensors are looked at")
            return
        why = "it has no mapping `state`, and no optimizer in it was found; give what it keeps in `state()`"
        self._hide(met.path, "optimizer", why)

    # --- what tells its state by itself

    def _look_at_stateful(self, met: Met, role: str) -> None:
        if id(met.value) in self._told[met.kind]:
            return
        if met.kind == kinds.STATEFUL and self._holds_state(met):
            self._look_at_numbers(met)
            return
        waiting = met.kind == kinds.LOADER and kinds.waits(met.value)
        own = met.kind == kinds.LOADER
        if waiting:
            self._leaves(met.path, met.kind, role, vars(met.value).get("next_iter_state") or {}, own=own)
            self._find(met, f"{type(met.value).__name__}, not iterating: the position it was given, if any")
        elif self._ask(met.path, met.kind, role, met.value, lambda: met.value.state_dict(), own=own):
            self._find(met, type(met.value).__name__)
        else:
            if any(name.startswith(f"{met.path}.") for _, name in self._leaves_told):
                self._used.add(id(met.value))
            return
        if met.kind != kinds.STATEFUL:
            self._told[met.kind] |= {*self.way.below(id(met.value))}

    def _holds_state(self, met: Met) -> bool:
        """Whether modules or optimizers hang on an object: its `state_dict` may then gather them."""
        lively = {id(m.value) for m in self.way.met if m.kind in (kinds.MODULE, kinds.OPTIMIZER)}
        return any(child in lively for child in self.way.below(id(met.value)))

    def _look_at_numbers(self, met: Met) -> None:
        """Of an object that holds modules or optimizers, its own counts; its `state_dict` is not called."""
        self._used.add(id(met.value))
        counts = {name: n for name, n in kinds.children_of(met.value) if type(n) is int and name[:1] != "_"}
        for name, count in counts.items():
            self._add(met.path, met.kind, leaf_records(self.at, EXTRA_STATE, f"{met.path}.{name}", count))
        if counts:
            told = f"{type(met.value).__name__}, its counts {', '.join(counts)}"
            self._find(met, f"{told}; its state_dict is not called, since it may gather modules")

    def _ask(self, name: str, kind: str, role: str, target: object, call: Any, *, own: bool = False) -> bool:
        """Record what a call such as `state_dict` returns. Returns False where it raised or returned an empty dict."""
        try:
            value, changed = asked(target, call)
        except Unreadable as reason:
            if not (kind == kinds.LOADER and isinstance(reason.__cause__, AttributeError)):
                self._hide(name, kind, f"asked for its state, {reason}; give what it keeps in `state()`")
            return False
        if changed:
            self._hide(name, kind, f"asked for its state, it {changed}, which was put back; give what it keeps in "
                       "`state()`")  # fmt: skip
        if isinstance(value, Mapping) and not value:
            return False
        return self._leaves(name, kind, role, value, own=own)

    def _leaves(self, name: str, kind: str, role: str, value: object, *, own: bool) -> bool:
        """Record every leaf of a nested state. Returns False where an object further out has told all of it."""
        before = len(self.records), len(self.hidden)
        for path, leaf in leaves(value, name):
            if (role, path) in self._leaves_told:
                continue
            self._leaves_told.add((role, path))
            tensor, mine = isinstance(leaf, torch.Tensor), own or self.modules.is_local(path)
            if isinstance(leaf, torch.Tensor) and leaf.numel() <= SMALL:
                self.leaves[path] = leaf
            if tensor and not mine and role == EXTRA_STATE:
                self._add(path, kind, self._loose(path, leaf))
                continue
            fqn = owned(self.at.rank, path) if mine and not tensor else path
            self._add(path, kind, leaf_records(self.at, role, fqn, leaf, own=mine))
        return before != (len(self.records), len(self.hidden))

    # --- generators, tensors and the rest

    def _look_at_generator(self, met: Met) -> None:
        if id(met.value) in self._told[kinds.LOADER]:
            return
        self._rng(f"{met.path}.generator" if met.path in GLOBAL else met.path, random_states.of(met.value))
        self._find(met, type(met.value).__name__)

    def _look_at_global_generators(self) -> None:
        for name, value in random_states.of_process(cuda=_cuda_is_in_use()):
            self._rng(name, value)

    def _rng(self, name: str, value: Value) -> None:
        self.records.append(whole(self.at.op, self.at.rank, RNG, name, value.dtype, value.shape, value.data))

    def _look_at_tensor(self, met: Met) -> None:
        value = met.value
        if met.covered or id(value) in self._used or id(value) in self.modules.parameters:
            return
        if passes(met.path) and not met.named:
            what = f"{type(value).__name__} of {list(value.shape)}"
            told = f"{what}, not recorded: its name is that of what a step makes anew"
            self._find(met, f"{told}; to have it compared, give it in `state()`")
            return
        own = self._of_this_rank(met)
        if isinstance(value, np.ndarray):
            fqn = owned(self.at.rank, met.path) if own else met.path
            self._add(met.path, met.kind, array_records(self.at, EXTRA_STATE, fqn, value))
        else:
            self._add(met.path, met.kind, self._loose(met.path, value, own=own))
        self._used.add(id(value))
        self._tensors.setdefault(met.holder or met.path, []).append(met)

    def _of_this_rank(self, met: Met) -> bool:
        """Whether a value is this rank's alone: what `state()` names is all ranks', unless it is local."""
        return not met.named or self.modules.is_local(met.path)

    def _look_at_values(self, met: Met) -> None:
        """The plain values in a container that `state()` names, such as metrics that were reduced to numbers."""
        children = kinds.children_of(met.value)
        values = [(f"{met.path}.{name}", value) for name, value in children if kinds.is_value(value)]
        for name, value in values:
            fqn = owned(self.at.rank, name) if self.modules.is_local(name) else name
            self._add(name, kinds.VALUE, leaf_records(self.at, EXTRA_STATE, fqn, value))
        if values:
            self._find(met, _counted(len(values), "value"), kinds.VALUE)

    def _tell_tensors(self) -> None:
        """One line for the tensors of each object or container."""
        for holder, mets in self._tensors.items():
            first = mets[0].value
            if len(mets) == 1:
                told = Item(mets[0].path, kinds.TENSOR, f"{type(first).__name__} of {list(first.shape)}")
            else:
                names = [met.path.removeprefix(f"{holder}.") for met in (mets[0], mets[-1])]
                told = Item(holder, kinds.TENSOR, f"{len(mets)} tensors, {' to '.join(names)}")
            self.found.append(told)

    def _loose(self, path: str, tensor: torch.Tensor, *, own: bool = True) -> Iterator[Record]:
        """A tensor that hangs on an object: where it has a parameter's name and local shape, as an average of it has,
        it lies where the parameter lies. own: a plain one is this rank's alone."""
        for name, parameter in self.modules.names.items():
            before, found, after = f".{clean(path)}".rpartition(f".{name}")
            if found and not after and tensor.shape == parameter.local.shape and len(parameter.names) == 1:
                yield from records_beside(self.at, EXTRA_STATE, tensor, parameter.renamed(f"{before[1:]}.{name}"))
                return
        for piece in held(tensor, (path,), own=own):
            yield from records_of(self.at, EXTRA_STATE, piece)

    def _look_at_rest(self, met: Met) -> None:
        if met.depth == 0 and kinds.is_value(met.value):
            fqn = owned(self.at.rank, met.path) if self.modules.is_local(met.path) else met.path
            self._add(met.path, kinds.VALUE, leaf_records(self.at, EXTRA_STATE, fqn, met.value))
            self._find(met, type(met.value).__name__, kinds.VALUE)
        elif kinds.has(met.value, "set_epoch") and isinstance(getattr(met.value, "epoch", None), int):
            fqn = f"{met.path}.epoch"
            self._add(met.path, kinds.LOADER, leaf_records(self.at, EXTRA_STATE, fqn, met.value.epoch))
            self._find(met, f"{type(met.value).__name__}, its epoch", kinds.LOADER)
        elif not met.covered:
            self._look_at_opaque(met)

    def _look_at_opaque(self, met: Met) -> None:
        """Say of what has a position or a state, and shows neither, that it is hidden."""
        kind = type(met.value).__name__
        if met.kind == kinds.ITERATOR and not self._told_by_loader(met.value):
            self._hide(met.path, kinds.LOADER, f"{kind}: how far it has come cannot be read; give its position in "
                       "`state()`, or make it anew for each step, from the step's number")  # fmt: skip
        elif met.kind == kinds.FILE:
            self._hide(met.path, kinds.VALUE, f"{kind}: an open file, whose position is not looked at; give it in "
                       "`state()`, or leave the file out there")  # fmt: skip
        elif met.kind == kinds.OPAQUE and (met.depth == 0 or kinds.looks_like_state(met.word, met.value)):
            self._hide(met.path, kinds.VALUE, f"{kind} shows no attributes; give what it keeps in `state()`, or leave "
                       "it out there")  # fmt: skip

    def _told_by_loader(self, iterator: object) -> bool:
        """Whether an iterator's position is told by a loader that was found: the loader keeps this iterator, or the
        iterator is a running method of it."""
        loaders = [met.value for met in self.way.met if met.kind in (kinds.LOADER, kinds.STATEFUL)]
        frame = getattr(iterator, "gi_frame", None)
        of = frame.f_locals.get("self") if frame is not None else None
        return any(
            of is one or any(iterator is part for _, part in kinds.children_of(one))
            for one in loaders
            if id(one) in self._used
        )

    def _miss(self) -> None:
        """Say where nothing was found in what looks like state, and where the walk stopped."""
        for met in self.way.met:
            looks = met.kind in (kinds.OBJECT, kinds.CONTAINER, kinds.STATEFUL) and not met.covered
            if looks and id(met.value) not in self._used and kinds.looks_like_state(met.word, met.value):
                hidden = {item.name for item in self.hidden}
                if met.path in hidden or any(name.startswith(f"{met.path}.") for name in hidden):
                    continue
                if self._used.isdisjoint(self.way.below(id(met.value))):
                    self._hide(met.path, "value", f"{type(met.value).__name__} looks like state, and none was found in "
                               "it; give what it keeps in `state()`, or leave it out there")  # fmt: skip
        for owner, left in self.way.left.items():
            self.found.append(Item(owner, "owner", of_owner(left)))
        for path in self.way.cut:
            self._hide(path, "value", "it holds too much, or lies too deep, to be walked through; give what is state "
                       "in it in `state()`, or leave it out there")  # fmt: skip


def _cuda_is_in_use() -> bool:
    return torch.cuda.is_available() and bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _counted(n: int, word: str) -> str:
    return f"{n} {word}{'' if n == 1 else 's'}"
