"""Writes a model of the zoo into a script: a table of parameter shapes, and special code for a few of them.

Module paths lose their dots, so that a model is one level of named blocks: `tower.vision.weight` is
`tower_vision.weight` in a script. Buffers are left out: no script compares them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from shardproof.export.case import FailureCase
from shardproof.models import ModuleSpec, ParamSpec, storage_dtype
from shardproof.protocol.registry import contract_of

TORCH_NAME = {"fp32": "torch.float32", "bf16": "torch.bfloat16", "fp16": "torch.float16"}


def flat(fqn: str) -> str:
    """A fully qualified name with one dot: between the block and its parameter."""
    module, _, name = fqn.rpartition(".")
    return f"{module.replace('.', '_')}.{name}" if module else fqn


def model_values(case: FailureCase, *, nested: bool = False) -> dict[str, Any]:
    """What templates need to know of a case's model.

    * shapes: block → parameter → shape. unused_blocks: those that no forward uses. unused_names: names of parameters of
      other blocks that no forward uses. lone_names: of those that rank 0 alone uses. idle: block → when a forward uses
      it, as an expression of `batch`; for a system whose steps are compared and whose models have such blocks.
    * frozen: blocks without a trainable parameter, of which those in `later` become trainable.
    * islands: parameters that stay fp32 where the others do not. units: blocks that are sharded by themselves; empty
      where all are. tied: alias → name. tp: name → dim that tensor parallelism cuts.
    * groups: of the optimizer, its overrides and names; empty where there is one. grid, odd: which gradients show it
      (`blocks.py.j2`).

    Args:
        nested: block names keep their dots, for a library that looks at them.
    """

    def block(path: str) -> str:
        return path if nested else path.replace(".", "_")

    def name_of(fqn: str) -> str:
        return fqn if nested else flat(fqn)

    spec, scenario = case.spec, case.scenario
    modules = case.modules
    params = [p for p in spec.unique_params if p.module in modules]
    storage = {storage_dtype(scenario.dtype, p.spec) for p in params}
    bulk = min(storage) if len(storage) > 1 else next(iter(storage))  # bf16 and fp16 come before fp32
    units = [block(m.path) for m in modules if m.unit]
    return {
        "shapes": {block(m.path): {p.name: p.shape for p in m.params if not p.tied_to} for m in modules},
        "unused_blocks": [block(m.path) for m in modules if not any(p.used for p in m.params)],
        "idle": {},
        "lone_names": sorted({p.spec.name for p in params if p.spec.idle == "others" and len(p.module.params) > 1}),
        "unused_names": sorted({p.spec.name for p in params if not p.spec.used and _in_use(p.module)}),
        "frozen": [block(m.path) for m in modules if all(p.trainable != "yes" for p in m.params)],
        "later": [block(m.path) for m in modules if any(p.trainable == "later" for p in m.params)],
        "dtype": TORCH_NAME[bulk],
        "islands": [
            name_of(p.fqn) for p in params if len(storage) > 1 and storage_dtype(scenario.dtype, p.spec) == "fp32"
        ],
        "units": [] if len(units) == len(modules) else units,
        "tied": {name_of(p.fqn): name_of(p.spec.tied_to) for p in spec.params if p.spec.tied_to},
        "tp": {name_of(p.fqn): p.spec.tp_dim for p in params if p.spec.tp_dim is not None},
        "groups": _groups(case),
        "fqn": name_of(case.focus.fqn),
        "grid": _grid(case),
        "odd": odd_part(case.ops[-1].mesh.dp),
    }


def _in_use(module: ModuleSpec) -> bool:
    return any(p.used for p in module.params)


def _groups(case: FailureCase) -> list[tuple[Mapping[str, float], list[str]]]:
    ask, spec = case.scenario.optimizer, case.spec
    if ask.groups == "one" or len(spec.groups) == 1:
        return []
    found: list[tuple[Mapping[str, float], list[str]]] = []
    for index, group in enumerate(spec.groups):
        own = {"lr": ask.lr * group.lr_scale} if group.lr_scale != 1 else {}
        own |= {} if group.weight_decay is None else {"weight_decay": group.weight_decay}
        found.append((own, [flat(p.fqn) for p in spec.unique_params if p.spec.group == index]))
    return found


def _grid(case: FailureCase) -> str:
    """Which gradients show it: `narrow` values, or `wide` or `cancelling` ones where a reduction may be rounded."""
    if case.focus.kind != "trained" or case.ops[-1].mesh.dp == 1:
        return "narrow"
    inputs = contract_of(case.scenario).parameters(case.scenario, case.scenario.mesh)
    found = {p.gradient.kind for p in inputs if p.fqn == case.focus.fqn and p.gradient is not None}
    return next(iter(found), "narrow")


def tensor_call(case: FailureCase, spec: ParamSpec, made: str = "torch.randn") -> str:
    """The call that makes a parameter's tensor, of its shape and dtype."""
    dtype, size = storage_dtype(case.scenario.dtype, spec), ", ".join(map(str, spec.shape))
    return f"{made}({size}{'' if dtype == 'fp32' else f', dtype={TORCH_NAME[dtype]}'})"


def odd_part(number: int) -> int:
    """A number without its factors of two: gradients are multiples of it, so that a mean is exact."""
    return number // (number & -number)


def optimizer_call(case: FailureCase, known: Mapping[str, str], options: Mapping[str, Any]) -> str:
    """A constructor of torch.optim's class with the options that a scenario changes.

    Args:
        known: kind → the class' name. options: further arguments.
    """
    ask = case.scenario.optimizer
    values: dict[str, Any] = {"lr": ask.lr, "weight_decay": ask.weight_decay}
    if ask.kind == "sgd":
        values |= {"momentum": ask.momentum} if ask.momentum else {}
    given = {**values, **options}
    return f"{known[ask.kind]}(parameters, {', '.join(f'{name}={value!r}' for name, value in given.items())})"


def groups_call(case: FailureCase, name_of: Callable[[FailureCase, str], str]) -> str:
    """The first argument of an optimizer: the model's parameters, or groups with overrides of their own."""
    ask, spec = case.scenario.optimizer, case.spec
    if ask.groups == "one" or len(spec.groups) == 1:
        return "model.parameters()"
    found = []
    for index, group in enumerate(spec.groups):
        names = [name_of(case, p.fqn) for p in spec.unique_params if p.spec.group == index]
        if not names:  # of what the failure does not need
            continue
        own = {"lr": ask.lr * group.lr_scale} if group.lr_scale != 1 else {}
        own |= {} if group.weight_decay is None else {"weight_decay": group.weight_decay}
        told = "".join(f', "{name}": {value!r}' for name, value in own.items())
        params = ", ".join(f"model.{name}" for name in names)
        found.append(f'{{"params": [{params}]{told}}}')
    return f"[{', '.join(found)}]" if len(found) > 1 or told else "model.parameters()"


def start(case: FailureCase, backend: str) -> str:
    """The call that joins the ranks; of one rank alone, without an address."""
    alone = all(op.mesh.world == 1 for op in case.ops)
    store = ", store=dist.HashStore(), rank=0, world_size=1" if alone else ""
    return f'dist.init_process_group("{backend}"{store})'
