"""The random generators of Automodel's ranks: what each must hold, live and in checkpoints.

A recipe makes `StatefulRNG(seed, ranked=True)`: Python's, numpy's and torch's generator of every rank are seeded with
its seed plus the number of the rank. It saves their states with every checkpoint and loads them again, each rank its
own: from 0.6.0 on in a file of each rank (`save_on_global_ranks`), before in one of each data-parallel rank
(`save_on_dp_ranks`), so that of the ranks of tensor parallelism all but the first were given another one's. Dropout
draws from torch's generator; on a GPU it would draw from the device's, which is seeded alike.

Sources: nemo_automodel/components/training/rng.py; recipes/base_recipe.py, `_save_checkpoint_internal` and
`_load_checkpoint_tracked_state`; that a rank must get its own back, NVIDIA-NeMo/Automodel PR 3437.

*Verifies* nothing by itself. *Does not say* anything of the generators of data loaders, which a recipe keeps elsewhere.
"""

from __future__ import annotations

from shardproof.models import model_spec
from shardproof.observe.logical import Key, Logical, Value
from shardproof.observe.record import LIVE, WRITTEN
from shardproof.oracle.generators import Drawn, follow, state_of
from shardproof.program import Op, expand
from shardproof.scenario import Mesh, Scenario

KEY = "rng"
"""What recipes call their StatefulRNG: the name of its folder in a checkpoint, and of its files."""


def automodel_streams(scenario: Scenario) -> Logical:
    """The states of all generators, live on every rank and in what saves wrote."""
    modules = [module for module in model_spec(scenario.model).modules if module.draws]
    sizes = tuple(module.params[0].numel for module in modules)
    expected = Logical()
    for op, places, at, saved in follow("rank", scenario, expand(scenario), _every_rank_its_own):
        for rank, place in enumerate(at):
            for name, value in _states(places[place], sizes, op).items():
                expected[Key(op.index, LIVE, "rng", f"rank{rank}.{name}")] = value
        for number, drawn in enumerate(saved):
            for name, value in _states(drawn, sizes, op).items():
                expected[Key(op.index, WRITTEN, "rng", f"rank0.{name}.{number}")] = value
    return expected


def _every_rank_its_own(_: Mesh) -> int:
    """A load gives a rank its own state on any mesh that has a rank of its number."""
    return 0


def _states(drawn: Drawn, sizes: tuple[int, ...], op: Op) -> dict[str, Value]:
    """Python's and numpy's generator, which were seeded and have drawn nothing, and torch's."""
    from shardproof.observe.ambient import expected_generators

    seeded = expected_generators(drawn.seed, [op])
    host = {name: seeded[Key(op.index, LIVE, "rng", f"rank0.{name}")] for name in ("python", "numpy")}
    return {**host, "torch": state_of(drawn, sizes)}
