"""The zoo of tiny models: names, shapes, dtypes, optimizer groups, and which dim tensor parallelism shards.

A model is data, so that any system can build it, and each spec says which mistakes it exposes, with ids from the bug
corpus. For example, `twins` has two pairs of equal-shaped weights of different dtype in one param group: where a
library writes one's moments under the other's name, nothing raises, and only the bits tell.

A parameter takes part in its module's forward through the probe only (`shardproof.mechanisms.probe_module`); no matrix
product runs. So a model needs no more than a few hundred elements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from math import prod

from shardproof.errors import UsageError
from shardproof.scenario import DTypePolicy

ONE_MORE = "+one"
"""What follows the name of a model that has one more module than the model of that name."""


def is_idle(idle: str, iteration: int, microbatch: int) -> bool:
    """Whether the forward of a microbatch leaves a parameter out, by its `ParamSpec.idle`."""
    return (idle == "odd" and iteration % 2 == 1) or (idle == "first" and microbatch == 0)


@dataclass(frozen=True)
class ParamSpec:
    """One parameter of a module.

    * name: local name.
    * shape: logical shape.
    * island: kept in fp32 under a mixed storage (a router, A_log).
    * tp_dim: the dim tensor parallelism shards; None = replicated over tp.
    * ep_dim: the dim that expert parallelism shares out, one expert an index; None = no expert.
    * group: index into `ModelSpec.groups`.
    * used: False = not part of any forward, so it never gets a gradient.
    * trainable: `yes`, `no` (frozen) or `later` (frozen until the program's `unfreeze`).
    * sections: what dim 0 is fused of, in order: the suffix under which a format that takes it apart stores a section,
      and its size.
    * stacked: sections of equal size lie along a dim 0 of their own here. Libraries that fuse them have no such dim:
      their dim 0 is our dims 0 and 1 together.
    * tied_to: fully qualified name of the parameter this is the same object as.
    * idle: which forwards leave it out, as a router leaves out an expert: those of `odd` iterations, or that of each
      iteration's `first` microbatch; empty for none. Where no forward of an iteration uses it, it has no gradient, or
      one of zeros where the contract says so (`Contract.zero_gradients`). `others`: in even iterations all
      data-parallel ranks leave it out but one (`shardproof.probe.lone_rank`), and what they lack counts as zeros.
    * partial: it is whole on every tensor-parallel rank, whose gradients are parts of one that their sum is, as of a
      norm under sequence parallelism.
    * rare: its first initial values in the first build are `shardproof.probe.RARE`: infinite, negative zero, subnormal.
    * layer: it lies in one of a list of layers, which libraries shard in another way than what is around the list.
    """

    name: str
    shape: tuple[int, ...]
    island: bool = False
    tp_dim: int | None = None
    ep_dim: int | None = None
    group: int = 0
    used: bool = True
    trainable: str = "yes"
    sections: tuple[tuple[str, int], ...] = ()
    stacked: bool = False
    tied_to: str | None = None
    layer: bool = False
    idle: str = ""
    partial: bool = False
    rare: bool = False

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def takes_part(self, iteration: int, microbatch: int) -> bool:
        """Whether the forward of a microbatch uses it, on some rank at least."""
        return self.used and not is_idle(self.idle, iteration, microbatch)


@dataclass(frozen=True)
class BufferSpec:
    """One buffer of a module. dtype: fp32, bf16, int64 or bool. Integer buffers count steps (+1 each forward of
    a training step's first microbatch); floating ones are constant."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "fp32"
    persistent: bool = True


@dataclass(frozen=True)
class ModuleSpec:
    """One module. path: dotted path from the root. unit: sharded as a unit (a bucket) of its own. opaque: the bytes
    that it keeps of its own: none, a `history` that grows, or `empty` ones (`shardproof.reference.extra_state`). draws:
    the stream of random numbers that its dropout draws from; empty for none (`shardproof.reference.streams`).
    quantised: the recipe by which its matrices are kept in fp8 too; empty for none
    (`shardproof.reference.quantised`)."""

    path: str
    params: tuple[ParamSpec, ...] = ()
    buffers: tuple[BufferSpec, ...] = ()
    unit: bool = True
    opaque: str = ""
    draws: str = ""
    quantised: str = ""


@dataclass(frozen=True)
class GroupSpec:
    """Overrides of one optimizer param group: multiplies lr, replaces weight decay (None = the optimizer's)."""

    lr_scale: float = 1.0
    weight_decay: float | None = None


@dataclass(frozen=True)
class NamedParam:
    """A parameter with its fully qualified name and module."""

    fqn: str
    module: ModuleSpec
    spec: ParamSpec


@dataclass(frozen=True)
class ModelSpec:
    """A named tiny model: `doc` says what it exposes, `bugs` which corpus entries. listed: whether an error names it
    among what is allowed; what trainers alone can ask for is not."""

    name: str
    doc: str
    modules: tuple[ModuleSpec, ...]
    groups: tuple[GroupSpec, ...] = (GroupSpec(),)
    bugs: tuple[str, ...] = field(default=())
    listed: bool = True

    def __hash__(self) -> int:
        return hash(self.name)  # models are keys of caches, and a hash of every shape in them is slow

    @cached_property
    def params(self) -> tuple[NamedParam, ...]:
        """All parameters under every name, tied aliases included, in module order."""
        return tuple(NamedParam(f"{m.path}.{p.name}", m, p) for m in self.modules for p in m.params)

    @cached_property
    def unique_params(self) -> tuple[NamedParam, ...]:
        """One entry a parameter object: tied aliases left out."""
        return tuple(p for p in self.params if p.spec.tied_to is None)

    def uses(self, fqn: str) -> tuple[str, ...]:
        """Every name under which the parameter `fqn` takes part in a forward."""
        return tuple(
            p.fqn
            for p in self.params
            if (p.fqn == fqn or p.spec.tied_to == fqn) and self.param(fqn).spec.used and p.spec.used
        )

    def param(self, fqn: str) -> NamedParam:
        return self._by_fqn[fqn]

    def of_params(self, names: Sequence[str]) -> ModelSpec:
        """Make a model of some parameters alone.

        Args:
            names: fully qualified names of parameters of this model, which are kept; modules without such go.
        """
        wanted = {self.param(name).fqn for name in names}
        kept = (
            replace(module, params=tuple(p for p in module.params if f"{module.path}.{p.name}" in wanted))
            for module in self.modules
        )
        return replace(self, modules=tuple(module for module in kept if module.params))

    @cached_property
    def _by_fqn(self) -> dict[str, NamedParam]:
        return {p.fqn: p for p in self.params}

    def buffers(self) -> Iterator[tuple[str, BufferSpec]]:
        for module in self.modules:
            for buffer in module.buffers:
                yield f"{module.path}.{buffer.name}", buffer

    @cached_property
    def has_rare(self) -> bool:
        return any(p.spec.rare for p in self.params)

    @cached_property
    def has_rows(self) -> bool:
        """Whether every parameter has rows of elements: a dim, and no dim of size 0."""
        return all(p.spec.shape and p.spec.numel for p in self.params)

    @property
    def has_later(self) -> bool:
        return any(p.spec.trainable == "later" for p in self.params)


def storage_dtype(policy: DTypePolicy, spec: ParamSpec) -> str:
    """The dtype a parameter is stored in under a policy: its own where the policy mixes, the policy's otherwise."""
    bulk = {"mixed": "bf16", "mixed_fp16": "fp16"}.get(policy.storage, policy.storage)
    return "fp32" if spec.island and bulk != policy.storage else bulk


def _linear(path: str, out: int, inp: int, tp_dim: int | None = None, **kw: object) -> ModuleSpec:
    bias_dim = 0 if tp_dim == 0 else None
    return ModuleSpec(
        path,
        (
            ParamSpec("weight", (out, inp), tp_dim=tp_dim, **kw),  # type: ignore[arg-type]
            ParamSpec("bias", (out,), tp_dim=bias_dim, **kw),  # type: ignore[arg-type]
        ),
    )


_SPECS = (
    ModelSpec(
        "dense",
        "Odd and prime sizes over several units: uneven shards, padding, more than one bucket.",
        (
            _linear("embed", 12, 5, tp_dim=0),
            _linear("up", 16, 7, tp_dim=0),
            _linear("down", 7, 16, tp_dim=1),
            ModuleSpec("norm", (ParamSpec("weight", (13,)),)),
        ),
        bugs=("PT-136228", "PT-110762", "MLM-2576", "MLM-5898"),
    ),
    ModelSpec(
        "twins",
        "Equal-shaped parameters of different dtype in one group: a swapped pair fits without an error.",
        (
            ModuleSpec("a", (ParamSpec("weight", (4, 4), tp_dim=0),)),
            ModuleSpec("router", (ParamSpec("weight", (4, 4), island=True),)),
            ModuleSpec("b", (ParamSpec("weight", (4, 4), tp_dim=0),)),
            ModuleSpec("scale", (ParamSpec("weight", (4, 4), island=True),)),
        ),
        bugs=("MLM-2777", "MLM-5835a", "AM-2419b"),
    ),
    ModelSpec(
        "sandwich",
        "An fp32 island between two half-precision parameters of other sizes, the half-precision one first.",
        (
            ModuleSpec("a", (ParamSpec("weight", (4, 3), tp_dim=0),)),
            ModuleSpec("b", (ParamSpec("weight", (5, 2), island=True),)),
            ModuleSpec("c", (ParamSpec("weight", (7, 2)),)),
        ),
        bugs=("MLM-2777", "MLM-5835b"),
    ),
    ModelSpec(
        "mixed_unit",
        "Two storage dtypes inside one unit: a flat buffer or FSDP unit that must not assume one dtype.",
        (
            ModuleSpec(
                "block",
                (
                    ParamSpec("weight", (6, 3), tp_dim=0),
                    ParamSpec("A_log", (6,), island=True, tp_dim=0),
                    ParamSpec("proj", (3, 6), tp_dim=1),
                ),
            ),
            ModuleSpec("head", (ParamSpec("weight", (5, 3)),)),
        ),
        bugs=("AM-2419b", "MLM-2777"),
    ),
    ModelSpec(
        "ragged_unit",
        "Rows in one unit whose widths have no small common multiple: both tensors are smaller than it.",
        (
            ModuleSpec("block", (ParamSpec("weight", (2, 5)), ParamSpec("proj", (2, 3)))),
            ModuleSpec("head", (ParamSpec("weight", (5, 3), tp_dim=0),)),
        ),
        bugs=("MLM-6773",),
    ),
    ModelSpec(
        "short",
        "Dim 0 smaller than the world: empty shards on most ranks, one of them alone in its unit.",
        (
            ModuleSpec("one", (ParamSpec("weight", (1, 6)), ParamSpec("bias", (1,)))),
            ModuleSpec("two", (ParamSpec("weight", (2, 3), tp_dim=0),)),
            ModuleSpec("three", (ParamSpec("weight", (3,)),)),
        ),
        bugs=("PT-150862", "TE-3207", "TE-3318", "MLM-6191"),
    ),
    ModelSpec(
        "many",
        "Twelve units and a dim of 12: 10 sorts before 9 where names or shards are ordered as text.",
        tuple(ModuleSpec(f"layers.{i}", (ParamSpec("weight", (12, 2), tp_dim=0),)) for i in range(12)),
        bugs=("DS-5342", "DS-5395"),
    ),
    ModelSpec(
        "tied",
        "Input and output embedding are one parameter, beside an uneven one, in one unit.",
        (
            ModuleSpec("embed", (ParamSpec("weight", (10, 3), tp_dim=0),), unit=False),
            _linear("mid", 5, 3),
            ModuleSpec("head", (ParamSpec("weight", (10, 3), tp_dim=0, tied_to="embed.weight"),), unit=False),
        ),
        bugs=("PT-148825", "PT-188346", "PT-176076", "ACC-3154"),
    ),
    ModelSpec(
        "frozen_tower",
        "A frozen tower with persistent, non-persistent and integer buffers feeding a trained head.",
        (
            ModuleSpec(
                "tower.vision",
                (ParamSpec("weight", (6, 4), trainable="no"), ParamSpec("bias", (6,), trainable="no")),
                (
                    BufferSpec("running", (5,)),
                    BufferSpec("inv_freq", (3,), persistent=False),
                    BufferSpec("batches", (), "int64"),
                ),
            ),
            ModuleSpec("head", (ParamSpec("weight", (7, 6), tp_dim=0),), (BufferSpec("mask", (3,), "bool"),)),
        ),
        bugs=("AM-2419d", "AM-2549", "FS-427", "FS-705", "ACC-3898", "PT-93391"),
    ),
    ModelSpec(
        "swiglu",
        "A fused gate/up weight whose halves are split apart by checkpoint formats, plus its down projection.",
        (
            ModuleSpec("fc1", (ParamSpec("weight", (12, 3), tp_dim=0),)),
            ModuleSpec("fc2", (ParamSpec("weight", (3, 6), tp_dim=1),)),
        ),
        bugs=("MLM-4423", "MLM-2769"),
    ),
    ModelSpec(
        "experts",
        "Grouped 3-D expert weights: sharding dims shift by one against a single expert's weight.",
        (
            ModuleSpec("router", (ParamSpec("weight", (3, 4), island=True),)),
            ModuleSpec("experts", (ParamSpec("w1", (3, 4, 2), tp_dim=1), ParamSpec("w2", (3, 2, 4), tp_dim=2))),
        ),
        bugs=("TE-2713a", "AM-1691", "TT-2227"),
    ),
    ModelSpec(
        "moe",
        "Four experts that expert parallelism shares out, beside a router and a dense parameter that every rank has.",
        (
            ModuleSpec("router", (ParamSpec("weight", (4, 5), island=True),)),
            ModuleSpec("experts", (ParamSpec("fc1", (4, 6, 3), ep_dim=0), ParamSpec("fc2", (4, 3, 6), ep_dim=0))),
            ModuleSpec("dense", (ParamSpec("weight", (6, 5), tp_dim=0),)),
        ),
        bugs=("MLM-2777",),
    ),
    ModelSpec(
        "groups",
        "Three param groups with their own lr and weight decay, interleaved against module order.",
        (
            ModuleSpec("a", (ParamSpec("weight", (6, 3), tp_dim=0), ParamSpec("bias", (6,), group=1, tp_dim=0))),
            ModuleSpec("b", (ParamSpec("weight", (6, 3), group=2, tp_dim=0), ParamSpec("bias", (6,), group=1))),
            ModuleSpec("c", (ParamSpec("weight", (3, 5)),)),
        ),
        (GroupSpec(), GroupSpec(1.0, 0.0), GroupSpec(0.25, 0.5)),
        bugs=("MLM-mr3394", "FS-58", "PT-54736", "AO-2606"),
    ),
    ModelSpec(
        "lr_groups",
        "Two param groups that differ in their learning rate only, interleaved: told apart by nothing but that.",
        (
            ModuleSpec("a", (ParamSpec("weight", (6, 3), tp_dim=0), ParamSpec("bias", (6,), group=1, tp_dim=0))),
            ModuleSpec("b", (ParamSpec("weight", (6, 3), group=1, tp_dim=0), ParamSpec("bias", (6,)))),
        ),
        (GroupSpec(), GroupSpec(0.25)),
        bugs=("MLM-mr3394",),
    ),
    ModelSpec(
        "unused",
        "A trainable parameter that no forward uses: no gradient, so its optimizer state never exists.",
        (
            _linear("used", 5, 3),
            ModuleSpec("dead", (ParamSpec("weight", (4, 3), used=False),)),
            ModuleSpec("partly", (ParamSpec("weight", (4, 2)), ParamSpec("dead", (6,), used=False))),
        ),
        bugs=("AM-1698", "PT-192202"),
    ),
    ModelSpec(
        "later",
        "Parameters that are frozen first and trained later: state appears after the first save.",
        (
            _linear("base", 6, 3, trainable="later"),
            ModuleSpec("adapter", (ParamSpec("weight", (5, 4)),)),
        ),
        bugs=("PT-192202", "PT-186998"),
    ),
    ModelSpec(
        "sometimes",
        "Parameters that no forward of every other iteration uses, one beside others in its unit and one alone in it.",
        (
            ModuleSpec("first", (ParamSpec("weight", (5, 3), tp_dim=0),)),
            ModuleSpec("block", (ParamSpec("weight", (4, 3), tp_dim=0), ParamSpec("gate", (3,), idle="odd"))),
            ModuleSpec("odd", (ParamSpec("weight", (4, 3), idle="odd"),)),
        ),
    ),
    ModelSpec(
        "thin_groups",
        "A param group without a parameter between two others, the last of which has rows for one rank only.",
        (
            ModuleSpec("a", (ParamSpec("weight", (6, 3), tp_dim=0), ParamSpec("bias", (1,), group=2))),
            ModuleSpec("b", (ParamSpec("weight", (1, 6), group=2), ParamSpec("proj", (4, 3)))),
        ),
        (GroupSpec(), GroupSpec(0.5, 0.25), GroupSpec(0.25, 0.5)),
        bugs=("TE-3207", "TE-3318"),
    ),
    ModelSpec(
        "lone",
        "Parameters that only one rank uses in every other iteration: one beside others in its unit, one alone in it.",
        (
            ModuleSpec("first", (ParamSpec("weight", (5, 3), tp_dim=0),)),
            ModuleSpec("block", (ParamSpec("weight", (4, 3), tp_dim=0), ParamSpec("gate", (3,), idle="others"))),
            ModuleSpec("branch", (ParamSpec("weight", (4, 3), idle="others"),)),
        ),
    ),
    ModelSpec(
        "norms",
        "Norms as under sequence parallelism: whole on every tensor-parallel rank, each of which has a part of the "
        "gradient.",
        (
            ModuleSpec("block", (ParamSpec("norm", (3,), partial=True), ParamSpec("weight", (6, 3), tp_dim=0))),
            ModuleSpec("final", (ParamSpec("norm", (5,), partial=True, island=True),)),
        ),
    ),
    ModelSpec(
        "hollow",
        "Parameters without an element: beside others, as the last of a unit, and alone in one.",
        (
            ModuleSpec("a", (ParamSpec("weight", (6, 3), tp_dim=0), ParamSpec("bias", (0,)))),
            ModuleSpec("b", (ParamSpec("weight", (0, 4), island=True),)),
            ModuleSpec("c", (ParamSpec("weight", (5, 2)), ParamSpec("proj", (3, 0)))),
        ),
    ),
    ModelSpec(
        "scalars",
        "Parameters without a dim, one beside a weight and one alone in its unit.",
        (
            ModuleSpec("a", (ParamSpec("weight", (6, 3), tp_dim=0), ParamSpec("temperature", ()))),
            ModuleSpec("b", (ParamSpec("scale", (), island=True),)),
        ),
    ),
    ModelSpec(
        "rare",
        "Initial values that are rare on purpose: an infinity, a negative zero and a subnormal, in one shard.",
        (
            ModuleSpec("a", (ParamSpec("weight", (6, 3), tp_dim=0, rare=True),)),
            ModuleSpec("b", (ParamSpec("weight", (5, 3)), ParamSpec("bias", (5,), rare=True))),
        ),
    ),
)

ZOO: dict[str, ModelSpec] = {spec.name: spec for spec in _SPECS}
"""Models by name. What only one system has joins them when it is first asked for: `zoo()` has all."""

_providers: list[Callable[[], Iterable[ModelSpec]]] = []


def provide(models: Callable[[], Iterable[ModelSpec]]) -> None:
    """Register a function that makes further models, such as a system's own. The function runs only when a model is
    asked for that is not yet known."""
    _providers.append(models)


def zoo() -> dict[str, ModelSpec]:
    """Every model by name."""
    while _providers:
        ZOO.update({spec.name: spec for spec in _providers.pop(0)()})
    return ZOO


def draws(name: str) -> bool:
    """Whether some module of a model has dropout, so that random generators belong to what is trained."""
    return any(module.draws for module in model_spec(name).modules)


def model_spec(name: str) -> ModelSpec:
    """The model of that name; `NAME+one` is the model of the name before it with one more module.

    Raises:
        UsageError: there is none.
    """
    if name not in ZOO and name not in zoo():
        if name.endswith(ONE_MORE) and not name.removesuffix(ONE_MORE).endswith(ONE_MORE):
            return _with_one_more(name.removesuffix(ONE_MORE))
        raise UsageError.of("model", name, [known for known, model in ZOO.items() if model.listed], "dense")
    return ZOO[name]


@cache
def _with_one_more(name: str) -> ModelSpec:
    smaller = model_spec(name)
    module = ModuleSpec("one_more", (ParamSpec("weight", (6, 3), tp_dim=0), ParamSpec("bias", (3,))))
    return replace(smaller, name=f"{name}{ONE_MORE}", modules=(*smaller.modules, module))
