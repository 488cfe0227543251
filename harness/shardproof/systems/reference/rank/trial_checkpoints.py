"""The stack that tests the reference's checkpoint files against crashes and damage: real sessions, saved and read by
`files`."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from shardproof.protocol.registry import contract_of
from shardproof.reference import files
from shardproof.reference.checkpoint import Content
from shardproof.reference.kernels import Hyper
from shardproof.reference.system import Ranks, run
from shardproof.scenario import Scenario

SCENARIO = Scenario.from_axes(
    {
        "system": "reference", "model": "twins", "dtype": "mixed/master=fp32", "mesh": "1x2x1", "sharding": "zero1",
        "checkpoint": "bucket_space", "program": "build step save step save step save",
    }
)  # fmt: skip


class Kept:
    """Checkpoints of a training run of the reference, one after each step."""

    def warm(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            for run in (1, 2):
                for generation, state in contents(run).items():
                    self.save(Path(folder) / str(run), state, generation, run)
            self.digests(self.load(Path(folder) / "1"))

    def state(self, generation: int, run: int) -> Content:
        return contents(run)[generation]

    def save(self, folder: Path, state: Content, generation: int, run: int) -> None:
        files.write(folder, state, generation, f"run {run}")

    def load(self, folder: Path) -> Content:
        return files.read(folder)[1]

    def digests(self, state: Content) -> Mapping[str, str]:
        return dict(_digests(state, ""))


@cache
def contents(seed: int) -> dict[int, Content]:
    """Generation → what the reference saves then, in the training run of a seed."""
    scenario = replace(SCENARIO, seed=seed)
    inputs, placement = contract_of(scenario).resolve(scenario)
    saved: list[Content] = []

    def listen(ranks: Ranks) -> None:
        save = ranks.saver.save

        def heard(form: str) -> Content:
            saved.append(save(form))
            return saved[-1]

        ranks.saver.save = heard  # type: ignore[method-assign]

    run(inputs, placement, install=listen, observe_ops=())
    return dict(enumerate(saved, 1))


def _digests(value: Any, place: str) -> Iterator[tuple[str, str]]:
    """`(place, digest)` of every leaf, with its type."""
    match value:
        case dict():
            for key, item in value.items():
                yield from _digests(item, f"{place}/{key}")
            yield place, _of("dict", ",".join(map(str, value)).encode())
        case tuple() | list():
            for index, item in enumerate(value):
                yield from _digests(item, f"{place}/{index}")
            yield place, _of(type(value).__name__, str(len(value)).encode())
        case np.ndarray() | np.generic():
            yield place, _of(f"{value.dtype} {value.shape}", value.tobytes())
        case Hyper():
            yield place, _of("hyper", repr(asdict(value)).encode())
        case other:
            yield place, _of(type(other).__name__, repr(other).encode())


def _of(kind: str, data: bytes) -> str:
    return hashlib.blake2b(kind.encode() + b"\n" + data, digest_size=12).hexdigest()
