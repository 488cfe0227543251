"""How a failure of Megatron-Bridge becomes a script: Megatron-Core's training
(`shardproof.mechanisms.megatron.export`), and Bridge's own checkpoint of the weights around it.

Bridge's package cannot be imported without the names of TransformerEngine's layers. On a machine without a GPU the
module beside the script gives these too.
"""

from __future__ import annotations

from dataclasses import replace

from shardproof.export.case import FailureCase
from shardproof.export.script import Draft, fill
from shardproof.mechanisms.megatron import export
from shardproof.mechanisms.megatron.export_calls import Store
from shardproof.oracle.contract import half_dtype

HOME = "shardproof.systems.megatron_bridge"


def draft_script(case: FailureCase) -> Draft:
    """The draft of a case.

    Raises:
        NoExportError: it uses what the template has no calls for.
    """
    made = export.draft_script(case, Store("weights", "fully_parallel" in case.scenario.checkpoint.split("+")))
    case = made.case or case
    case = case.until("load_model_only") if case.does("reload_params") else case  # Bridge's load refreshes them itself
    scenario = case.scenario
    calls = {
        **made.calls,
        "save": "save_checkpoint(bridge(save=CHECKPOINT), [model], optimizer, None, 0)",
        "load_model_only": "load_checkpoint(bridge(pretrained_checkpoint=CHECKPOINT), [model], optimizer, None)",
    }
    values = {
        **made.values,
        "half": half_dtype(scenario.dtype),
        "batch": case.ops[-1].mesh.dp * scenario.microbatches,
        "zero1": scenario.sharding == "zero1",
        "fully_parallel": "fully_parallel" in scenario.checkpoint.split("+"),
    }
    shims = {name: text + fill(HOME, "te_names.py.j2") for name, text in made.shims.items()}
    return replace(
        made, home=HOME, extends=made.home, template="bridge.py.j2", calls=calls, values=values, shims=shims, case=case
    )
