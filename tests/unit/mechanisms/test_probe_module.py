"""The probe's forward and backward on one process, without any library under test."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from shardproof.grid import choose_grid
from shardproof.mechanisms.probe_module import Probe, ProbeRoot, Slot, build_model, tensor_bytes
from shardproof.models import ZOO, ModelSpec, model_spec
from shardproof.probe import element_keys, initial_values, rank_units
from shardproof.protocol.registry import contract_of
from shardproof.protocol.system import RankContext
from shardproof.scenario import Scenario

from tests.whole_parameters import whole_box


def built(model: str, dtype: str = "fp32", mesh: str = "1x1x1", rank: int = 0) -> tuple[Probe, ProbeRoot]:
    scenario = Scenario().with_axes({"model": model, "dtype": dtype, "mesh": mesh})
    spec = model_spec(model)
    context = RankContext(scenario, spec, scenario.mesh, rank, Path(), contract_of(scenario))
    probe = Probe(context, whole_box(spec))
    return probe, build_model(probe, init_seed=1)


def backward(root: ProbeRoot) -> None:
    root(torch.ones(1, requires_grad=True)).sum().backward()


def grid_gradient(probe: Probe, fqn: str) -> torch.Tensor:
    spec = probe.spec.param(fqn).spec
    shape, alone = spec.shape, "lone" if spec.idle == "others" else ""
    grid = choose_grid(("fp32",) * 3, "fp32", probe.mesh.dp, 1, alone)
    units = rank_units(element_keys(fqn, shape, 0), probe.slot.iteration, probe.slot.microbatch, probe.mesh.dp, grid)
    return torch.tensor(units[probe.rank] * grid.unit).reshape(shape).float()


@pytest.mark.parametrize("spec", ZOO.values(), ids=ZOO)
def test_every_model_can_be_built_and_gets_exactly_the_grid(spec: ModelSpec) -> None:
    probe, root = built(spec.name, mesh="1x2x1", rank=1)
    probe.slot = Slot(iteration=3)
    backward(root)
    assert {name for name, _ in root.named_parameters()} == {p.fqn for p in spec.unique_params}
    for named in spec.unique_params:
        parameter, uses = root.get_parameter(named.fqn), spec.uses(named.fqn)
        keys = element_keys(named.fqn, named.spec.shape, 0)
        assert tensor_bytes(parameter) == initial_values(keys, 1).tobytes()
        if named.spec.trainable == "yes" and uses and named.spec.takes_part(3, 0):
            assert parameter.grad is not None
            assert torch.equal(parameter.grad, torch.stack([grid_gradient(probe, use) for use in uses]).sum(0))
        else:
            assert parameter.grad is None
    used = [p for p in spec.unique_params if p.spec.takes_part(3, 0)]
    assert set(probe.seen) == {use for p in used for use in spec.uses(p.fqn)}


def test_a_parameter_that_one_rank_alone_uses_has_no_gradient_on_another() -> None:
    for rank in (0, 1):
        probe, root = built("lone", mesh="1x2x1", rank=rank)
        backward(root)
        lone = {name for name, parameter in root.named_parameters() if parameter.grad is None}
        assert lone == (set() if rank == 0 else {"block.gate", "branch.weight"})
        assert set(probe.seen) == {name for name, _ in root.named_parameters()} - lone


def test_of_a_norms_gradient_every_tensor_parallel_rank_has_a_part() -> None:
    gradients = []
    for rank in (0, 1):
        probe, root = built("norms", mesh="1x1x2", rank=rank)
        gradients.append(probe.gradient("final.norm", root.get_parameter("final.norm"), trainable=True))
    probe, root = built("norms", mesh="1x1x1")
    whole = probe.gradient("final.norm", root.get_parameter("final.norm"), trainable=True)
    assert torch.equal(gradients[0] + gradients[1], whole)
    assert not torch.equal(gradients[0], whole)


def test_uneven_ranks_share_the_first_microbatch_alone() -> None:
    scenario = Scenario().with_axes({"mesh": "1x3x1", "grad_sync": "uneven", "microbatches": "3", "sharding": "zero1"})
    having = [
        [
            microbatch
            for microbatch in range(3)
            if Probe(
                RankContext(scenario, model_spec("dense"), scenario.mesh, rank, Path(), contract_of(scenario)),
                whole_box(model_spec("dense")),
            ).has(4, microbatch)
        ]
        for rank in range(3)
    ]
    assert having == [[0, 2], [0], [0, 1]]


def test_tied_parameters_are_one_object() -> None:
    _, root = built("tied")
    assert root.get_parameter("head.weight") is root.get_parameter("embed.weight")


def test_a_forward_that_sees_other_bytes_leaves_both_on_record() -> None:
    probe, root = built("dense")
    backward(root)
    with torch.no_grad():
        root.get_parameter("up.weight").add_(1)
    probe.slot = Slot(microbatch=1)
    backward(root)
    assert {fqn: len(kept) for fqn, kept in probe.seen.items() if len(kept) > 1} == {"up.weight": 2}
    probe.start_step()
    assert probe.seen == {}


@pytest.mark.parametrize(("rank", "infinite"), [(0, 1), (1, 0)])
def test_an_overflow_is_one_element_on_one_rank(rank: int, infinite: int) -> None:
    probe, root = built("frozen_tower", mesh="1x2x1", rank=rank)
    probe.slot = Slot(overflow=True)
    backward(root)
    gradients = [p.grad for p in root.parameters() if p.grad is not None]
    assert sum(int(g.isinf().sum()) for g in gradients) == infinite
    assert bool(gradients[0].reshape(-1)[0].isinf()) == bool(infinite)


def test_integer_buffers_count_steps_not_microbatches() -> None:
    probe, root = built("frozen_tower")
    for microbatch in range(3):
        probe.slot = Slot(microbatch=microbatch)
        backward(root)
    assert root.get_buffer("tower.vision.batches").item() == 1


def test_reading_bytes_leaves_the_storage_resizable() -> None:
    """FSDP2 frees unsharded parameters by resizing their storage."""
    _, root = built("dense")
    parameter = root.get_parameter("up.weight")
    expected = np.array(parameter.detach().tolist(), np.float32).tobytes()
    assert tensor_bytes(parameter) == expected
    parameter.untyped_storage().resize_(0)
