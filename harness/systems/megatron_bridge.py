"""NeMo Megatron-Bridge's finetuning load over Megatron-Core's optimizers: what the parent knows of it.

Model, DDP, optimizer and step are those of `megatron-core`, and so are its limits. Bridge's own code writes the
pretrained checkpoint (`save_checkpoint`) and reads it (`load_checkpoint` with `pretrained_checkpoint`, the path that
finetuning takes), which refreshes the optimizer's masters itself. docs/megatron-bridge.md says what else of the package
runs here, and where it stops. Imports neither torch nor the library.
"""

from __future__ import annotations

from harness.program import operations
from harness.scenario import Scenario
from harness.systems import megatron_core, megatron_core_formats
from harness.systems.protocol import Limit, SystemInfo, first_reason
from harness.systems.registry import register

CHECKPOINTS = ("weights", "weights+fully_parallel")
"""Bridge's torch_dist format without optimizer and random generators, as a converted pretrained model has none; with
`fully_parallel` data-parallel ranks share the writing (`fully_parallel_save`, Bridge's default)."""


def _loads_everything(scenario: Scenario) -> bool:
    return "load" in operations(scenario.program)


_OF_BRIDGE: tuple[Limit, ...] = (
    Limit(
        "checkpoint",
        lambda s: s.checkpoint not in CHECKPOINTS,
        "megatron-bridge finetunes from a checkpoint of the weights: " + ", ".join(CHECKPOINTS),
    ),
    Limit(
        "resume",
        _loads_everything,
        "megatron-bridge is driven where it finetunes (program=model_only, model_only_late, train); resuming calls the "
        "optimizer's load_state_dict, which megatron-core covers",
    ),
    Limit("experts", lambda s: s.expert_parallel > 1, "expert parallelism is driven through megatron-core"),
    Limit(
        "offload-l2",
        lambda s: s.offload.fraction > 0 and s.optimizer.kind == "adam",
        "offload steps with AdamW only",
        "megatron/core/optimizer/__init__.py, _get_megatron_optimizer_based_on_param_groups",
    ),
)

_BY_RELEASE = {"offload-l2", "l2-before-015", "groups-before-016"}
"""Limits of Megatron-Core that ask for the scenario's version, which is Bridge's here."""


def _of_core() -> tuple[Limit, ...]:
    """The limits of the one Megatron-Core release that runs here, but for those of its checkpoint formats."""
    without = _BY_RELEASE | {limit.id for limit in megatron_core_formats.LIMITS}
    return tuple(limit for limit in megatron_core.LIMITS if limit.id not in without)


LIMITS: tuple[Limit, ...] = (*_OF_BRIDGE, *_of_core())


def unsupported(scenario: Scenario) -> str | None:
    """Why the system cannot run a scenario; None where it can."""
    return first_reason(LIMITS, scenario)


INFO = register(
    SystemInfo(
        name="megatron-bridge",
        doc="NeMo Megatron-Bridge's finetuning load over Megatron-Core, both unmodified, on an emulated CUDA device",
        world="fork",
        entry="harness.systems.megatron_bridge_rank:BridgeRank",
        unsupported=unsupported,
        limits=LIMITS,
        distributions=("megatron-bridge", "torch"),
        emulated=(*megatron_core.INFO.emulated, "TransformerEngine's layers, by name only"),
        warm_up="harness.systems.megatron_bridge_rank:warm_up",
        package="megatron-bridge",
        variant=megatron_core.variant,
        options=megatron_core.OPTIONS,
        not_exercised=megatron_core.not_exercised,
        owner_groups=True,
    )
)
