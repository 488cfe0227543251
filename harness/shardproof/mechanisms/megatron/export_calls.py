"""The calls of a training script on Megatron-Core, as lines of a script: joining the ranks, DDP or FSDP and the
optimizer, a step, and a checkpoint of each format, with those options alone that a scenario asks for. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardproof.export.case import WRITTEN, FailureCase
from shardproof.export.model import TORCH_NAME, start
from shardproof.mechanisms.fsdp2.export import WRAPPED
from shardproof.mechanisms.megatron import export_groups as groups
from shardproof.mechanisms.megatron.switches import BUCKET_SIZE
from shardproof.scenario import Scenario
from shardproof.versions import before

STATE_DTYPE = TORCH_NAME | {"fp8e4m3": "torch.uint8"}
"""What the optimizer config calls a dtype: fp8 is uint8 there."""


@dataclass(frozen=True)
class Store:
    """How a checkpoint is written and read. form: the format's name. strategy: whether ranks share the work
    (`fully_parallel`) and whether the writing is asynchronous. metadata: what `sharded_state_dict` is told. fsdp: the
    strategy of Megatron-FSDP; empty under DDP."""

    form: str
    fully_parallel: bool = False
    asynchronous: bool = False
    metadata: str = "{}"
    fsdp: str = ""
    trusted: bool = False


def is_precise(scenario: Scenario) -> bool:
    """Whether masters and moments lie inside FusedAdam, in dtypes of their own."""
    return "precision_aware" in scenario.options


def imports_triton(version: str) -> bool:
    """Whether a release of Megatron-Core cannot be imported without triton (`shardproof.mechanisms.megatron.rank`)."""
    return not before(version, "0.18")


def call(name: str, values: Mapping[str, str]) -> str:
    """The call of a constructor, as text."""
    return f"{name}({', '.join(f'{key}={value}' for key, value in values.items())})"


def spread(target: str, name: str, values: Mapping[str, str]) -> list[str]:
    """An assignment of a call, over several lines where it is long."""
    line = f"{target} = {call(name, values)}"
    if len(line) <= 116:
        return [line]
    lines, row = [f"{target} = {name}("], "   "
    for key, value in values.items():
        if len(row) + len(key) + len(value) > 106:
            lines.append(row)
            row = "   "
        row += f" {key}={value},"
    return [*lines, row, ")"]


def config(half: str | None, tp: int = 1) -> dict[str, str]:
    """The arguments of a TransformerConfig. tp: ranks of tensor parallelism."""
    values = {"num_layers": "1", "hidden_size": "8", "num_attention_heads": "2"}
    values |= {"tensor_model_parallel_size": str(tp)} if tp > 1 else {}
    return values | ({half: "True"} if half else {})


def joined(case: FailureCase) -> list[str]:
    """The lines that join the ranks."""
    several = case.ops[-1].mesh.world > 1
    mesh, experts = case.ops[-1].mesh, case.scenario.expert_parallel
    sizes = {"tensor_model_parallel_size": mesh.tp, "expert_model_parallel_size": experts}
    sizes |= {"num_distributed_optimizer_instances": mesh.dp_replicate}
    parallel = ", ".join(f"{name}={size}" for name, size in sizes.items() if size > 1)
    return [
        *(['torch.cuda.set_device(int(os.environ["RANK"]))'] * several),
        start(case, "nccl"),
        f"parallel_state.initialize_model_parallel({parallel})",
    ]


def build(case: FailureCase, store: Store, half: str | None) -> list[str]:
    """The lines that build the model, DDP or FSDP around it, and the optimizer."""
    scenario = case.scenario
    wrapper = "FullyShardedDataParallel" if store.fsdp else "DistributedDataParallel"
    units = ", fsdp_unit_modules=[Block]" if store.fsdp == "optim_grads_params" else ""
    values = optimizer(scenario, half) | {"lr": groups.learning_rate(case)}
    values |= {"min_lr": "0.0"} if groups.scheduled(case) else {}
    return [
        "torch.manual_seed($number)",
        f"model = {'Float16Module(CONFIG, Model())' if store.fsdp and half else 'Model()'}",
        *spread("ddp_config", "DistributedDataParallelConfig", ddp(case, store)),
        f"model = {wrapper}(model.config, ddp_config, model{units})",
        *spread("config", "OptimizerConfig", values),
        *_optimizer_lines(case),
    ]


TORCHS_ADAM = 'assert not HAVE_APEX_OR_TE, "apex or TransformerEngine is there, and this is of torch\'s Adam"'
"""The line that ends a script with 125 where the library takes another Adam than the failure is of."""


def _optimizer_lines(case: FailureCase) -> list[str]:
    ask = case.scenario.optimizer
    plain = ask.kind != "sgd" and ask.impl == "forloop" and not case.scenario.offload.fraction
    guard = [TORCHS_ADAM] * (plain and case.scenario.sharding == "zero1")
    if not groups.scheduled(case):
        return ["optimizer = get_megatron_optimizer(config, [model])", *guard]
    return [
        f"overrides = {groups.overrides(case)}",
        "optimizer = get_megatron_optimizer(config, [model], config_overrides=overrides)",
        *groups.scheduler(case),
        *guard,
    ]


def ddp(case: FailureCase, store: Store) -> dict[str, str]:
    """The arguments of a DistributedDataParallelConfig."""
    scenario, options = case.scenario, case.scenario.options
    flags = {
        "use_megatron_fsdp": bool(store.fsdp),
        "use_distributed_optimizer": scenario.sharding == "zero1",
        "grad_reduce_in_fp32": scenario.dtype.reduce == "fp32",
        "overlap_grad_reduce": "overlap_grad_reduce" in options,
        "overlap_param_gather": "overlap_param_gather" in options,
        "average_in_collective": "average_in_collective" in options,
    }
    values = {name: "True" for name, on in flags.items() if on}
    if store.fsdp:
        values |= {"data_parallel_sharding_strategy": f'"{store.fsdp}"', "gradient_reduce_div_fusion": "False"}
    if case.ops[-1].mesh.dp_replicate > 1:
        values["num_distributed_optimizer_instances"] = str(case.ops[-1].mesh.dp_replicate)
    if "one_bucket" not in options and (store.fsdp or values.get("overlap_grad_reduce")):
        values["bucket_size"] = str(BUCKET_SIZE)
    return values


def optimizer(scenario: Scenario, half: str | None) -> dict[str, str]:
    """The arguments of an OptimizerConfig."""
    ask, fraction = scenario.optimizer, scenario.offload.fraction
    values = {
        "optimizer": '"sgd"' if ask.kind == "sgd" else '"adam"',
        "lr": repr(ask.lr),
        "weight_decay": repr(ask.weight_decay),
        "clip_grad": repr(ask.clip),
    }
    if half:
        values |= {half: "True", "params_dtype": TORCH_NAME[half]}
    if half == "fp16":
        scale = {"initial_loss_scale": repr(ask.loss_scale), "loss_scale_window": "2", "min_loss_scale": "1.0"}
        values |= scale if ask.loss_scale else {"loss_scale": "1.0"}
    if scenario.sharding == "zero1":
        values["use_distributed_optimizer"] = "True"
    if is_precise(scenario):
        policy = scenario.dtype
        values["use_precision_aware_optimizer"] = "True"
        stored = {
            "exp_avg_dtype": policy.exp_avg,
            "exp_avg_sq_dtype": policy.exp_avg_sq,
            "main_params_dtype": policy.master,
        }
        values |= {name: STATE_DTYPE[dtype] for name, dtype in stored.items() if dtype and dtype != "fp32"}
    if ask.kind == "adam":
        values["decoupled_weight_decay"] = "False"
    if fraction:
        values |= {"optimizer_cpu_offload": "True", "optimizer_offload_fraction": repr(fraction)}
    if "overlap_param_gather" in scenario.options:
        values["overlap_param_gather"] = "True"
    for word, name in (
        ("torch_offload", "use_torch_optimizer_for_cpu_offload"),
        ("overlap_offload", "overlap_cpu_optimizer_d2h_h2d"),
    ):
        if word in scenario.options:
            values[name] = "True"
    return values


def step(case: FailureCase) -> list[str]:
    """The lines of one training step."""
    count = case.scenario.microbatches
    backward = 'optimizer.scale_loss(model(torch.ones(1, device="cuda", requires_grad=True)).sum()).backward()'
    lines = ["model.zero_grad_buffer()", "optimizer.zero_grad()"]
    if count > 1:
        lines += ["with model.no_sync():", f"    for _ in range({count - 1}):", f"        {backward}"]
    end = ["scheduler.step(increment=1)"] * groups.scheduled(case)
    return [*lines, backward, "finalize_model_grads([model])", "optimizer.step()", *end]


def checkpoint(store: Store, case: FailureCase) -> dict[str, str]:
    """Saving and loading, by format: kind of operation → lines."""
    if store.fsdp:
        return _fsdp_checkpoint(case)
    if store.form == "dp_zero":
        state = '{"model": model.state_dict(), "optimizer": optimizer.state_dict()}'
        save = [f'torch.save({state}, CHECKPOINT + ".model")', "optimizer.save_parameter_state(CHECKPOINT)"]
        load = [
            f'state = torch.load(CHECKPOINT + ".model"{", weights_only=False" if store.trusted else ""})',
            'model.load_state_dict(state["model"])',
            'optimizer.load_state_dict(state["optimizer"])',
            "optimizer.load_parameter_state(CHECKPOINT)",
        ]
        if groups.scheduled(case):
            save = [f"state = {state}", 'state["scheduler"] = scheduler.state_dict()', *save]
            save[2] = 'torch.save(state, CHECKPOINT + ".model")'
            load.append('scheduler.load_state_dict(state["scheduler"])')
        if case.focus.kind == WRITTEN:
            save = save[1:]
        if case.scenario.expert_parallel > 1:
            save, load = (_by_experts(lines, case.scenario.expert_parallel) for lines in (save, load))
    elif store.form == "plain":
        save = ['torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, CHECKPOINT)']
        load = [
            f"state = torch.load(CHECKPOINT{', weights_only=False' if store.trusted else ''})",
            'model.load_state_dict(state["model"])',
            'optimizer.load_state_dict(state["optimizer"])',
        ]
    else:
        return _distributed_checkpoint(store, case)
    return {"save": "\n".join(save), "load": "\n".join(load), "load_model_only": "\n".join(load[:2])}


def _by_experts(lines: list[str], shares: int) -> list[str]:
    """The same with a file for each share of the experts, of which the first rank that has it writes it, as the
    training script does."""
    named = 'path = f"{CHECKPOINT}.{parallel_state.get_expert_model_parallel_rank()}"'
    found = [named]
    for line in lines:
        one = line.replace("CHECKPOINT", "path")
        found += [f"if dist.get_rank() < {shares}:", f"    {one}"] if line.startswith("torch.save") else [one]
    return found


def _distributed_checkpoint(store: Store, case: FailureCase) -> dict[str, str]:
    strict = _strictness(case)
    group = "parallel_state.get_data_parallel_group(with_context_parallel=True)"
    save = ["os.makedirs(CHECKPOINT, exist_ok=True)"]
    given, loading = "", ""
    if store.fully_parallel:
        save += [
            'strategy = get_default_save_sharded_strategy("torch_dist")',
            f"strategy = FullyParallelSaveStrategyWrapper(strategy, {group})",
        ]
        given, loading = ", strategy", ", strategy"
    call = f"dist_checkpointing.save(sharded(model, optimizer, False), CHECKPOINT{given}"
    if store.asynchronous:
        save += [
            f"request = {call}, async_sharded_save=True)",
            "queue = AsyncCallsQueue()",
            "queue.schedule_async_request(request)",
            "queue.maybe_finalize_async_calls(blocking=True)",
        ]
    else:
        save.append(f"{call})")
    load = []
    if store.fully_parallel:
        load = [
            "strategy = get_default_load_sharded_strategy(CHECKPOINT)",
            f"strategy = FullyParallelLoadStrategyWrapper(strategy, {group})",
        ]
    load += ['os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"  # the file is our own'] * store.trusted
    load += [
        f"state = dist_checkpointing.load(sharded(model, optimizer, True), CHECKPOINT{loading}{strict})",
        'model.load_state_dict(state["model"])',
        'optimizer.load_state_dict(state["optimizer"])',
    ]
    weights = [
        'state = {"model": model.module.sharded_state_dict(metadata=METADATA)}',
        "state = dist_checkpointing.load(state, CHECKPOINT)",
        'model.load_state_dict(state["model"])',
    ]
    return {"save": "\n".join(save), "load": "\n".join(load), "load_model_only": "\n".join(weights)}


def _strictness(case: FailureCase) -> str:
    """The argument of a load that makes the library itself refuse keys that are not in the file, as our own loads have
    it. It is left out where the failure is no such refusal."""
    refused = case.focus.error.rpartition(".")[2] == "CheckpointingException"
    return ", strict=StrictHandling.RAISE_ALL" if refused else ""


SPLITS = {"_w": "handle_swiglu_in_state_dict", ".query": "handle_gdn_in_state_dict"}
"""The first section of a fused weight → the library's function that takes the state of such weights apart."""


def _fsdp_checkpoint(case: FailureCase) -> dict[str, str]:
    sections = {name for named in case.spec.params for name, _ in named.spec.sections}
    given = 'model.module, state["model"], state["optimizer"]'
    split = [f'state["model"], state["optimizer"] = {name}({given})' for at, name in SPLITS.items() if at in sections]
    prepared = [*split, "preprocess_state_dict_for_uneven_dtensor(state)"]
    save = ["state = fsdp_state(model, optimizer, is_loading=False)", *prepared]
    load = ["state = fsdp_state(model, optimizer, is_loading=True)", *prepared]
    raised = case.result.error
    return {
        **(WRAPPED if raised and "torch/distributed/checkpoint/" in raised.traceback else {}),
        "save": "\n".join([*save, "dcp.save(state, checkpoint_id=CHECKPOINT)"]),
        "load": "\n".join(
            [
                *load,
                "dcp.load(state, checkpoint_id=CHECKPOINT)",
                'model.load_state_dict(state["model"])',
                'optimizer.load_state_dict(state["optimizer"])',
            ]
        ),
    }
