"""What NeMo Automodel promises: FSDP2's training loop over what its pretrained loader made (`dtype_contract`)."""

from __future__ import annotations

from collections.abc import Set as AbstractSet

from shardproof.mechanisms.fsdp2 import limits as fsdp2
from shardproof.mechanisms.param_scheduler import OWN_SCHEDULES, SHARE
from shardproof.models import ModuleSpec, ParamSpec, draws
from shardproof.observe.logical import Key, Logical, Value
from shardproof.observe.record import LIVE
from shardproof.oracle.contract import Clause, Contract
from shardproof.oracle.inputs import DOUBLE_CLIPPING, Clip, Stages
from shardproof.program import expand
from shardproof.protocol.features import lacks
from shardproof.scenario import FLOAT_DTYPES, Mesh, Scenario
from shardproof.systems.automodel import pretrained
from shardproof.systems.automodel.accepts import CLIPS
from shardproof.systems.automodel.generators import automodel_streams
from shardproof.versions import before


class AutomodelContract(Contract):
    """What differs from FSDP2: a build loads a checkpoint file, so that dtypes follow from the file, the request, the
    model's pins and the policy.

    They also depend on the mesh of the session. Automodel loads a file in another way when the world is one rank
    (Hugging Face's loader) than when it is several (the checkpointer, under FSDP2): a twin for one rank cannot serve a
    scenario on two, even though the gradients would be the same.
    """

    clauses = (
        *fsdp2.CLAUSES,
        Clause(
            "with seed s the generators of Python, numpy and torch of rank r start from s + r; a load gives every rank "
            "its own back",
            "nemo_automodel.components.training.rng.StatefulRNG, ranked=True; Checkpointer.save_on_global_ranks",
        ),
        Clause(
            "gradients are clipped by the norm of all of them, whichever mesh they lie on; norm and coefficient are in "
            "double precision",
            "nemo_automodel.components.training.utils, clip_grad_norm (0.6.0)",
        ),
    )
    trainable_only = True

    def stages(self, scenario: Scenario, spec: ParamSpec, mesh: Mesh) -> Stages:
        found = pretrained.parameter(scenario, spec, mesh)
        return Stages(
            found.storage, found.compute, found.reduce, found.reduce, found.storage, None, found.state, found.state
        )

    def initial_dtypes(self, scenario: Scenario, spec: ParamSpec, mesh: Mesh) -> tuple[str, ...]:
        return pretrained.file_dtype(scenario, spec), self.stages(scenario, spec, mesh).storage

    def run_keeps(self, scenario: Scenario) -> tuple[str, ...]:
        """Keys of param groups that came with 0.7, and which a checkpoint of a release before cannot have."""
        upgraded = scenario.load_version and before(scenario.version, "0.7")
        return ("lr_mult", "wd_mult") if upgraded and scenario.optimizer.schedule in OWN_SCHEDULES else ()

    def schedule_share(self, scenario: Scenario) -> str:
        return SHARE if scenario.optimizer.schedule in OWN_SCHEDULES else ""

    def clip(self, scenario: Scenario) -> Clip | None:
        bound = scenario.optimizer.clip
        if not bound or lacks(scenario, CLIPS):
            return super().clip(scenario)
        return Clip(bound, "fp64", DOUBLE_CLIPPING)

    def buffer_dtype(self, scenario: Scenario, dtype: str, module: ModuleSpec, mesh: Mesh) -> str:
        return pretrained.buffer(scenario, dtype, module, mesh) if dtype in FLOAT_DTYPES else dtype

    def completed(self, truth: Logical, observed: Logical, scenario: Scenario, done: AbstractSet[int]) -> Logical:
        texts = {
            Key(op.index, LIVE, "resolved", name): Value("utf8", (len(text),), text.encode())
            for op in expand(scenario)
            if op.kind == "build" and op.index in done
            for name, text in pretrained.recipe(scenario).items()
        }
        return truth | texts | (automodel_streams(scenario) if draws(scenario.model) else {})


CONTRACT = AutomodelContract()
