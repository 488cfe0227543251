"""What a trainer's modules refer to beyond themselves, such as the framework's object that trains them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from shardproof.observe.assemble import assemble
from shardproof.trainer.rank.found import State
from torch import nn


def values(**roots: Any) -> dict[str, Any]:
    """`role name` → value of what a look finds."""
    logical, problems = assemble(State(roots, 0, 1).records(1))
    assert not problems
    return {f"{key.role} {key.fqn}": value for key, value in logical.items()}


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(2, 2, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return model, optimizer


class Counting:
    """A callback that counts."""

    def __init__(self) -> None:
        self.at = 3

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}


class Owner:
    """What a framework makes of everything, and gives each module a reference to."""

    def __init__(self, module: Any, optimizer: Any) -> None:
        self.callbacks = [Counting(), {"generator": torch.Generator()}]
        self.strategy = SimpleNamespace(wrapped=module, optimizers=[optimizer])
        module.__dict__["_trainer"] = self


def test_of_the_owner_of_a_module_what_is_state_anywhere_is_looked_at_alone() -> None:
    model, optimizer = trained()
    owner = Owner(model, optimizer)
    state = State({"module": model}, 0, 1)
    assert [item.name for item in state.found] == ["module", "module._trainer.strategy.optimizers.0", "module._trainer"]
    told = state.found[-1]
    assert told.kind == "owner"
    assert "left out: module._trainer.callbacks.0, module._trainer.callbacks.1.generator; give" in told.detail
    found = values(module=model)
    assert "momentum 0.weight" in found
    assert not any("callbacks" in name for name in found)
    given = values(module=model, callbacks=owner.callbacks)
    assert any("callbacks.0.at" in name for name in given)
    assert "rng rank0.callbacks.1.generator" in given


def test_an_owner_in_a_list_is_one_and_one_that_the_trainer_has_is_none() -> None:
    model, optimizer = trained()
    owner = Owner(model, optimizer)
    del model.__dict__["_trainer"]
    model.__dict__["parts"] = [owner]
    assert not any("callbacks" in name for name in values(module=model))
    assert any("owner.callbacks.0" in name for name in values(module=model, owner=owner))
    assert "owner" not in {item.kind for item in State({"module": model, "owner": owner}, 0, 1).found}


def test_an_object_of_a_module_that_does_not_refer_back_is_no_owner() -> None:
    model, _ = trained()
    model.__dict__["helper"] = SimpleNamespace(counting=Counting(), generator=torch.Generator())
    found = values(module=model)
    assert "extra_state module.helper.counting.at" in found
    assert "rng rank0.module.helper.generator" in found


def test_the_wrapper_around_a_module_is_seen_beyond_its_owner() -> None:
    model, _ = trained()
    wrapper = nn.ModuleDict({"module": model})
    model.__dict__["_trainer"] = SimpleNamespace(strategy=SimpleNamespace(wrapped=wrapper))
    assert [item.name for item in State({"module": model}, 0, 1).found] == ["module._trainer.strategy.wrapped"]
