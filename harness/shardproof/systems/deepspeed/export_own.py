"""Failures of DeepSpeed that a model of a few weights shows, as scripts with a model of their own. No torch.

The model of a scenario has many parameters, so that it meets many mistakes, and a script that says which value each of
them should have is long. A reader of an issue wants the one weight that goes wrong. For example, that a weight takes
the gradient of an earlier step shows with two weights of ones and SGD: the one that rests goes from 0.875 to 0.75.

Each function below knows one such failure and gives None for any other. Whether its script shows what the run met is
not known here: an export runs it, and asks again for a script of the whole scenario where it does not. Values for
`deepspeed_own.py.j2`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shardproof.export.case import KEPT, RAISES, TRAINED, WRITTEN, FailureCase
from shardproof.export.model import TORCH_NAME
from shardproof.export.script import Draft
from shardproof.systems.deepspeed.accepts import COALESCED, NO_OPTIMIZER, OFFLOADS, STAGES
from shardproof.systems.deepspeed.export_engine import INITIALIZE, engine_config, start_lines
from shardproof.systems.deepspeed.flat import ROUND_ROBIN

HOME = "shardproof.systems.deepspeed"
LR, ELEMENTS = 0.125, 4
CLEAN_STEPS = 3
"""Steps without an overflow after one with it, of which none may be skipped."""

UNNEEDED = ("reduce_bucket_size", "allgather_bucket_size", "stage3_param_persistence_threshold", "sub_group_size")
"""What a scenario configures so that its tiny model is cut up, and a script of one weight does without."""

FOR_SGD = ("gradient_clipping", "zero_allow_untested_optimizer")
"""What a script with SGD configures: that nothing is clipped, since it compares what a step makes of weights, and the
leave to use SGD. ZeRO knows AdamW, and scripts with that compare no values of a step."""

LOADS_UNIVERSAL = {"load_universal": True}
"""What a script configures that loads a universal checkpoint; one that only makes one does without."""

SGD = f"optimizer = torch.optim.SGD(model.parameters(), lr={LR})"
ADAMW = "optimizer = torch.optim.AdamW(model.parameters())"
LINEAR = f"model = nn.Linear({ELEMENTS}, {ELEMENTS})"


SAVE_AND_CONVERT = """\
model.save_checkpoint(CHECKPOINT, tag="ranks")
if dist.get_rank() == 0:
    convert()
