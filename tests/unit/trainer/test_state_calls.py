"""Whose state a save asks for and a load gives, and which files a load does not open."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from shardproof.diff import Difference
from shardproof.observe.logical import Key
from shardproof.observe.record import LIVE
from shardproof.trainer.rank.state_calls import StateCalls
from shardproof.trainer.rank.walk import walk
from shardproof.trainer.values.state_calls import Calls, Owner, joined, no_longer_one, not_opened, whose_state
from torch import nn

from tests.unit.trainer.test_lines import ran_with

MODEL, ADAM, OTHER = (
    Owner("model", "Net", "module", 1), Owner("optimizer", "Adam", "optimizer", 2),
    Owner("loop.optimizer", "Adam", "optimizer", 3),
)  # fmt: skip
SCHEDULE = Owner("schedule", "StepLR", "scheduler", 4)
STALE = Owner("", "Adam", "optimizer", 5)


def wrong(role: str) -> list[Difference]:
    return [Difference(Key(3, LIVE, role, "w"), "bits", mismatched=1, total=1)]


STEPS = Calls(stepped=(ADAM,))
SAVE = Calls(asked=(MODEL, ADAM, SCHEDULE), there=(ADAM, SCHEDULE))


@pytest.mark.parametrize(
    ("steps", "save", "load", "role", "told"),
    [
        (
            STEPS,
            SAVE,
            Calls(given=(MODEL, ADAM)),
            "scheduler",
            "`schedule` (StepLR) for a `state_dict`, and `load` ",
        ),
        (STEPS, SAVE, Calls(given=(MODEL, STALE)), "exp_avg", "gives one to an Adam that is not found on the trainer"),
        (
            STEPS,
            Calls(asked=(MODEL,), there=(ADAM,)),
            Calls(given=(MODEL,)),
            "exp_avg",
            "`save` does not ask `optimizer`",
        ),
        (Calls(stepped=(OTHER,)), SAVE, Calls(given=(MODEL, ADAM)), "exp_avg", "what steps is `loop.optimizer` (Adam)"),
    ],
)
def test_what_does_not_fit_is_told(steps: Calls, save: Calls, load: Calls, role: str, told: str) -> None:
    assert told in whose_state(steps, save, load, wrong(role), at_load=True)


def test_what_fits_is_not_told() -> None:
    load = Calls(given=(MODEL, ADAM, SCHEDULE))
    assert whose_state(STEPS, SAVE, load, wrong("exp_avg"), at_load=True) == ""
    assert whose_state(STEPS, SAVE, Calls(given=(MODEL,)), wrong("exp_avg"), at_load=False) == ""
    assert whose_state(STEPS, SAVE, Calls(given=(MODEL,), cut=True), wrong("exp_avg"), at_load=True) == ""


def test_objects_that_are_no_longer_one_are_told() -> None:
    save = Calls(paths={"model": 1, "loss.model": 1, "optimizer": 2}, steps={"optimizer": (4, 4)})
    two, paths = no_longer_one(save, Calls(paths={"model": 1, "loss.model": 3}))
    assert two == "`model` and `loss.model` are one object when the run saves, and two after `load`"
    assert paths == ["model", "loss.model"]
    assert no_longer_one(save, Calls(paths={"model": 1}, steps={"optimizer": (4, 4)})) == ("", [])
    stale, paths = no_longer_one(save, Calls(steps={"optimizer": (0, 4)}))
    assert stale.startswith("after `load` the 4 parameters of `optimizer` are those of no module")
    assert paths == ["optimizer"]


def test_files_that_are_not_opened_are_named(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint0"
    folder.mkdir()
    for name in ("a.pt", "b.pt", "c.safetensors"):
        (folder / name).touch()
    opened = frozenset({"checkpoint0/a.pt"})
    assert not_opened(Calls(opened=opened), folder) == "Of the checkpoint's files `load` does not open b.pt."
    assert not_opened(Calls(), folder) == ""
    seen = Calls(paths={"model": 1})
    assert not_opened(seen, folder) == "", "safetensors is read by code that is not Python's"
    (folder / "c.safetensors").unlink()
    assert not_opened(seen, folder) == "`load` opens none of the checkpoint's files, which are a.pt, b.pt."
    assert not_opened(seen._replace(cut=True), folder) == ""


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)


def test_calls_and_files_are_recorded(tmp_path: Path) -> None:
    calls = StateCalls(tmp_path)
    model = Wrapped()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    held = {"model": model, "optimizer": optimizer}

    def saves() -> None:
        torch.save([model.state_dict(), torch.optim.Adam(model.parameters()).state_dict()], tmp_path / "a.pt")

    def loads() -> None:
        with calls.reading():
            model.load_state_dict(torch.load(tmp_path / "a.pt")[0])
        optimizer.step()

    records = []
    for operation in (saves, loads):
        ran_with(calls, operation)
        records.append(Calls.of(calls.record(0, 0, walk(held)).data))
    save, load = records
    assert [(one.path, one.class_name) for one in save.asked] == [("model", "Wrapped"), ("", "Adam")]
    assert [one.path for one in load.given] == ["model"]
    assert [one.path for one in load.stepped] == [one.path for one in save.there] == ["optimizer"]
    assert load.stepped[0].number == save.there[0].number > 0
    assert (save.opened, load.opened) == (frozenset(), frozenset({"a.pt"}))
    assert joined([{0: save}, {0: load}]).given == load.given
    assert json.loads(calls.record(1, 0, walk({})).data)["calls"] == {}
