"""Failures of TransformerEngine that one number shows, as scripts with a model of their own: what FusedAdam counts and
divides, what it does to a state dict, the norm of a tensor-parallel gradient, and the marks of tensor-parallel
parameters. Values for the template `te_own.py.j2`. No torch.

A failure of FusedAdam alone needs one weight, and neither ranks nor sharding.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from shardproof.export.case import FailureCase
from shardproof.export.model import TORCH_NAME, start
from shardproof.export.script import Draft
from shardproof.mechanisms.stand_ins import MODULE, gpu_on_cpu
from shardproof.systems.transformer_engine.layers import ATTENTION, LAYERS, Layer

HOME = "shardproof.systems.transformer_engine"
TAG = "tensor_model_parallel"
LONE = 'weight = nn.Parameter(torch.ones(4, device="cuda"))'
WEIGHT = "weight, optimizer"
LOCAL = 'state["state"][0]["exp_avg"][0].item()'


@dataclass(frozen=True)
class Scene:
    """What a script does and compares. attributes: the layers of its model; empty for a lone weight."""

    case: FailureCase
    subject: str
    expected: str
    observed: str
    calls: dict[str, list[str]]
    attributes: list[str] = field(default_factory=list)


def draft_single_value_script(case: FailureCase) -> Draft | None:
    """A script with a minimal model that shows a failure of TransformerEngine by one number, such as FusedAdam's step
    count. None if the failure needs the general template."""
    scene = _scene(case)
    if scene is None:
        return None
    mesh = scene.case.ops[-1].mesh
    begin = ['torch.cuda.set_device(int(os.environ["RANK"]))', start(scene.case, "nccl")] if mesh.world > 1 else []
    calls = {"start": begin, "state": [WEIGHT], **scene.calls}
    told = {kind: "\n".join(lines) for kind, lines in calls.items()}
    told |= {"subject": scene.subject, "expected": scene.expected}
    values = {"attributes": scene.attributes, "shim": MODULE}
    library = f"transformer-engine {case.result.version}"
    return Draft(
        HOME, "te_own.py.j2", told, scene.observed, values, library, gpu_on_cpu(extension=True), case=scene.case
    )


def _scene(case: FailureCase) -> Scene | None:
    first, scenario = case.first, case.scenario
    if first is None:
        return None
    role, capturable = first.key.role, "capturable" in scenario.options
    if capturable and scenario.optimizer.loss_scale and case.ops[-1].kind in ("step", "overflow", "save", "load"):
        return _counts(case) if case.does("overflow") else _unscales(case)
    if role == "quant_scale" and "again" in scenario.options:
        return _loads(case)
    if role == "tag" and first.kind == "missing":
        return _marks(case)
    if any(d.key.role == "norm" for d in case.first_ones) and case.ops[-1].mesh.tp > 1 and scenario.optimizer.clip:
        return _norm(case)
    return None


def _scaled(case: FailureCase) -> list[str]:
    """The build of a capturable FusedAdam with a scaler of the loss."""
    ask = case.scenario.optimizer
    return [
        LONE,
        f"optimizer = FusedAdam([weight], lr={ask.lr!r}, capturable=True)",
        f'scaler = torch.amp.GradScaler("cuda", init_scale={ask.loss_scale!r})',
    ]


def _unscales(case: FailureCase) -> Scene:
    """A gradient that was divided by the scale twice."""
    return Scene(
        case.until("step").on_one_rank(),
        "gradient that exp_avg has taken up, exp_avg / (1 - beta1)",
        "1.0",
        'round(optimizer.state[weight]["exp_avg"][0].item() / (1 - 0.9), 6)',
        {
            "build": _scaled(case),
            "step": [
                "scaler.scale(weight.sum()).backward()",
                "scaler.unscale_(optimizer)  # to clip, or to look at gradients",
                "scaler.step(optimizer)",
                "scaler.update()",
            ],
        },
    )


def _counts(case: FailureCase) -> Scene:
    """A step that is counted though it was skipped."""
    return Scene(
        case.until("overflow").on_one_rank(),
        "steps that FusedAdam has counted after one that overflowed, as a checkpoint would hold them",
        "0",
        'int(optimizer.state_dict()["param_groups"][0]["step"])',
        {
            "build": _scaled(case),
            "overflow": [
                'scaler.scale(weight.sum() * float("inf")).backward()',
                "scaler.step(optimizer)  # skips it",
                "scaler.update()",
            ],
        },
    )


def _loads(case: FailureCase) -> Scene:
    """A state dict that a load changes."""
    policy = case.scenario.dtype
    stored = {"exp_avg_dtype": policy.exp_avg, "exp_avg_sq_dtype": policy.exp_avg_sq}
    given = ", ".join(f"{name}={TORCH_NAME[dtype]}" for name, dtype in stored.items() if dtype)
    alone = case.until("load").on_one_rank()
    build, step, save, *_ = alone.ops
    return Scene(
        alone.only((build, step, save, alone.ops[-1])),
        "exp_avg in a state dict after it was loaded",
        "before",
        LOCAL,
        {
            "build": [
                LONE,
                f"optimizer = FusedAdam([weight], {given})",
            ],
            "step": ["weight.sum().backward()", "optimizer.step()"],
            "save": ["state = optimizer.state_dict()", f"before = {LOCAL}"],
            "load": ["optimizer.load_state_dict(state)"],
        },
    )


def _marks(case: FailureCase) -> Scene:
    """A part of a parameter that is not marked as one."""
    path, _, name = (case.first.key.fqn if case.first else "").rpartition(".")
    layer, tp = LAYERS[case.scenario.model][path], case.ops[-1].mesh.tp
    meta = "meta" in case.scenario.options and layer.kind != ATTENTION
    lines = [f'tp = {{"tp_size": {tp}, "tp_group": dist.group.WORLD}}', f"layer = {_call(layer, meta=meta)}"]
    return Scene(
        case.on_tensor_parallel_ranks(),
        f"{TAG} of {name} of {layer.kind}",
        "True",
        f'getattr(layer.{name}, "{TAG}", False)',
        {"build": [*lines, *["layer.reset_parameters()"] * meta]},
    )


def _call(layer: Layer, *, meta: bool) -> str:
    given = [*map(str, layer.sizes)]
    given += [f"{name}={value!r}".replace("'", '"') for name, value in {**layer.options, **layer.parallel}.items()]
    given += ["**tp", *['device="meta"'] * meta]
    return f"te.{layer.kind}({', '.join(given)})"


def _norm(case: FailureCase) -> Scene:
    """A norm of one rank's part of the gradients."""
    case, tp = case.until("step").on_tensor_parallel_ranks(), case.ops[-1].mesh.tp
    return Scene(
        case,
        "norm of a gradient of 16 ones",
        "4.0",
        "round((norm.full_tensor() if isinstance(norm, DTensor) else norm).item(), 3)",
        {
            "state": ["model"],
            "build": [
                f'mesh = init_device_mesh("cuda", (1, {tp}), mesh_dim_names=("dp_shard", "tp"))',
                f'model = Model({{"tp_size": {tp}, "tp_group": mesh["tp"].get_group()}})',
                'if hasattr(model.linear, "set_device_mesh"):  # of pull request 2713',
                '    model.linear.set_device_mesh(mesh["tp"])',
                'fully_shard(model, mesh=mesh["dp_shard"])',
            ],
            "step": [
                "model().backward()",
                f"norm = torch.nn.utils.clip_grad_norm_(model.parameters(), {case.scenario.optimizer.clip!r})",
            ],
        },
        attributes=['linear = te.Linear(4, 4, bias=False, parallel_mode="column", **tp)'],
    )
