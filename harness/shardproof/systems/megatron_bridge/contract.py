"""The contract of Megatron-Bridge: everything that Megatron-Core promises, and that finetuning starts from the loaded
weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from shardproof.mechanisms.megatron.contract import SEEDS, MegatronContract
from shardproof.oracle.contract import Clause


class MegatronBridgeContract(MegatronContract):
    """Loading a pretrained checkpoint is loading the model alone, and refreshes the masters."""

    clauses: ClassVar[Sequence[Clause]] = (
        *MegatronContract.clauses,
        Clause(
            "loading a pretrained checkpoint refreshes the optimizer's masters from the loaded parameters",
            "megatron.bridge.training.checkpointing._load_checkpoint_from_path, cfg.checkpoint.finetune",
        ),
        SEEDS,
        Clause(
            "with save_rng a checkpoint holds the generators of every tensor-parallel rank; finetuning leaves those of "
            "the new run as they are",
            "megatron.bridge.training.checkpointing.get_rng_state, _load_checkpoint_from_path, cfg.checkpoint.finetune",
        ),
    )
    load_refreshes = True


CONTRACT = MegatronBridgeContract()
