"""The random generators of a torch training script: seeded, drawn from, saved and restored by the script itself,
as torch has no API for it. Rank side.

Dropout of modules that all ranks compute alike draws from torch's default generator, that of others from a
`torch.Generator` of the script's own. Under `extra` a checkpoint holds one state for each coordinate of each stream, a
uint8 tensor under a name such as `rng.tensor.1`; ranks with the same coordinate write the same name, of which the
library keeps one. A load restores a rank's own, and leaves those alone whose stream has another number of coordinates
than was saved.

The masks are drawn and not applied: what a wrong generator does is seen in its state, and gradients stay on the exact
grid.

*Verifies* nothing by itself. *Does not exercise* a GPU's generators, nor DTensor's own tracker, which only draws there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import torch

from shardproof.observe.generators import KEEP, SEED_OF_A_BUILD, state_value
from shardproof.observe.record import Record, whole
from shardproof.program import Op
from shardproof.protocol.system import RankContext
from shardproof.reference.streams import coordinates, seed_of

T = TypeVar("T")


class Streams:
    """The generators of one rank, by stream; none where no module of the model draws."""

    def __init__(self, context: RankContext) -> None:
        self.context = context
        scenario, mesh, rank = context.scenario, context.mesh, context.rank
        drawing = dict.fromkeys(module.draws for module in context.model.modules if module.draws)
        found = {stream: coordinates(stream, mesh, scenario.expert_parallel) for stream in drawing}
        self.places = {stream: at[rank] for stream, at in found.items()}
        self.counts = {stream: len(set(at)) for stream, at in found.items()}
        self.generators: dict[str, Any] = {  # what seeds, gives and takes a state as a torch.Generator does
            stream: torch.default_generator if stream == "replicated" else torch.Generator() for stream in drawing
        }

    def seed(self, init_seed: int) -> None:
        """Seed every generator from the scenario's seed and the number of the build, as a training script does when it
        builds."""
        base = self.context.scenario.seed % 2**31 + SEED_OF_A_BUILD * init_seed
        for stream, generator in self.generators.items():
            generator.manual_seed(seed_of(stream, base, self.places[stream], self.context.mesh.tp))

    def draw(self, stream: str, numel: int) -> None:
        """One dropout of so many elements."""
        if stream == "replicated":
            torch.nn.functional.dropout(torch.ones(numel), 1 - KEEP)
        elif stream in self.generators:
            torch.empty(numel).bernoulli_(KEEP, generator=self.generators[stream])

    def state(self) -> dict[str, torch.Tensor]:
        """The generator states of this rank, by the names under which a checkpoint stores them."""
        return {self._name(stream): generator.get_state() for stream, generator in self.generators.items()}

    def own(self, saved: Mapping[str, T]) -> dict[str, T]:
        """Of what a checkpoint holds, by name, what a load gives this rank."""
        counts = {s: sum(name.rpartition(".")[0] == s for name in saved) for s in self.generators}
        return {self._name(s): saved[self._name(s)] for s, count in counts.items() if count == self.counts[s]}

    def restore(self, states: Mapping[str, Any]) -> None:
        """Set every generator whose state is in the checkpoint; a generator without a stored state keeps its seed."""
        for stream, generator in self.generators.items():
            if self._name(stream) in states:
                generator.set_state(states[self._name(stream)])

    def records(self, op: Op) -> Iterator[Record]:
        """`rng`: the state of each."""
        for stream, generator in self.generators.items():
            value = state_value(generator.get_state().numpy().tobytes())
            yield whole(op.index, self.context.rank, "rng", stream, value.dtype, value.shape, value.data)

    def _name(self, stream: str) -> str:
        return f"{stream}.{self.places[stream]}"
