"""A scenario: one frozen, hashable value that says exactly what is built, run and compared.

Its fields are the axes of the space. Every axis has a canonical text (`str(part)`, `Part.parse(text)`), the same in
TOML files, on the command line and in reports: `mesh = "2x2x1"`, `dtype = "fp32/param=bf16/reduce=fp32"`.

A scenario's id is the digest of the fields that differ from their defaults, and of a schema number. So an axis that is
added later renames no existing scenario, as long as its default means what was always done.

This module imports nothing of ours but the error type, what a number is and how a file is read, and knows no library
under test.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, lru_cache
from math import inf
from typing import Any, TypeVar

from shardproof.errors import UsageError
from shardproof.plain_values import assignments, typed, words
from shardproof.tables import SCHEMA, load_toml
from shardproof.versions import split_cures

T = TypeVar("T")

FLOAT_DTYPES = ("fp32", "bf16", "fp16")

MOMENT_DTYPES = (*FLOAT_DTYPES, "fp8e4m3")

STORAGE_DTYPES = (*FLOAT_DTYPES, "mixed", "mixed_fp16")


@dataclass(frozen=True, order=True)
class Mesh:
    """A device mesh `(dp_replicate, dp_shard, tp)`; written `RxSxT`, e.g. `2x2x1`. The last dim varies fastest."""

    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        if min(self.dp_replicate, self.dp_shard, self.tp) < 1:
            raise UsageError.of("mesh", str(self), "sizes of 1 or more", "2x2x1")

    @property
    def dp(self) -> int:
        """Number of data-parallel ranks, replicate times shard: the divisor of a gradient average."""
        return self.dp_replicate * self.dp_shard

    @property
    def world(self) -> int:
        return self.dp * self.tp

    def coordinate(self, rank: int) -> tuple[int, int, int]:
        """`(replicate, shard, tp)` index of a global rank, row-major."""
        return rank // (self.dp_shard * self.tp), rank // self.tp % self.dp_shard, rank % self.tp

    def dp_index(self, rank: int) -> int:
        """Index of a global rank among the data-parallel ranks: which slice of the batch it sees."""
        return rank // self.tp

    def __str__(self) -> str:
        return f"{self.dp_replicate}x{self.dp_shard}x{self.tp}"

    @classmethod
    def parse(cls, text: str) -> Mesh:
        match = re.fullmatch(r"([0-9]{1,18})x([0-9]{1,18})x([0-9]{1,18})", text.strip())
        if not match:
            raise UsageError.of("mesh", text, "dp_replicate x dp_shard x tp", "2x2x1")
        return cls(*(int(g) for g in match.groups()))


@dataclass(frozen=True, order=True)
class DTypePolicy:
    """Which dtype each stage has, as the user asks for it. None means "whatever the stage before has".

    Written as the storage dtype followed by the stages that differ, e.g. `fp32/param=bf16/reduce=fp32`.

    * storage: dtype of the model's parameters: `fp32`, `bf16`, `fp16`, or each parameter's own: islands in fp32, the
      bulk in bf16 (`mixed`) or fp16 (`mixed_fp16`).
    * param: dtype the forward computes in (FSDP2 `MixedPrecisionPolicy.param_dtype`).
    * reduce: dtype gradients are reduced in, and accumulated in before that.
    * output: dtype of the forward's floating-point output.
    * master: dtype of separate optimizer-owned master parameters (ZeRO-1 style systems).
    * grad: dtype of the gradient that the optimizer reads, where it need not be the master's (precision-aware).
    * exp_avg, exp_avg_sq: dtypes the moments are stored in, where they need not be the master's (precision-aware).
    """

    storage: str = "fp32"
    param: str | None = None
    reduce: str | None = None
    output: str | None = None
    master: str | None = None
    grad: str | None = None
    exp_avg: str | None = None
    exp_avg_sq: str | None = None

    def __post_init__(self) -> None:
        if self.storage not in STORAGE_DTYPES:
            raise UsageError.of("dtype storage", self.storage, STORAGE_DTYPES, "bf16")
        for stage in _DTYPE_STAGES:
            value = getattr(self, stage)
            allowed = MOMENT_DTYPES if stage in ("exp_avg", "exp_avg_sq") else FLOAT_DTYPES
            if value is not None and value not in allowed:
                raise UsageError.of(f"dtype stage {stage!r}", value, allowed, f"fp32/{stage}=bf16")

    def __str__(self) -> str:
        stages = ((f.name, getattr(self, f.name)) for f in fields(self)[1:])
        return "/".join([self.storage, *(f"{name}={value}" for name, value in stages if value)])

    @classmethod
    def parse(cls, text: str) -> DTypePolicy:
        storage, *stages = text.strip().split("/")
        return cls(storage, **assignments("dtype", stages, _DTYPE_STAGES, "fp32/param=bf16"))


_DTYPE_STAGES = tuple(f.name for f in fields(DTypePolicy)[1:])


@dataclass(frozen=True, order=True)
class Offload:
    """CPU offload: the fraction of the optimizer's elements that live on the host. `none`, `cpu`, `cpu=0.5`."""

    fraction: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.fraction <= 1.0:
            raise UsageError.of("offload", self.fraction, "a fraction from 0 to 1", "cpu=0.5")

    def __str__(self) -> str:
        return "none" if self.fraction == 0 else "cpu" if self.fraction == 1 else f"cpu={self.fraction!r}"

    @classmethod
    def parse(cls, text: str) -> Offload:
        match text.strip():
            case "none":
                return cls(0.0)
            case "cpu":
                return cls(1.0)
            case other:
                found = re.fullmatch(r"cpu=([0-9]*\.?[0-9]+(?:e-?[0-9]+)?)", other)
                if not found:
                    raise UsageError.of("offload", text, "none, cpu, cpu=FRACTION", "cpu=0.5")
                return cls(float(found[1]))


