"""`shardproof list`: systems, models, axes, programs, spaces and faults, as text."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields

from shardproof.faults.boundary import BOUNDARY
from shardproof.faults.catalogue import CATALOGUE
from shardproof.models import zoo
from shardproof.program import named_programs
from shardproof.protocol.accepts import Formats
from shardproof.protocol.registry import all_systems
from shardproof.protocol.system import System
from shardproof.resilience.stacks import all_stacks
from shardproof.scenario import LOAD_RELATIONS, OPTIMIZER_IMPLEMENTATIONS, OPTIMIZER_KINDS, Optimizer, Scenario
from shardproof.space.defaults import completed
from shardproof.space.files import space_names

_AXIS_FORMS = {
    "device": "cpu, cuda (a GPU, see docs/gpu.md)",
    "dtype": "STORAGE[/STAGE=D]…; D fp32, bf16, fp16; STORAGE also mixed, mixed_fp16; "
    "STAGE param, reduce, output, master, grad, exp_avg, exp_avg_sq",
    "mesh": "DP_REPLICATExDP_SHARDxTP, e.g. 2x2x1",
    "load": f"{', '.join(LOAD_RELATIONS)}, or a mesh",
    "load_dtype": "same, or a dtype policy: that of the ranks after reshard or restart",
    "load_model": "same, or the model of the ranks after reshard or restart: NAME+one for one more module, or without",
    "load_optimizer": "same, or what the optimizer has after reshard or restart: adam, adamw, tensor_lr=true|false",
    "load_options": "same, or the options after reshard or restart: none, or words joined by +",
    "load_version": "same, or the release that the ranks have after reshard or restart: newest, or its number",
    "expert_parallel": "how many ranks share the experts out; 1 without expert parallelism",
    "sharding": "fully_shard, zero1, zero2, replicate",
    "reshard_after_forward": "true, false, none, or a divisor of dp_shard",
    "offload": "none, cpu, cpu=FRACTION",
    "optimizer": f"{'|'.join(OPTIMIZER_KINDS)}[/impl={'|'.join(OPTIMIZER_IMPLEMENTATIONS)}][/OPTION=V], options: "
    + ", ".join(f.name for f in fields(Optimizer)[2:]),
    "microbatches": "1 to 3",
    "grad_sync": "last, every, uneven",
    "checkpoint": "a format of the system, with switches after a +: below",
    "program": "a program below, or its operations separated by spaces",
    "options": "switches of the system, joined by +, or none: below",
    "faults": "ids of the faults below, joined by commas",
}


def render_listing() -> str:
    """The output of `shardproof list`: systems, axes, checkpoint formats, options, models, programs, scenarios and
    faults, a section for each."""
    axes = ((axis, _AXIS_FORMS.get(axis, f"default {value}")) for axis, value in Scenario().axis_values().items())
    sections = (
        ("systems", ((info.name, info.doc) for info in all_systems())),
        ("axes", axes),
        ("what a file has that names a system alone", [(info.name, _alone(info)) for info in all_systems()]),
        ("checkpoint formats", [(info.name, _formats(info)) for info in all_systems()]),
        ("options", {word: doc for info in all_systems() for word, doc in info.accepts.options.items()}.items()),
        ("models", ((spec.name, spec.doc) for spec in zoo().values())),
        ("programs", named_programs().items()),
        ("scenarios", ((name, "") for name in space_names())),
        ("stacks of resilience", ((stack.name, stack.doc) for stack in all_stacks().values())),
        ("faults", [*((f.id, f.doc) for f in CATALOGUE.values()), *((f.id, f.doc) for f in BOUNDARY.values())]),
        *(
            (f"contract of {info.name}", [(c.promise, f"({c.source})") for c in info.contract.clauses])
            for info in all_systems()
        ),
    )
    return "\n".join(_section(title, rows) for title, rows in sections)


def _alone(system: System) -> str:
    changed = completed({"system": system.name}).axis_values(only_changed=True)
    return " ".join(f"{axis}={text}" for axis, text in changed.items() if axis != "system") or "the defaults"


def _formats(system: System) -> str:
    formats = system.accepts.axes.get("checkpoint")
    return formats.text if isinstance(formats, Formats) else Scenario().checkpoint


def _section(title: str, rows: Iterable[tuple[str, str]]) -> str:
    kept = list(rows)
    width = max((len(name) for name, _ in kept), default=0)
    return "\n".join([title, *(f"  {name:<{width}}  {text}".rstrip() for name, text in kept), ""])
