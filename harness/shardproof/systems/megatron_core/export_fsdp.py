"""Failures under Megatron-Core's own Megatron-FSDP that one weight shows: gradients that are too large or too small,
weights of before a load, and the state of a local tensor in a checkpoint. Scenes of `export_scene`. No torch."""

from __future__ import annotations

from shardproof.export.case import OTHER, RAISES, TRAINED, FailureCase
from shardproof.export.script import Draft
from shardproof.mechanisms.megatron.export_calls import Store
from shardproof.systems.megatron_core.export_scene import LR, Scene, adam, build_lines, drafted, step_lines, tensor

SIZE = "4, 4"
ABOUT = "Its loss is the sum of its weight, which begins as 1."
LOSS = 'model(torch.ones(1, device="cuda", requires_grad=True)).sum()'


def draft_fsdp_script(case: FailureCase, store: Store) -> Draft | None:
    """A script that shows a failure of Megatron-Core's own Megatron-FSDP in one or two parameters. None if the failure
    needs the general template."""
    first = case.first
    if not store.fsdp or case.ops[-1].mesh.tp > 1:
        return None
    if _is_refused(case, store):
        return drafted(_refused(case, store), store)
    if first is None:
        return None
    if case.focus.kind == TRAINED and case.focus.op.kind == "step" and not first.key.role.startswith("compute"):
        return drafted(_step(case, store), store)
    if case.focus.kind == OTHER and first.key.role == "compute_param" and case.does("load"):
        return drafted(_load(case, store), store)
    if case.is_shape and case.focus.role in ("exp_avg", "exp_avg_sq"):
        return drafted(_stored(case, store), store)
    return None


def _is_refused(case: FailureCase, store: Store) -> bool:
    """Whether a model without sharding refuses its own state dict, since its tensors cannot be changed in place."""
    error, refused = case.result.error, case.focus.kind == RAISES and case.focus.op.kind == "load" and not case.whole
    return refused and store.fsdp == "no_shard" and bool(error and "load_state_dict" in error.traceback)


def _refused(case: FailureCase, store: Store) -> Scene:
    """A model that does not take the state dict that was just made of it."""
    ops, lines = {op.kind: op for op in reversed(case.ops)}, build_lines(case, store, adam(case))
    return Scene(
        case.only((ops["build"], ops["load"])),
        "One weight.",
        ["self.block = Block()"],
        "",
        "",
        "",
        {
            "build": "\n".join(lines[: next(at for at, line in enumerate(lines) if line.startswith("config = "))]),
            "load": "model.load_state_dict(model.state_dict())",
            "works": "the model's own state dict is loaded",
            "state": "model",
        },
        block=tensor(case, SIZE),
    )


def _mean(case: FailureCase) -> float:
    """The mean of the ranks' gradients, which are 1 and more, at equal distances."""
    return 1 + _between(case) * (case.ops[-1].mesh.dp - 1) / 2


def _between(case: FailureCase) -> int:
    """By how much one rank's gradient is more than the one's before it: 1, or where the dtype of the reduction is asked
    for, so much that bf16 cannot hold the sum."""
    return 255 if case.scenario.dtype.reduce == "fp32" else 1


def _loss(case: FailureCase) -> str:
    factor = "dist.get_rank() + 1" if _between(case) == 1 else f"{_between(case)} * dist.get_rank() + 1"
    return LOSS + (f" * ({factor})" if case.ops[-1].mesh.dp > 1 else "")


def _step(case: FailureCase, store: Store) -> Scene:
    """A gradient that is not the mean of the ranks'."""
    return Scene(
        case,
        ABOUT,
        ["self.block = Block()"],
        "gradient that exp_avg has taken up, exp_avg / (1 - beta1)",
        f"[{_mean(case)}]  # everywhere: the mean of the ranks' gradients{_why(case)}",
        "gradient(optimizer)",
        {"build": "\n".join(build_lines(case, store, adam(case))), "step": "\n".join(_steps(case))},
        forward="self.block(x)",
        block=tensor(case, SIZE),
    )


def _why(case: FailureCase) -> str:
    return ", 1 and 256; bf16 has no 257" if (_between(case), case.ops[-1].mesh.dp) == (255, 2) else ""


def _steps(case: FailureCase) -> list[str]:
    """One step. With overlap_grad_reduce the training script enters `no_sync` for all microbatches but the last; the
    library knows by that alone which one is the last, and only then reduces gradients that are not sharded."""
    enters = "overlap_grad_reduce" in case.scenario.options
    before = ["with model.no_sync():", "    pass  # no microbatch before the last one"]
    return [*before * enters, *step_lines(_loss(case))]


def _load(case: FailureCase, store: Store) -> Scene:
    """A forward after a load that computes with the weights of before it."""
    case = case.until("load")
    before = 16 * (1 - LR * sum(op.kind == "step" for op in case.ops))
    return Scene(
        case,
        ABOUT,
        ["self.block = Block()"],
        f"sum of the weights that the forward after the load computes with ({before} until then)",
        f"16 * {1 - LR}  # Adam's first step is one of the learning rate",
        'model(torch.zeros(1, device="cuda")).item()',
        {"build": "\n".join(build_lines(case, store, adam(case))), "step": "\n".join(step_lines(_loss(case)))},
        forward="self.block(x)",
        block=tensor(case, SIZE),
    )


def _stored(case: FailureCase, store: Store) -> Scene:
    """State that the checkpoint has one rank's part of."""
    config = adam(case)
    names = "dcp.FileSystemReader(CHECKPOINT).read_metadata().state_dict_metadata.items()"
    return Scene(
        case,
        ABOUT,
        ["self.block = Block()"],
        f"shape of {case.focus.role} of the weight in the checkpoint",
        f"({SIZE})",
        f'next(tuple(stored.size) for name, stored in {names} if name.endswith("{case.focus.role}"))',
        {"build": "\n".join(build_lines(case, store, config))},
        forward="self.block(x)",
        block=tensor(case, SIZE),
        fused=True,
        local_state=True,
    )
