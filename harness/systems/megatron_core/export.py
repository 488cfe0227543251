"""How a failure of Megatron-Core becomes a script: its checkpoint formats and its own Megatron-FSDP, for
`harness.mechanisms.megatron.export`."""

from __future__ import annotations

from harness.export.case import Case
from harness.export.script import Draft
from harness.mechanisms.megatron import export
from harness.mechanisms.megatron.export_calls import Store
from harness.systems.megatron_core import export_fsdp, export_parallel, export_state
from harness.systems.megatron_core.formats import checkpoint_plan
from harness.systems.megatron_core.switches import fsdp_strategy

SHARED = '"singleton_local_shards": False, "chained_optim_avoid_prefix": True'


def draft(case: Case) -> Draft:
    """The draft of a case.

    Raises:
        NoExportError: it uses what the template has no calls for.
    """
    plan, strategy = checkpoint_plan(case.scenario.checkpoint), fsdp_strategy(case.scenario) or ""
    form = f'"distrib_optim_sharding_type": "{plan.form}", ' if plan.sharding_type else ""
    if plan.form == "fully_reshardable":
        form += f'"distrib_optim_fully_reshardable_mem_efficient": {plan.mem_efficient}, '
    store = Store(plan.form, plan.fully_parallel, plan.asynchronous, f"{{{form}{SHARED}}}", strategy, plan.trusted)
    for own_draft in (export_fsdp.draft, export_state.draft, export_parallel.draft):
        own = own_draft(case, store)
        if own is not None:
            return own
    return export.draft(case, store, local_state="local_state" in case.scenario.options)
