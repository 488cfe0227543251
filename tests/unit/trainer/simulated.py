"""A trainer that never runs: what its sessions would have observed, written in the form of ranks, for the judge.

Its state is one parameter, one moment, a count, a learning rate and a generator. A *fault* changes the state of a
session after one of its operations; what it changes stays changed, as in a trainer.
"""

from __future__ import annotations

import copy
import json
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from shardproof.observe.record import Record, pack, whole
from shardproof.program import Op
from shardproof.scenario import Scenario
from shardproof.trainer.arms import AGAIN, FIRST, Session, sessions_of
from shardproof.trainer.judge.cell import serve

State = dict[tuple[str, str], Any]
Fault = Callable[[Session, Op, State], None]
PARAM, MOMENT, COUNT, LR, RNG = (
    ("param", "w"),
    ("exp_avg", "w"),
    ("step", "w"),
    ("setting", "group0.lr"),
    ("rng", "cpu"),
)
DTYPES = {"param": "fp32", "extra_state": "fp32", "buffer": "fp32", "exp_avg": "fp32", "step": "fp32", "rng": "uint8"}


def nothing(session: Session, op: Op, state: State) -> None:
    """No fault."""


class Simulation:
    """The sessions of a scenario. draws: whether steps draw numbers. wins: whose learning rate a load leaves."""

    def __init__(self, scenario: Scenario, fault: Fault = nothing, *, draws: bool = True, wins: str = "run") -> None:
        self.scenario, self.fault, self.draws, self.wins = scenario, fault, draws, wins
        self.saved: dict[int, State] = {}
        self.notes: tuple[str, ...] = ()
        self.tie: Callable[[Op], str] | None = None
        self.gradients: Mapping[str, str] = {}

    def observed(self, session: Session) -> Iterator[tuple[Op, State]]:
        """What is seen after each operation of a session."""
        state: State = {}
        for op in session.ops:
            getattr(self, op.kind)(session, op, state)
            self.fault(session, op, state)
            if op.kind == "save":
                self.saved[op.checkpoint] = copy.deepcopy(state)
            yield op, {} if op.kind == "fit" else copy.deepcopy(state)

    def build(self, session: Session, op: Op, state: State) -> None:
        lr = "0.2" if session.kind == "altered" else "0.1"
        start = np.linspace(1, 2, 8, dtype=np.float32) + np.float32(op.init_seed)
        rng = np.arange(8, dtype=np.uint8) + np.uint8(op.init_seed)
        state |= {PARAM: start, LR: lr, RNG: rng}

    def step(self, session: Session, op: Op, state: State) -> None:
        state[PARAM] = state[PARAM] * np.float32(1.25) + np.float32(op.iteration + 1)
        state[MOMENT] = state.get(MOMENT, np.zeros(8, np.float32)) + state[PARAM] / np.float32(3)
        state[COUNT] = np.float32(state.get(COUNT, 0.0) + 1)
        state[RNG] = state[RNG] + np.uint8(self.draws)

    def save(self, session: Session, op: Op, state: State) -> None:
        """The checkpoint is taken once the fault of this operation has struck."""

    def load(self, session: Session, op: Op, state: State) -> None:
        lr = state[LR]
        state.clear()
        state |= copy.deepcopy(self.saved[op.checkpoint])
        if self.wins == "run" or session.kind != "altered":
            state[LR] = lr

    def fit(self, session: Session, op: Op, state: State) -> None:
        self.build(session, op, state)
        if op.taken >= 0:
            self.load(session, replace(op, checkpoint=op.taken), state)
        if op.checkpoint >= 0:
            done = copy.deepcopy(state)
            for other in session.ops[1:]:
                self.step(session, other, done)
            self.saved[op.checkpoint] = done

    def judged(
        self, folder: Path, failures: Mapping[str, Any] | None = None, *, written: bool = False
    ) -> dict[str, Any]:
        """What the judge says of all sessions. failures: session → what ended it. written: whether there are
        observations of such a session all the same."""
        files = []
        for number, session in enumerate(sessions_of(self.scenario)):
            seen = list(self.observed(session))
            paths = [folder / f"{number}-{rank}" for rank in range(session.ops[0].mesh.world)]
            for rank, path in enumerate(paths):
                told = written or session.name not in (failures or {})
                blobs = [self.blob(op, rank, state) for op, state in seen if told]
                path.write_bytes(b"".join(struct.pack("<Q", len(blob)) + blob for blob in blobs))
            files.append([str(path) for path in paths])
        self.write_checkpoints(folder)
        request = {"scenario": self.scenario.axis_values(only_changed=True),
                   "directory": str(folder), "observations": files, "failures": dict(failures or {})}  # fmt: skip
        found: dict[str, Any] = json.loads(serve(json.dumps(request).encode()))
        return found

    def blob(self, op: Op, rank: int, state: State) -> bytes:
        """What one rank writes after an operation."""
        records = [record(op.index, rank, key, value) for key, value in state.items()]
        notes = [whole(op.index, 0, "note", str(n), "utf8", (len(text),), text.encode())
                 for n, text in enumerate(self.notes) if not rank]  # fmt: skip
        if self.tie is not None:
            told = self.tie(op).encode()
            notes.append(whole(op.index, rank, "tied", "w = v", "utf8", (len(told),), told))
        if self.gradients and op.kind == "step":
            told = json.dumps(self.gradients).encode()
            notes.append(whole(op.index, rank, "gradients", "", "utf8", (len(told),), told))
        return pack([*records, *notes])

    def write_checkpoints(self, folder: Path) -> None:
        """The checkpoints as `torch.save` writes them."""
        for number in (FIRST, AGAIN):
            if number in self.saved:
                inside = folder / f"checkpoint{number}"
                inside.mkdir()
                kept = {" ".join(key): torch.from_numpy(np.atleast_1d(value).copy())
                        for key, value in self.saved[number].items() if not isinstance(value, str)}  # fmt: skip
                torch.save(kept, inside / "a.pt")


def record(op: int, rank: int, key: tuple[str, str], value: Any) -> Record:
    """A value as a rank records it, whole."""
    if isinstance(value, str):
        data = f"float {value}".encode()
        return whole(op, rank, *key, "utf8", (len(data),), data)
    array = np.asarray(value)
    return whole(op, rank, *key, DTYPES[key[0]], array.shape, array.tobytes())


def only(name: str, kind: str, key: tuple[str, str], change: Callable[[Any], Any], iteration: int = -1) -> Fault:
    """A fault that strikes after operations of one kind in one session, and changes one value; None removes it."""

    def fault(session: Session, op: Op, state: State) -> None:
        if session.name == name and op.kind == kind and iteration in (-1, op.iteration) and key in state:
            changed = change(state[key])
            state.pop(key) if changed is None else state.update({key: changed})

    return fault


def plus(value: Any) -> Any:
    """What is 1 more, in the same dtype."""
    return value + np.asarray(value).dtype.type(1)


def gone(_: Any) -> None:
    """What makes a value absent."""