dist.barrier()"""
"""The lines with which several ranks make a universal checkpoint."""


def draft_own(case: FailureCase) -> Draft | None:
    """The draft of a case that a model of a few weights shows; None for any other, and where the whole is wanted."""
    scaled = _draft_overflow(case) or _draft_clipped(case)
    if scaled is not None or case.whole:
        return scaled
    makers = (
        _draft_resting, _draft_coalesced, _draft_round_robin, _draft_weights, _draft_rewound, _draft_groups,
        _draft_counters, _draft_module_only, _draft_frozen, _draft_offload, _draft_padding, _draft_raising,
    )  # fmt: skip
    return next((made for make in makers if (made := make(case)) is not None), None)


def _draft(case: FailureCase, build: tuple[str, ...], calls: Mapping[str, str], observed: str = "") -> Draft:
    """A draft. build: the lines that make `model` and `optimizer`, before there is an engine of them."""
    config = engine_config(case.scenario)
    config["zero_optimization"] = {k: v for k, v in config["zero_optimization"].items() if k not in UNNEEDED}
    unneeded: tuple[str, ...] = ("communication_data_type", "gradient_accumulation_steps")
    if not any("optim.SGD" in line for line in build):
        unneeded += FOR_SGD
    if not any(op.kind.startswith("load") for op in case.ops) and config.get("checkpoint") == LOADS_UNIVERSAL:
        unneeded += ("checkpoint",)
    own = {"start": "\n".join(start_lines(case)), "build": "\n".join((*build, *INITIALIZE)), **calls}
    values: dict[str, Any] = {"config": {k: v for k, v in config.items() if k not in unneeded}, "elements": ELEMENTS}
    return Draft(HOME, "deepspeed_own.py.j2", own, observed, values, f"deepspeed {case.result.version}", case=case)


def _scales(case: FailureCase) -> bool:
    """Whether it is about a step with a loss scale."""
    return case.focus.kind == TRAINED and bool(case.scenario.optimizer.loss_scale) and case.focus.op.kind == "step"


def _draft_overflow(case: FailureCase) -> Draft | None:
    """Optimizer steps that are skipped after an overflow, although nothing overflows any more."""
    if not (_scales(case) and case.does("overflow")):
        return None
    first = next(op for op in case.ops if op.kind == "overflow")
    case = case.only((case.ops[0], first, case.ops[-1])).on_one_rank()
    calls = {
        "step": f"for _ in range({CLEAN_STEPS}):\n    model.backward(model(torch.ones(1)))\n    model.step()",
        "overflow": 'model.backward(model(torch.full((1,), float("inf"))))\nmodel.step()',
        "subject": f"steps skipped of {CLEAN_STEPS + 1}, of which the first overflowed",
        "expected": "1",
    }
    return _draft(case, ("model = Model()", SGD), calls, "model.skipped_steps")


def _draft_clipped(case: FailureCase) -> Draft | None:
    """A gradient that is clipped by half of its norm. Its elements are 1, so that its norm is 2."""
    clip, steps = case.scenario.optimizer.clip, sum(op.kind == "step" for op in case.ops)
    if not (_scales(case) and clip):
        return None
    told = f"[1 - {steps} * {LR} * {clip / ELEMENTS**0.5}]  # the gradient's norm of 2.0 is clipped to {clip}"
    calls = {
        "step": "model.backward(model(torch.ones(1)))\nmodel.step()",
        "subject": f"weight after {steps} steps",
        "expected": told,
    }
    return _draft(case, ("model = Model()", SGD), calls, "model.module.weight.unique().tolist()")


def _draft_resting(case: FailureCase) -> Draft | None:
    """A weight that a step does not use and that moves all the same."""
    kinds = [op.kind for op in case.ops]
    if case.scenario.model != "resting" or kinds != ["build", "step", "step"] or case.scenario.microbatches > 1:
        return None
    case = case.on_one_rank()
    calls = {
        "state": "model",
        "step": "model.backward(model($number))\nmodel.step()",
        "subject": "weight that the first of two steps alone has used",
        "expected": f"[1 - {LR}]",
    }
    return _draft(case, ("model = RestingModel()", SGD), calls, _whole(case, "model.module.resting"))


def _draft_coalesced(case: FailureCase) -> Draft | None:
    """Gradients that are added up in the dtype of the model, where fp32 is asked for."""
    if COALESCED not in case.scenario.options or not case.scenario.dtype.reduce or case.focus.kind != TRAINED:
        return None
    case = case.only(case.ops[:2]).on_one_rank()
    calls = {
        "step": "with model.coalesce_grad_reduction():\n"
        "    for gradient in (256.0, 1.0, 1.0):  # bf16 has no 257, and rounds 256 + 1 to 256\n"
        "        model.backward(model(torch.full((1,), gradient)))\n"
        "model.step()",
        "subject": "weight of ones after a step with gradients of 256, 1 and 1",
        "expected": "[1.0 - 258.0]",
    }
    build = ("model = Model()", "optimizer = torch.optim.SGD(model.parameters(), lr=1.0)")
    return _draft(case, build, calls, "safe_get_full_fp32_param(model.module.weight).unique().tolist()")


def _draft_round_robin(case: FailureCase) -> Draft | None:
    """A map of the flat buffers in another order than theirs, by which a universal checkpoint is cut out of them."""
    if ROUND_ROBIN not in case.scenario.options or case.focus.kind != WRITTEN:
        return None
    case = case.only((case.ops[0], *[op for op in case.ops if op.kind == "step"][:1], case.ops[-1]))
    made = '{"a": torch.full((7,), 1.0), "b": torch.full((6,), 2.0), "c": torch.full((3,), 3.0)}'
    calls = {
        "step": "model.backward(sum(p.sum() for p in model.module.values()))\nmodel.step()",
        "save": f'{SAVE_AND_CONVERT}\nfile = torch.load(CHECKPOINT + "/universal/zero/b/fp32.pt", weights_only=False)',
        "subject": "a weight that is 2 everywhere, by safe_get_full_fp32_param and in the universal checkpoint",
        "expected": "([2.0] * 6, [2.0] * 6)",
    }
    build = (f"model = nn.ParameterDict({made})", "optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)")
    return _draft(
        case, build, calls, '(safe_get_full_fp32_param(model.module["b"]).tolist(), file["param"].flatten().tolist())'
    )


def _draft_weights(case: FailureCase) -> Draft | None:
    """Weights that a load does not restore. Each model that is built has another value in all of its weight."""
    kinds = {op.kind for op in case.ops}
    if not case.weights_alone or case.focus.role != "param" or not kinds <= {"build", "save", "load_model_only"}:
        return None
    if case.reads_earlier or case.scenario.checkpoint != "zero" or NO_OPTIMIZER in case.scenario.options:
        return None
    case = case.on_one_rank()
    calls = {
        "state": "model",
        "save": 'model.save_checkpoint(CHECKPOINT, tag="saved")',
        "load_model_only": 'model.load_checkpoint(CHECKPOINT, tag="saved", load_module_only=True)',
        "subject": "weight after the load",
        "expected": f"[{case.ops[0].init_seed + 1.0}]  # the value of the model that was saved",
    }
    build = (f'model = nn.ParameterDict({{"weight": torch.full(({ELEMENTS},), $number + 1.0)}})', ADAMW)
    return _draft(case, build, calls, _whole(case, 'model.module["weight"]'))


def _whole(case: FailureCase, weight: str) -> str:
    """The expression of the values of a weight, which stage 3 has in parts."""
    return f"read({weight})" if STAGES[case.scenario.sharding] == 3 else f"{weight}.unique().tolist()"


def _step_of_linear(case: FailureCase) -> str:
    ones = f"torch.ones(1, {ELEMENTS}, dtype={TORCH_NAME[case.scenario.dtype.storage]})"
    return f"model.backward(model({ones}).sum())\nmodel.step()"


def _universal(case: FailureCase) -> dict[str, str]:
    """What a script on one rank does with universal checkpoints."""
    return {
        "step": _step_of_linear(case),
        "save": 'model.save_checkpoint(CHECKPOINT, tag="ranks")\nconvert()',
        "load": 'model.load_checkpoint(CHECKPOINT, tag="universal")',
        "load_model_only": 'model.load_checkpoint(CHECKPOINT, tag="universal", load_module_only=True)',
    }


WITH_GROUPS = (
    LINEAR,
    'groups = [{"params": [model.weight]}, {"params": [model.bias], "weight_decay": 0.0}]',
    "optimizer = torch.optim.AdamW(groups, weight_decay=0.125)",
)
"""The lines that make a model with two param groups, and their optimizer."""


def _draft_rewound(case: FailureCase) -> Draft | None:
    """State that an engine keeps over a load of a universal checkpoint from before the first step."""
    kinds = [op.kind for op in case.ops]
    loads = case.focus.kind == KEPT and case.focus.op.kind == "load"
    if not loads or case.scenario.checkpoint != "universal" or STAGES[case.scenario.sharding] == 3:
        return None
    if list(dict.fromkeys(kinds)) != ["build", "save", "step", "load"] or kinds.count("build") > 1:
        return None
    case = case.on_one_rank()
    told = {"subject": "states of the optimizer after the load", "expected": "[]  # it had none when it was saved"}
    observed = (
        "[{key: value.norm().item() for key, value in s.items()} for s in optimizer.optimizer.state.values() if s]"
    )
    return _draft(case, (LINEAR, ADAMW), _universal(case) | told, observed)


def _draft_groups(case: FailureCase) -> Draft | None:
    """Settings of param groups that a universal checkpoint does not give back."""
    if not case.focus.setting or case.scenario.checkpoint != "universal" or case.focus.op.kind != "load":
        return None
    calls = _universal(case := case.on_one_rank())
    calls |= {"subject": "weight_decay of the param groups after the load", "expected": "[0.125, 0.0]"}
    observed = '[group["weight_decay"] for group in optimizer.param_groups]'
    return _draft(case, WITH_GROUPS, calls, observed)


def _draft_counters(case: FailureCase) -> Draft | None:
    """Step counters that a step after a universal load advances more than once."""
    counted = case.focus.kind == TRAINED and case.focus.role == "step"
    kinds = [op.kind for op in case.ops]
    if not counted or case.scenario.checkpoint != "universal" or kinds[-3:] != ["build", "load", "step"]:
        return None
    calls = _universal(case := case.on_one_rank())
    steps = float(kinds.count("step"))
    calls |= {"subject": f"step counters after step {steps:.0f}", "expected": f"{[steps] * 2}"}
    observed = '[float(state["step"]) for state in optimizer.optimizer.state.values()]'
    return _draft(case, WITH_GROUPS, calls, observed)


def _draft_module_only(case: FailureCase) -> Draft | None:
    """A load of the model alone that loads the optimizer's steps too."""
    alone = case.focus.kind == KEPT and case.focus.op.kind == "load_model_only" and case.focus.role == "step"
    if not alone or case.scenario.checkpoint != "universal":
        return None
    case = case.on_one_rank()
    told = {"subject": "steps of a new optimizer after a load of the weights alone", "expected": "0"}
    observed = 'max((int(state["step"]) for state in optimizer.optimizer.state.values()), default=0)'
    return _draft(case, (LINEAR, ADAMW), _universal(case) | told, observed)


