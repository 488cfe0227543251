"""Megatron-Bridge's own `pretrain()` and `finetune()` from end to end, on one rank: a program of its own.

    python finetune.py FOLDER FRACTION

trains a tiny GPT for a few iterations and saves it, builds the same model from another seed and finetunes it from that
checkpoint with FRACTION of the optimizer on the host. Prints how far each weight is, at the second iteration's forward,
from what the first one's computed with (`moved`) and from the initialisation of that seed (`from_start`), as JSON.
Everything is Bridge's, with its mock data set and null tokenizer; the device is emulated.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

LR = 2.0**-10
SEQUENCE, VOCABULARY = 8, 128
ENVIRONMENT = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1",
               "TORCHDYNAMO_DISABLE": "1"}  # fmt: skip

Weights = dict[str, list[float]]


def configuration(seed: int, iterations: int, fraction: float, **checkpoint: Any) -> Any:
    import torch
    from megatron.bridge.models.gpt_provider import GPTModelProvider
    from megatron.bridge.training import config
    from megatron.bridge.training.tokenizers.config import TokenizerConfig
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    return config.ConfigContainer(
        rng=config.RNGConfig(seed=seed),
        train=config.TrainingConfig(micro_batch_size=1, global_batch_size=1, train_iters=iterations, eval_iters=0),
        model=GPTModelProvider(
            num_layers=1, hidden_size=16, num_attention_heads=2, ffn_hidden_size=32, vocab_size=VOCABULARY,
            seq_length=SEQUENCE, make_vocab_size_divisible_by=8, bf16=True, params_dtype=torch.bfloat16,
            pipeline_dtype=torch.bfloat16, transformer_layer_spec=get_gpt_layer_local_spec(), hidden_dropout=0.0,
            attention_dropout=0.0, gradient_accumulation_fusion=False, bias_activation_fusion=False,
            bias_dropout_fusion=False, masked_softmax_fusion=False, persist_layer_norm=False, apply_rope_fusion=False,
            cross_entropy_loss_fusion=False, attention_softmax_in_fp32=False,
        ),
        optimizer=config.OptimizerConfig(
            optimizer="adam", lr=LR, min_lr=0.0, bf16=True, use_distributed_optimizer=True,
            optimizer_cpu_offload=fraction > 0, optimizer_offload_fraction=fraction,
        ),
        ddp=config.DistributedDataParallelConfig(use_distributed_optimizer=True),
        scheduler=config.SchedulerConfig(
            lr_decay_style="constant", lr_decay_iters=iterations, lr_warmup_iters=0, start_weight_decay=0.0,
            end_weight_decay=0.0, weight_decay_incr_style="constant",
        ),
        dataset=config.MockGPTDatasetConfig(
            random_seed=1, reset_attention_mask=False, reset_position_ids=False, eod_mask_loss=False,
            seq_length=SEQUENCE, num_dataset_builder_threads=1, dataloader_type="single", num_workers=0,
        ),
        logger=config.LoggerConfig(log_interval=1),
        tokenizer=TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=VOCABULARY - 1),
        dist=config.DistributedInitConfig(distributed_backend="gloo"),
        checkpoint=config.CheckpointConfig(save_tokenizer_assets=False, **checkpoint),
    )  # fmt: skip


def trained(config: Any, entry: str) -> list[Weights]:
    """The weights at every forward of a run of Bridge's `entry`."""
    from megatron.bridge.training import finetune, gpt_step, pretrain
    from megatron.bridge.training.state import GlobalState

    seen: list[Weights] = []

    def forward_step(state: GlobalState, data_iterator: Any, model: Any, return_schedule_plan: bool = False) -> Any:
        seen.append({name: p.detach().float().flatten().tolist() for name, p in model.named_parameters()})
        return gpt_step.forward_step(state, data_iterator, model, return_schedule_plan)

    {"pretrain": pretrain.pretrain, "finetune": finetune.finetune}[entry](config, forward_step)
    return seen


def in_a_child(folder: Path, run: Callable[[], list[Weights]]) -> list[Weights]:
    """What `run` gives in a forked process: Bridge keeps global state."""
    from shardproof.emulation import cuda

    file = folder / "seen.json"
    if (pid := os.fork()) == 0:
        os.setpgid(0, 0)
        try:
            with tempfile.NamedTemporaryFile(dir=folder) as store, cuda.emulated():
                import torch.distributed as dist

                dist.init_process_group("gloo", init_method=f"file://{store.name}", rank=0, world_size=1)
                file.write_text(json.dumps(run()))
        except BaseException:
            import traceback

            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    status = os.waitpid(pid, 0)[1]
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # the manager process that dist_checkpointing leaves behind
    if status:
        sys.exit("a run of Bridge failed")
    found: list[Weights] = json.loads(file.read_text())
    return found


def main(folder: Path, fraction: float) -> None:
    os.environ.update(ENVIRONMENT)
    from shardproof.systems.megatron_bridge.rank import library

    library()
    save = {"save": str(folder / "pretrained"), "save_interval": 4}
    in_a_child(folder, lambda: trained(configuration(1, 4, 0.0, **save), "pretrain"))
    (start,) = in_a_child(folder, lambda: trained(configuration(2, 1, 0.0), "pretrain"))
    load = {"pretrained_checkpoint": save["save"]}
    first, second = in_a_child(folder, lambda: trained(configuration(2, 2, fraction, **load), "finetune"))
    print(json.dumps({"moved": _distances(second, first), "from_start": _distances(second, start)}))


def _distances(these: Weights, those: Weights) -> dict[str, float]:
    return {name: max(abs(a - b) for a, b in zip(these[name], those[name], strict=True)) for name in these}


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]))
