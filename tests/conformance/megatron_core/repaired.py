"""The ranks of the systems of `repairs.py`: Megatron-Core with one repair each, made as soon as the library is
there."""

from __future__ import annotations

from typing import Any

from shardproof.protocol.system import RankContext
from shardproof.systems.megatron_core.rank import Rank, library


class Repaired(Rank):
    """Ranks whose library is repaired as soon as it is there."""

    def __init__(self, context: RankContext) -> None:
        library()
        from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

        self.repair(DistributedOptimizer)
        super().__init__(context)

    def repair(self, optimizer: Any) -> None:
        raise NotImplementedError


class KeepOrder(Repaired):
    """Groups are installed in the order in which their parameters were found."""

    def repair(self, optimizer: Any) -> None:
        build = optimizer._build_model_and_main_param_groups

        def in_order(cls: Any, gbuf_ranges: Any, param_gbuf_map: Any, ranges: Any, config: Any) -> Any:
            built = build(gbuf_ranges, param_gbuf_map, ranges, config)
            for group, halves, singles, _, shards, masters in zip(ranges, *built, strict=False):
                pairs = [*zip(halves, masters, strict=True), *zip(singles, shards, strict=True)]
                own = {id(param): main for param, main in pairs}
                group["orig_group"]["params"] = [own[id(param)] for param in group["params"]]
            return built

        optimizer._build_model_and_main_param_groups = classmethod(in_order)


class RebuildMap(Repaired):
    """The map is made again from the order in which the groups were installed."""

    def repair(self, optimizer: Any) -> None:
        construct = optimizer.__init__

        def and_map(self: Any, *arguments: Any, **options: Any) -> None:
            construct(self, *arguments, **options)
            for index, parts in enumerate(zip(self.model_fp32_groups, self.model_float16_groups, strict=True)):
                for position, param in enumerate([*parts[0], *parts[1]]):
                    self.model_param_group_index_map[param] = (index, position)

        optimizer.__init__ = and_map


class RefreshCopies(Repaired):
    """A refresh reaches the masters, and from there every copy that the hybrid optimizer steps."""

    def repair(self, optimizer: Any) -> None:
        plain = optimizer._copy_model_params_to_main_params

        def everywhere(self: Any, state_dict: Any = None) -> None:
            plain(self, state_dict)
            copies = getattr(self.optimizer, "param_to_inner_param", None)
            if copies is None or self.config.use_precision_aware_optimizer:
                return
            pairs = (
                (self.model_float16_groups, self.shard_fp32_from_float16_groups),
                (self.model_fp32_groups, self.shard_fp32_groups),
            )
            for models, masters in pairs:
                for group, shards in zip(models, masters, strict=True):
                    for model, master in zip(group, shards, strict=True):
                        span = self._get_model_param_range_map(model)["param"]
                        master.data.copy_(model.detach().view(-1)[span.start : span.end])
            for master, copy in copies.items():
                copy.data.copy_(master)

        optimizer._copy_model_params_to_main_params = everywhere


class KeepZeros(Repaired):
    """FusedAdam, emulated here, stores zeros where an fp8 state is zero."""

    def repair(self, optimizer: Any) -> None:
        import torch
        from shardproof.emulation.apex import FusedAdam

        apply = FusedAdam._apply_scale

        def keep(self: Any, name: str, unscaled: Any, stored: Any, scale: Any) -> None:
            apply(self, name, unscaled, stored, scale)
            if stored.dtype is torch.float8_e4m3fn and scale == 0:
                stored.copy_(unscaled)

        FusedAdam._apply_scale = keep  # type: ignore[method-assign]