FROZEN = "model.bias.requires_grad_(False)"
"""The line that leaves one parameter out of training."""


def _draft_frozen(case: FailureCase) -> Draft | None:
    """A frozen parameter and a buffer that a universal checkpoint does not give back. Each model that is built has
    another value in them. Stage 3 has parameters in parts, and no script here."""
    first = case.focus.fqn if case.focus.kind == KEPT and case.focus.role in ("param", "buffer") else ""
    frozen = first and (case.focus.role == "buffer" or case.spec.param(first).spec.trainable == "no")
    if not frozen or case.scenario.checkpoint != "universal" or case.focus.op.kind != "load":
        return None
    if STAGES[case.scenario.sharding] == 3:
        return None
    calls = _universal(case := case.on_one_rank())
    value = case.ops[0].init_seed + 1.0
    build = (
        LINEAR,
        FROZEN,
        "nn.init.constant_(model.bias, $number + 1.0)",
        'model.register_buffer("count", torch.full((2,), $number + 1.0))',
        ADAMW,
    )
    calls |= {
        "subject": "a frozen parameter and a buffer after the load",
        "expected": f"[{value}] * {ELEMENTS}, [{value}] * 2  # those of the model that was saved",
    }
    return _draft(case, build, calls, "(model.module.bias.tolist(), model.module.count.tolist())")


