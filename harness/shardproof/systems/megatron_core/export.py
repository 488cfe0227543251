"""How a failure of Megatron-Core becomes a script: its checkpoint formats and its own Megatron-FSDP, for
`shardproof.mechanisms.megatron.export`."""

from __future__ import annotations

from shardproof.export.case import FailureCase
from shardproof.export.script import Draft
from shardproof.mechanisms.megatron import export
from shardproof.mechanisms.megatron.export_calls import Store
from shardproof.systems.megatron_core import export_errors, export_fsdp, export_parallel, export_state
from shardproof.systems.megatron_core.formats import checkpoint_plan
from shardproof.systems.megatron_core.switches import fsdp_strategy

SHARED = '"singleton_local_shards": False, "chained_optim_avoid_prefix": True'


def draft_script(case: FailureCase) -> Draft:
    """The draft of a case.

    Raises:
        NoExportError: it uses what the template has no calls for.
    """
    plan, strategy = checkpoint_plan(case.scenario.checkpoint), fsdp_strategy(case.scenario) or ""
    form = f'"distrib_optim_sharding_type": "{plan.form}", ' if plan.sharding_type else ""
    if plan.form == "fully_reshardable":
        form += f'"distrib_optim_fully_reshardable_mem_efficient": {plan.mem_efficient}, '
    store = Store(plan.form, plan.fully_parallel, plan.asynchronous, f"{{{form}{SHARED}}}", strategy, plan.trusted)
    for own_draft in (
        export_fsdp.draft_fsdp_script,
        export_state.draft_state_script,
        export_parallel.draft_parallel_script,
        export_errors.draft_error_script,
    ):
        own = own_draft(case, store)
        if own is not None:
            return own
    return export.draft_script(case, store, local_state="local_state" in case.scenario.options)
