"""Saving and loading weights through NeMo Megatron-Bridge's own checkpointing, as its finetuning does.

`save` calls Bridge's `save_checkpoint` without the optimizer, and with random generators where the model draws from
some (`save_rng`); `load_pretrained` calls its `load_checkpoint` with `pretrained_checkpoint`, as
`megatron.bridge.training.setup.setup` does where a run finetunes: that reads the weights into the model and has the
optimizer refresh its masters. Runs inside a rank; the caller has the emulated device on.

*Verifies*: keys that are missing or unexpected are a crash (`dist_ckpt_strictness` raise_unexpected, and Bridge loads
the model strictly). *Does not verify* what was written or loaded: the reader and the observation do.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.bridge.models.gpt_provider import GPTModelProvider
from megatron.bridge.training import config
from megatron.bridge.training.checkpointing import load_checkpoint, save_checkpoint
from megatron.bridge.training.state import GlobalState
from megatron.bridge.training.tokenizers.config import TokenizerConfig

from shardproof.mechanisms.megatron.rank.model import GPT_FFN, GPT_HEADS, GPT_HIDDEN, GPT_POSITIONS, GPT_VOCABULARY
from shardproof.mechanisms.megatron.rank.state import TrainState
from shardproof.mechanisms.param_scheduler import STEPS
from shardproof.oracle.contract import half_dtype
from shardproof.scenario import Scenario

SEQUENCE = GPT_POSITIONS


def save(state: TrainState, path: Path) -> None:
    """Write the weights into `path/iter_NNNNNNN`, with Bridge's trackers and run_config.yaml. On all ranks."""
    bridge = _global_state(state, save=str(path))
    bridge.train_state.step = state.iteration
    save_checkpoint(bridge, state.chunks, state.optimizer, state.scheduler, 0)
    dist.barrier()


def load_pretrained(state: TrainState, path: Path) -> None:
    """Start finetuning from the checkpoint at `path`: weights, buffers, and the optimizer's masters. On all ranks."""
    bridge = _global_state(state, pretrained_checkpoint=str(path))
    load_checkpoint(bridge, state.chunks, state.optimizer, state.scheduler)
    dist.barrier()


def _global_state(state: TrainState, **checkpoint: Any) -> Any:
    """Bridge's GlobalState over the scenario's configuration."""
    bridge = GlobalState()
    bridge.cfg = _config(state, checkpoint)
    return bridge


def _config(state: TrainState, checkpoint: dict[str, Any]) -> Any:
    """A ConfigContainer that says what was built; the data set and the tokenizer are not used."""
    scenario = state.scenario
    half = half_dtype(scenario.dtype)
    sharded = scenario.sharding == "zero1"
    return config.ConfigContainer(
        train=config.TrainingConfig(
            micro_batch_size=1,
            global_batch_size=state.mesh.dp * scenario.microbatches,
            train_iters=STEPS,
        ),
        model=GPTModelProvider(
            num_layers=1, hidden_size=GPT_HIDDEN, num_attention_heads=GPT_HEADS, ffn_hidden_size=GPT_FFN,
            vocab_size=GPT_VOCABULARY, seq_length=SEQUENCE, tensor_model_parallel_size=state.mesh.tp,
            bf16=half == "bf16", fp16=half == "fp16",
        ),
        optimizer=config.OptimizerConfig(use_distributed_optimizer=sharded),
        ddp=config.DistributedDataParallelConfig(use_distributed_optimizer=sharded),
        scheduler=config.SchedulerConfig(),
        dataset=config.FinetuningDatasetConfig(seq_length=SEQUENCE),
        logger=config.LoggerConfig(),
        tokenizer=TokenizerConfig(),
        checkpoint=_checkpoint_config(scenario, checkpoint | {"save_rng": state.streams is not None}),
    )  # fmt: skip


def _checkpoint_config(scenario: Scenario, own: dict[str, Any]) -> Any:
    return config.CheckpointConfig(
        save_optim=False,
        fully_parallel_save="fully_parallel" in scenario.checkpoint.split("+"),
        save_tokenizer_assets=False,
        dist_ckpt_strictness="raise_unexpected",
        **own,
    )