def _draft_offload(case: FailureCase) -> Draft | None:
    """States that cannot be offloaded, since one parameter is frozen."""
    if case.focus.kind != RAISES or OFFLOADS not in case.scenario.options or case.focus.op.kind != "step":
        return None
    if STAGES[case.scenario.sharding] != 3 or case.scenario.model != "frozen_tower":
        return None
    case = case.only(case.ops[:2]).on_one_rank()
    kind = "deepspeed.runtime.zero.offload_config.OffloadStateTypeEnum.lp_params"
    calls = {"step": f"model.offload_states([{kind}])", "works": "`offload_states` moves the parameters"}
    return _draft(case, (LINEAR, FROZEN, ADAMW), calls)


def _draft_padding(case: FailureCase) -> Draft | None:
    """A universal checkpoint that a rank cannot load, since its part of the only param group is padding: 12 elements
    on 4 ranks are padded to 16."""
    raises = case.focus.kind == RAISES and case.focus.op.kind == "load" and case.focus.error == "IndexError"
    if not raises or case.scenario.checkpoint != "universal" or STAGES[case.scenario.sharding] == 3:
        return None
    mesh, built = case.ops[-1].mesh, case.ops[0]
    later = tuple(op for op in case.ops[1:] if op.kind != "build")  # the engine that has saved is the one that loads
    case = case.only(tuple(replace(op, mesh=mesh) for op in (built, *later)))
    build = (f"model = nn.Linear({ELEMENTS}, 3, bias=False)  # 12 elements, padded to 16", ADAMW)
    return _draft(case, build, _universal(case) | {"save": SAVE_AND_CONVERT})


def _draft_raising(case: FailureCase) -> Draft | None:
    """An engine that cannot be built, or a universal checkpoint that cannot be made."""
    kinds = [op.kind for op in case.ops]
    if case.focus.kind != RAISES or kinds not in (["build"], ["build", "save"]):
        return None
    if kinds[-1] == "save" and case.scenario.checkpoint != "universal":
        return None
    case = case.on_one_rank()
    told = {"works": "`ds_to_universal` converts the checkpoint"} if kinds[-1] == "save" else {}
    return _draft(case, (LINEAR, ADAMW), _universal(case) | told)