DEVICES = ("cpu", "cuda")

OPTIMIZER_KINDS = ("sgd", "adam", "adamw", "muon")
TORCH_SCHEDULES = ("none", "halve", "linear", "cosine", "onecycle", "warmup")
SCHEDULES = (*TORCH_SCHEDULES, "wsd", "growing_decay")  # which `shardproof.schedules` describes
OPTIMIZER_IMPLEMENTATIONS = ("forloop", "foreach", "fused", "multi_tensor")


@dataclass(frozen=True, order=True)
class Optimizer:
    """An optimizer and what surrounds its step; written `adamw/impl=foreach/clip=1.0`.

    Numbers are python floats as torch.optim takes them. `momentum` and `nesterov` matter to sgd only,
    `beta1`, `beta2`, `eps` to adam and adamw. `groups=model` applies the model's per-group overrides;
    `groups=one` puts every parameter into one group. `impl`: torch.optim's `forloop`, `foreach` and `fused`, or
    `multi_tensor`, the FusedAdam and FusedSGD of apex and TransformerEngine. `clip` is the global-norm bound (0 = off),
    `loss_scale` the initial dynamic loss scale, a power of two (0 = off), `schedule` the LR schedule, by its name in
    `shardproof.schedules`. `capturable`: the switch of torch.optim's Adam, which keeps step counters and bias
    corrections on the GPU. `tensor_lr`: the learning rate of each group is given as a tensor.
    """

    kind: str = "adamw"
    impl: str = "foreach"
    lr: float = 0.03125
    weight_decay: float = 0.125
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    momentum: float = 0.9
    nesterov: bool = False
    groups: str = "model"
    clip: float = 0.0
    loss_scale: float = 0.0
    schedule: str = "none"
    capturable: bool = False
    tensor_lr: bool = False

    def __post_init__(self) -> None:
        _one_of("optimizer kind", self.kind, OPTIMIZER_KINDS, "adamw")
        _one_of("optimizer impl", self.impl, OPTIMIZER_IMPLEMENTATIONS, "adamw/impl=fused")
        _one_of("optimizer groups", self.groups, ("model", "one"), "adamw/groups=one")
        _one_of("optimizer schedule", self.schedule, SCHEDULES, "adamw/schedule=halve")
        for name in ("lr", "weight_decay", "eps", "momentum", "clip"):
            if not 0.0 <= getattr(self, name) < inf:
                raise UsageError.of(
                    f"optimizer {name}", getattr(self, name), "a finite number, 0 or more", f"{name}=0.5"
                )
        for name in ("beta1", "beta2"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise UsageError.of(f"optimizer {name}", getattr(self, name), "from 0 to below 1", f"{name}=0.5")
        if self.nesterov and self.momentum <= 0:
            raise UsageError.of(
                "optimizer nesterov", self.momentum, "a momentum above 0", "sgd/nesterov=true/momentum=0.9"
            )
        if self.loss_scale and (self.loss_scale < 1 or self.loss_scale.hex().split("p")[0] != "0x1.0000000000000"):
            raise UsageError.of(
                "optimizer loss_scale", self.loss_scale, "0 or a power of two", "adamw/loss_scale=1024.0"
            )

    def at_build(self, init_seed: int) -> Optimizer:
        """A build's hyperparameters: the scenario's own at the first build, others later: a load that forgets shows."""
        if init_seed == 0:
            return self
        return replace(
            self,
            lr=self.lr * 2,
            weight_decay=self.weight_decay + 0.125,
            beta1=self.beta1 / 2,
            beta2=self.beta2 / 2,
            eps=self.eps * 2,
            momentum=self.momentum / 2,
            loss_scale=self.loss_scale / 2 if self.loss_scale > 1 else self.loss_scale,
        )

    def __str__(self) -> str:
        changed = [
            f"{f.name}={_render(getattr(self, f.name))}" for f in fields(self)[1:] if getattr(self, f.name) != f.default
        ]
        return "/".join([self.kind, *changed])

    @classmethod
    def parse(cls, text: str) -> Optimizer:
        kind, *options = text.strip().split("/")
        types: dict[str, type] = {f.name: type(f.default) for f in fields(cls)[1:]}
        raw = assignments("optimizer", options, tuple(types), "adamw/impl=fused")
        return cls(kind, **{k: typed(f"optimizer {k}", v, types[k]) for k, v in raw.items()})


@dataclass(frozen=True)
class Scenario:
    """One cell of the space. See the field comments for the axes' meaning; `axis_values` for their text form."""

    system: str = "reference"  # which library; a key of systems.registry
    version: str = ""  # release of that library; empty: the installed one
    device: str = "cpu"  # where ranks and the twin compute; cuda needs a GPU (see docs/gpu.md)
    model: str = "dense"  # name of a ModelSpec in models.ZOO
    dtype: DTypePolicy = field(default_factory=DTypePolicy)
    mesh: Mesh = field(default_factory=Mesh)
    load: str = "same"  # relation of the load mesh to `mesh`, or a mesh: see `load_mesh`
    load_dtype: DTypePolicy | None = None  # dtype policy of the ranks after `reshard` or `restart`
    load_model: str | None = None  # and their model: that of the saving ranks with one more module, or one fewer
    load_optimizer: str | None = None  # and of their optimizer the kind, adam or adamw, or `tensor_lr=true` or `=false`
    load_options: tuple[str, ...] | None = None  # and the switches that the library is given: see `options`
    load_version: str = "same"  # and their release: same, newest, or its number
    expert_parallel: int = 1  # ranks of a data-parallel group that share the experts out; divides dp
    sharding: str = "fully_shard"  # fully_shard (per-parameter dim 0), zero1 (flat bucket buffers), zero2 or replicate
    reshard_after_forward: str = "true"  # true, false, none, or a divisor of dp_shard
    offload: Offload = field(default_factory=Offload)
    optimizer: Optimizer = field(default_factory=Optimizer)
    microbatches: int = 1  # forward/backward passes per optimizer step
    grad_sync: str = "last"  # reduce after the `last` microbatch, after `every` one, or `uneven` numbers of them
    checkpoint: str = "dcp"  # checkpoint format with options, e.g. dcp, full+cpu_offload
    program: str = "resume"  # name in program.PROGRAMS, or the operations separated by spaces
    options: tuple[str, ...] = ()  # the system's own switches, sorted, joined by `+`; see `list`
    faults: tuple[str, ...] = ()  # ids of the fault catalogue
    seed: int = 0  # initial weights and gradients derive from it

    def __post_init__(self) -> None:
        _one_of("device", self.device, DEVICES, "cuda")
        _one_of("sharding", self.sharding, ("fully_shard", "zero1", "zero2", "replicate"), "zero1")
        _one_of("grad_sync", self.grad_sync, ("last", "every", "uneven"), "last")
        if not re.fullmatch(r"true|false|none|[1-9][0-9]{0,8}", self.reshard_after_forward):
            raise UsageError.of(
                "reshard_after_forward", self.reshard_after_forward, "true, false, none, or a divisor of dp_shard", "2"
            )
        if not 1 <= self.microbatches <= 3:
            raise UsageError.of("microbatches", self.microbatches, "1 to 3 (the exact grid's bound)", "2")
        if self.expert_parallel < 1:
            raise UsageError.of("expert_parallel", self.expert_parallel, "1 or more", "2")
        if not -(2**63) <= self.seed < 2**63:
            raise UsageError.of("seed", self.seed, "an integer of 64 bits", "7")
        if not re.fullmatch(r"same|newest|[0-9][0-9A-Za-z.!+-]{0,39}", self.load_version):
            raise UsageError.of("load_version", self.load_version, "same, newest, or a release", "newest")
        if (other := self.load_optimizer) not in (None, "adam", "adamw", "tensor_lr=true", "tensor_lr=false"):
            raise UsageError.of("load_optimizer", other, "same, adam, adamw, tensor_lr=true|false", "adamw")
        for axis in _WRITTEN:
            if not (text := self.axis_text(axis)).isprintable():
                raise UsageError.of(axis, text, "printable characters", f"{axis}={_DEFAULTS[axis]}")
        if len(set(self.faults)) < len(self.faults):
            raise UsageError.of("faults", ",".join(self.faults), "each fault once", "stale-masters,no-op-load")
        for axis, given in (("options", self.options), ("load_options", self.load_options or ())):
            if tuple(sorted(set(given))) != given:
                raise UsageError.of(axis, given, "each option once, in order", "overlap+precision_aware")
        if self.load not in LOAD_RELATIONS:
            mesh_literal(self.load)

    @property
    def release(self) -> str:
        """The version without its cures, such as `0.16.1`; empty for the newest release."""
        return split_cures(self.version)[0]

    @property
    def cures(self) -> str | None:
        """The cures of the version, joined by commas; empty for all that apply, None for none."""
        return split_cures(self.version)[1]

    @classmethod
    def of_checked(cls, values: Mapping[str, Any]) -> Scenario:
        """The scenario with these typed values and defaults for the rest, without the checks: for thousands that are
        made of a few values, each of which has been in a scenario before. What is checked concerns one axis at a
        time."""
        scenario = object.__new__(cls)
        vars(scenario).update(_DEFAULTS)
        vars(scenario).update(values)
        return scenario

    @cached_property
    def id(self) -> str:
        """Twelve hex digits: the digest of the non-default fields and the schema number."""
        payload = json.dumps([SCHEMA, self.axis_values(only_changed=True)], sort_keys=True)
        return hashlib.sha256(payload.encode()).hexdigest()[:12]

    def axis_values(self, only_changed: bool = False) -> dict[str, str]:
        """Axis name → canonical text. With `only_changed`, the fields that differ from the default."""
        if only_changed:
            return {axis: text for axis, text in self._texts.items() if text != _DEFAULT._texts[axis]}
        return dict(self._texts)

    @cached_property
    def _texts(self) -> dict[str, str]:
        return {axis: self.axis_text(axis) for axis in AXES}

    def axis_text(self, axis: str) -> str:
        """The canonical text of one axis."""
        return value_text(axis, getattr(self, axis))

    def fact(self, axis: str, of: Callable[[Any], T]) -> T:
        """What a function says, with something hashable, of the value of one axis.

        A rule that asks for the fact that it needs, and not for the value, is put into a table with one run for all
        values that have the same answer (`shardproof.axes_read`). For example, `scenario.fact("mesh", lambda m: m.tp) >
        1` runs twice where there are 38 meshes of two sizes of tp.
        """
        return of(getattr(self, axis))

    @classmethod
    def from_axes(cls, values: Mapping[str, str]) -> Scenario:
        """The scenario with these axes, from their text form, and defaults for the rest.

        Raises:
            UsageError: as `with_axes`.
        """
        return _DEFAULT.with_axes(values)

    def with_axes(self, values: Mapping[str, str]) -> Scenario:
        """A copy with axes set from their text form.

        Raises:
            UsageError: an unknown axis, or a value its axis does not allow.
        """
        axes = {axis: vars(self)[axis] for axis in AXES}
        texts = dict(self._texts)
        for axis, text in values.items():
            axes[axis], texts[axis] = _checked(axis, text)
        scenario = Scenario.of_checked(axes)
        vars(scenario)["_texts"] = texts
        return scenario

    def __str__(self) -> str:
        return " ".join(f"{axis}={value}" for axis, value in self.axis_values(only_changed=True).items()) or "defaults"

    def to_toml(self, title: str = "", *, every_axis: bool = False) -> str:
        """The scenario as a TOML document that `from_toml` reads back to an equal value.

        Args:
            every_axis: state the axes that have their defaults too: of a scenario that its system refuses, so that no
                default of the system's stands in (`shardproof.space.defaults`).
        """
        import tomli_w

        document: dict[str, Any] = {"schema": SCHEMA}
        if title:
            document["title"] = title
        return tomli_w.dumps({**document, "scenario": self.axis_values(only_changed=not every_axis)})

    @classmethod
    def from_toml(cls, text: str, origin: str = "scenario file") -> Scenario:
        """Read one scenario.

        Raises:
            UsageError: malformed TOML, another schema, an unknown axis or value.
        """
        document = load_toml(text, origin)
        table = document.get("scenario")
        if not isinstance(table, dict):
            raise UsageError.of(origin, sorted(document), "a table [scenario]", '[scenario]\nmodel = "dense"')
        return cls.from_axes({axis: str(value) for axis, value in table.items()})


AXES: tuple[str, ...] = tuple(f.name for f in fields(Scenario))

_WRITTEN = ("system", "version", "model", "load_model", "checkpoint", "program", "options", "load_options", "faults")
"""Axes whose text is not taken from a list here: a terminal must not obey what stands in them."""

LOAD_RELATIONS = ("same", "grow", "shrink", "indivisible", "tp_change")


@lru_cache(maxsize=4096)
def parse_axis(axis: str, text: str) -> Any:
    """The typed value of one axis from its text form.

    Raises:
        UsageError: `axis` is unknown or `text` is not one of its values.
    """
    if axis not in AXES:
        raise UsageError.of("axis", axis, AXES, "--set dtype=bf16")
    parsers: dict[str, Callable[[str], Any]] = {
        "dtype": DTypePolicy.parse,
        "load_dtype": lambda t: None if t == "same" else DTypePolicy.parse(t),
        "load_model": lambda t: None if t == "same" else t,
        "load_optimizer": lambda t: None if t == "same" else t,
        "load_options": lambda t: None if t == "same" else words(t),
        "mesh": Mesh.parse,
        "offload": Offload.parse,
        "optimizer": Optimizer.parse,
        "microbatches": lambda t: typed("microbatches", t, int),
        "expert_parallel": lambda t: typed("expert_parallel", t, int),
        "seed": lambda t: typed("seed", t, int),
        "options": words,
        "faults": lambda t: tuple(part for part in t.split(",") if part),
    }
    return parsers.get(axis, str)(text)


@lru_cache(maxsize=4096)
def _checked(axis: str, text: str) -> tuple[Any, str]:
    """The typed value of one axis from its text form, which a scenario may have, and its canonical text.

    Raises:
        UsageError: as `parse_axis`, or a scenario refuses the value.
    """
    scenario = replace(_DEFAULT, **{axis: parse_axis(axis, text)})
    return getattr(scenario, axis), scenario.axis_text(axis)


def mesh_literal(text: str) -> Mesh:
    """The mesh that a value of the axis `load` names.

    Raises:
        UsageError: it is neither a mesh nor a relation.
    """
    try:
        return Mesh.parse(text)
    except UsageError:
        raise UsageError.of("load", text, (*LOAD_RELATIONS, "a mesh RxSxT"), "shrink") from None


def _one_of(what: str, value: str, allowed: tuple[str, ...], form: str) -> None:
    if value not in allowed:
        raise UsageError.of(what, value, allowed, form)


@lru_cache(maxsize=4096)
def value_text(axis: str, value: object) -> str:
    """The canonical text of a value of an axis."""
    if axis.startswith("load_") and value is None:
        return "same"
    if axis == "load_options" and not value:
        return "none"
    return "+".join(value) if axis.endswith("options") and isinstance(value, tuple) else _render(value)


def _render(value: object) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case float():
            return repr(value)
        case tuple():
            return ",".join(str(v) for v in value)
        case _:
            return str(value)


_DEFAULT = Scenario()
_DEFAULTS = dict(vars(_DEFAULT))
