"""What ranks have apart: parameters and settings of each rank's own, modules of other names, memory that is gone."""

from __future__ import annotations

import torch
from shardproof.observe.assemble import assemble
from shardproof.trainer.rank.found import State
from torch import nn


def test_parameters_that_every_rank_has_of_its_own_are_recorded_as_such() -> None:
    model = nn.ModuleDict({"experts": nn.Linear(2, 2), "head": nn.Linear(2, 1)})
    optimizer = torch.optim.AdamW(model.parameters())
    sum(parameter.sum() for parameter in model.parameters()).backward()
    optimizer.step()
    records = [
        [*State({"model": model, "optimizer": optimizer}, rank, 2, ["experts.*", "group*.params"]).records(1)]
        for rank in (0, 1)
    ]
    logical, problems = assemble(record for each in records for record in each)
    names = {key.fqn for key in logical if key.role in ("param", "exp_avg")}
    own = {f"rank{rank}.experts.{name}" for rank in (0, 1) for name in ("weight", "bias")}
    assert names == own | {"head.weight", "head.bias"}
    settings = {key.fqn for key in logical if key.role == "setting"}
    assert {"rank0.group0.params", "rank1.group0.params", "group0.lr"} <= settings
    assert not problems


def test_a_tensor_whose_memory_was_given_back_is_not_read() -> None:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    parameter.untyped_storage().resize_(0)
    (item,) = State({"optimizer": optimizer}, 0, 1).hidden
    assert "its memory has been given back" in item.detail


def test_ranks_with_other_modules_keep_the_names_of_theirs() -> None:
    model = nn.Linear(2, 2)
    for alike, name in ((True, "weight"), (False, "embedding.weight")):
        state = State({"embedding": model}, 0, 2, (), lambda kind, paths, told=alike: told)
        assert name in {record.fqn for record in state.records(1)}
