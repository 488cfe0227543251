"""An optimizer's own state dict calls parameters by number: the judge sees their names.

*Verifies*: `shardproof.readers.numbered`, on a file of torch.save as training scripts write it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from shardproof.models import model_spec
from shardproof.readers.checkpoint import read_checkpoint
from shardproof.readers.errors import CheckpointError, UnfamiliarError
from shardproof.readers.numbered import named

GROUPS = [("fc2.weight", "fc1.weight"), ("norm.weight",)]
"""Two param groups, in an order that is not the model's."""


def saved(folder: Path, section: str = "optimizer") -> Path:
    parameters = [torch.nn.Parameter(torch.full((2,), float(index))) for index in range(3)]
    optimizer = torch.optim.AdamW([{"params": parameters[:2]}, {"params": parameters[2:], "lr": 0.5}])
    sum(parameter.sum() * (index + 1) for index, parameter in enumerate(parameters)).backward()
    optimizer.step()
    torch.save({"model": {"fc1.weight": parameters[1].data}, section: optimizer.state_dict()}, folder / "full.pt")
    return folder


def test_a_number_is_the_place_in_the_param_groups(tmp_path: Path) -> None:
    records = read_checkpoint(saved(tmp_path), 3, model_spec("dense"))
    found = {(r.role, r.fqn): r for r in named(records, GROUPS, by_parameter=False, origin="here")}
    moments = [found["exp_avg", name].data for group in GROUPS for name in group]
    assert moments == [torch.full((2,), 0.1 * (index + 1)).numpy().tobytes() for index in range(3)]
    assert found["hyperparameter", "group0.params"].data == b"fc2.weight\nfc1.weight"
    assert found["hyperparameter", "group1.params"].data == b"norm.weight"
    assert ("hyperparameter", "group1.lr") in found


def test_settings_of_a_group_may_be_those_of_its_parameters(tmp_path: Path) -> None:
    records = read_checkpoint(saved(tmp_path, "optim"), 3, model_spec("dense"))
    found = {r.fqn for r in named(records, GROUPS, by_parameter=True, origin="here") if r.role == "hyperparameter"}
    assert {"fc2.weight.lr", "fc1.weight.lr", "norm.weight.lr"} <= found
    assert not [fqn for fqn in found if fqn.startswith("group")]


def test_a_number_that_nobody_has_is_refused(tmp_path: Path) -> None:
    records = read_checkpoint(saved(tmp_path), 3, model_spec("dense"))
    with pytest.raises(UnfamiliarError, match=r"here: number in the optimizer's section: given '2'; allowed: 0 to 1"):
        named(records, GROUPS[:1], by_parameter=False, origin="here")


def test_groups_without_a_parameter_say_nothing_of_numbers(tmp_path: Path) -> None:
    torch.save({"optim": {"state": {}, "param_groups": [{"params": [], "lr": 0.5}]}}, tmp_path / "full.pt")
    records = read_checkpoint(tmp_path, 3, model_spec("dense"))
    assert named(records, [()], by_parameter=True, origin="here") == records


def test_names_stay_as_they_are(tmp_path: Path) -> None:
    torch.save({"optim": {"state": {"a.weight": {"exp_avg": torch.ones(2)}}}}, tmp_path / "full.pt")
    records = read_checkpoint(tmp_path, 3, model_spec("dense"))
    assert named(records, GROUPS, by_parameter=False, origin="here") == records


@pytest.mark.parametrize(
    "content",
    [
        {"weight": torch.ones(2)},
        {"state_dict": {"weight": torch.ones(2)}},
        [{"weight": torch.ones(2)}],
        {"app": torch.ones(2)},
    ],
)
def test_tensors_of_which_nothing_would_be_read_are_a_form_that_is_unknown(tmp_path: Path, content: object) -> None:
    torch.save(content, tmp_path / "full.pt")
    with pytest.raises(UnfamiliarError, match=r"section: given '(weight|state_dict|0|app)'; allowed: model, optim"):
        read_checkpoint(tmp_path, 3, model_spec("dense"))


def test_items_without_their_metadata_are_an_unfinished_save_and_no_other_form(tmp_path: Path) -> None:
    (tmp_path / "__0_0.distcp").touch()
    with pytest.raises(CheckpointError, match=r"file \.metadata") as unfinished:
        read_checkpoint(tmp_path, 3, model_spec("dense"))
    assert not isinstance(unfinished.value, UnfamiliarError)
    (tmp_path / "last.pt").touch()
    with pytest.raises(UnfamiliarError, match=r"file \.metadata"):
        read_checkpoint(tmp_path, 3, model_spec("dense"))
