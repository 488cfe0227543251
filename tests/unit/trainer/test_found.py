"""What is found by walking from a trainer's attributes, under which name, and what is said of the rest."""

from __future__ import annotations

import random
import weakref
from collections.abc import Iterator
from itertools import pairwise
from threading import Lock
from types import SimpleNamespace
from typing import Any

import found_cases as cases
import numpy as np
import pytest
import torch
from shardproof.errors import UsageError
from shardproof.layout import Box
from shardproof.observe.assemble import assemble
from shardproof.trainer.base import Trainer
from shardproof.trainer.rank import Rank, pairs_of, patterns_of
from shardproof.trainer.rank.found import Item, State
from shardproof.trainer.rank.modules import Modules
from shardproof.trainer.rank.optimizers import Optimizer
from shardproof.trainer.rank.pieces import Cut, Held, whole_tensor
from shardproof.trainer.rank.walk import walk
from shardproof.trainer.values.notes import OF_BEFORE
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, TensorDataset


def values(**roots: Any) -> dict[str, Any]:
    """`role name` → value of what a look finds, without the random states that are always there."""
    logical, problems = assemble(State(roots, 0, 1).records(1))
    assert not problems
    ambient = {("rng", f"rank0.{name}") for name in ("python", "numpy", "torch", "cuda")}
    return {f"{k.role} {k.fqn}": shown(v) for k, v in logical.items() if (k.role, k.fqn) not in ambient}


def shown(value: Any) -> Any:
    return value.data.decode() if value.dtype == "utf8" else value


def hidden(**roots: Any) -> list[Item]:
    return State(roots, 0, 1).hidden


def names_of(items: list[Item]) -> list[str]:
    return [item.name for item in items]


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.detach().numpy().tobytes()


def bare(*sizes: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in pairwise(sizes)))


def stepped(optimizer: Any, module: nn.Module) -> Any:
    for parameter in module.parameters():
        parameter.grad = torch.full_like(parameter, 0.5)
    optimizer.step()
    return optimizer


class Counting:
    """A loader that counts."""

    def __init__(self) -> None:
        self.at = 3

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "bytes": b"ab", "inner": [torch.ones(2), {}], 7: None}

    def __iter__(self) -> Iterator[int]:
        while True:
            self.at += 1
            yield self.at


def test_the_values_are_the_tensors_bit_for_bit() -> None:
    model = cases.model()
    optimizer = torch.optim.AdamW(model.parameters())
    cases.trained(model, optimizer)
    found = values(model=model, optimizer=optimizer)
    for name, parameter in model.named_parameters():
        state = optimizer.state[parameter]
        assert found[f"param {name}"] == ("fp32", tuple(parameter.shape), raw(parameter))
        for role in ("exp_avg", "exp_avg_sq"):
            assert found[f"{role} {name}"] == ("fp32", tuple(parameter.shape), raw(state[role]))
        assert found[f"step {name}"] == ("fp32", (), raw(torch.tensor(2.0)))
    assert found["buffer first.seen"] == ("fp32", (3,), raw(torch.arange(3.0)))


def test_one_model_has_its_own_names_and_several_have_their_paths() -> None:
    inner = bare(2, 1)
    one = values(model=nn.Sequential(inner), again=inner, loss=nn.MSELoss())
    assert list(one) == ["param 0.0.weight"]
    assert list(values(parts=[inner, bare(2, 3)])) == ["param parts.0.0.weight", "param parts.1.0.weight"]


def test_a_model_that_holds_the_other_is_the_topmost() -> None:
    state = State({"inner": (inner := bare(2, 1)), "outer": SimpleNamespace(model=nn.ModuleDict({"a": inner}))}, 0, 1)
    assert state.found == [Item("outer.model", "module", "ModuleDict, 1 parameter, 0 buffers")]


def test_two_names_of_one_number_are_both_state() -> None:
    best = 0.25 + 1
    met = {each.path for each in walk({"best": best, "latest": best, "name": "a", "other": "a"}).met}
    assert met == {"best", "latest", "name", "other"}


def test_extra_state_of_a_module() -> None:
    class Own(nn.Linear):
        def get_extra_state(self) -> Any:
            return {"seen": 4}

    found = values(model=nn.Sequential(Own(1, 1, bias=False)))
    assert found["extra_state 0._extra_state.seen"] == "int 4"


def test_state_of_optimizers_that_are_wrapped_or_contained() -> None:
    model = bare(2, 2, 2)
    one, other = (stepped(torch.optim.SGD(part.parameters(), lr=0.5, momentum=0.5), part) for part in model)
    state = State({"model": model, "optim": SimpleNamespace(optimizer=one), "all": {"b": [other]}}, 0, 1)
    assert names_of(state.found) == ["model", "optim.optimizer", "all.b.0"]
    found = values(model=model, optim=SimpleNamespace(optimizer=one), all={"b": [other]})
    assert {"momentum 0.weight", "momentum 1.weight", "setting optim.optimizer.group0.lr"} <= found.keys()


def test_a_wrapper_that_passes_on_is_one_with_what_it_wraps() -> None:
    class Passing:
        def __init__(self, optimizer: Any) -> None:
            self.optimizer = optimizer

        param_groups = property(lambda self: self.optimizer.param_groups)
        state = property(lambda self: self.optimizer.state)

    model = bare(2, 2)
    state = State({"o": Passing(torch.optim.SGD(model.parameters())), "model": model}, 0, 1)
    assert state.found[1:] == [Item("o.optimizer", "optimizer", "SGD, 1 group")]
    assert not state.hidden


def test_settings_have_types_values_and_the_names_of_the_parameters() -> None:
    model = bare(2, 2, 2)
    groups = [{"params": model[0].parameters(), "lr": torch.tensor(0.5)}, {"params": model[1].parameters(), "x": None}]
    found = values(model=model, optimizer=torch.optim.AdamW(groups, lr=0.25))
    assert found["setting group0.lr"] == "tensor float32 () [0.5]"
    assert found["setting group1.lr"] == "float 0.25"
    assert found["setting group1.betas"] == "(float 0.9, float 0.999)"
    assert found["setting group1.params"] == "1.weight"
    assert found["setting group1.x"] == "NoneType"


def test_a_count_of_steps_keeps_its_type() -> None:
    model = bare(2, 2)
    optimizer = stepped(torch.optim.AdamW(model.parameters()), model)
    state = optimizer.state[model[0].weight]
    state["step"] = 1
    assert values(model=model, optimizer=optimizer)["step 0.weight"] == "int 1"
    state["step"] = 1.0
    assert values(model=model, optimizer=optimizer)["step 0.weight"] == "float 1.0"


@pytest.mark.parametrize("kind", [torch.optim.Muon, torch.optim.Adagrad, torch.optim.NAdam, torch.optim.Rprop])
def test_state_of_every_optimizer_of_torch_is_found(kind: Any) -> None:
    model = bare(3, 2)
    optimizer = stepped(kind(model.parameters(), lr=0.125), model)
    found = values(model=model, optimizer=optimizer)
    roles = {"exp_avg": "exp_avg 0.weight", "exp_avg_sq": "exp_avg_sq 0.weight", "step": "step 0.weight",
             "momentum_buffer": "momentum 0.weight"}  # fmt: skip
    for name, value in optimizer.state[model[0].weight].items():
        assert found[roles.get(name, f"state 0.weight.{name}")].data == raw(value)


def test_nested_state_and_state_by_name() -> None:
    model = bare(2, 2)
    factors = SimpleNamespace(left=torch.ones(2), rank=3)
    state = {model[0].weight: {"factors": [factors], "rows": torch.ones(2)}, "0.weight": {"slow": torch.ones(2, 2)}}
    groups = [{"params": list(model.parameters()), "lr": 1.0}]
    found = values(model=model, optimizer=SimpleNamespace(param_groups=groups, state=state))
    assert found["state 0.weight.factors.0.left"].shape == (2,)
    assert found["state 0.weight.factors.0.rank"] == "int 3"
    assert found["state 0.weight.rows"].shape == (2,)
    assert found["state 0.weight.slow"].shape == (2, 2)


def test_parameters_that_are_in_no_module() -> None:
    weight = torch.ones(2, requires_grad=True)
    optimizer = torch.optim.SGD([weight, torch.zeros(1, requires_grad=True)], momentum=0.5)
    weight.grad = torch.ones(2)
    optimizer.step()
    found = values(optimizer=optimizer, weight=weight)
    assert found["setting group0.params"] == "weight\noptimizer.group0.1"
    assert found["param rank0.weight"].data == raw(weight)
    assert {"param rank0.optimizer.group0.1", "momentum rank0.weight"} <= found.keys()
    assert not any(name.startswith("extra_state") for name in found)


def test_state_by_unknown_keys_is_said() -> None:
    model = bare(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.state[object()] = {"momentum_buffer": torch.ones(2)}  # type: ignore[index]
    optimizer.state[torch.ones(1)] = {}
    assert [(item.name, item.kind) for item in hidden(model=model, optimizer=optimizer)] == [
        ("optimizer.state", "optimizer")
    ]


def test_schedulers_scalers_and_generators() -> None:
    model = bare(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [torch.optim.lr_scheduler.ConstantLR(optimizer), torch.optim.lr_scheduler.LambdaLR(optimizer, float)],
        milestones=[2],
    )
    roots = {
        "sched": scheduler, "scaler": torch.amp.GradScaler("cpu"), "model": model, "optimizer": optimizer,
        "torch": torch.Generator(), "rngs": [np.random.default_rng(1), np.random.RandomState(1), random.Random(1)],
    }  # fmt: skip
    found = values(**roots)
    assert found["scheduler sched.last_epoch"] == "int 0"
    assert found["scheduler sched._schedulers.0.factor"].startswith("float 0.33")
    assert found["scaler scaler.scale"] == "float 65536.0"
    assert {"rng rank0.rngs.0", "rng rank0.rngs.1", "rng rank0.rngs.2"} <= found.keys()
    kinds = [item.kind for item in State(roots, 0, 1).found]
    assert kinds == ["module", "optimizer", "scheduler", "scaler", "generator", "generator", "generator", "generator"]
    assert not hidden(**roots)
    roots["rngs"][0].random()
    assert {name for name, value in values(**roots).items() if value != found[name]} == {"rng rank0.rngs.0"}


def test_a_loader_tells_its_position_for_itself() -> None:
    loader = Counting()
    batches = iter(loader)
    next(batches)
    found = values(data=loader, batches=batches)
    assert found["extra_state rank0.data.at"] == "int 4"
    assert found["extra_state rank0.data.bytes"].data == b"ab"
    assert found["extra_state rank0.data.inner.0"].shape == (2,)
    assert found["extra_state rank0.data.inner.1"] == "dict {}"
    assert found["extra_state rank0.data.7"] == "NoneType"
    assert not hidden(data=loader, batches=batches)


class Waiting(SimpleNamespace):
    """A loader that begins an epoch when it is asked where it is."""

    def state_dict(self) -> dict[str, Any]:
        if self._iterator is None:
            self._iterator = iter(range(int(torch.randint(9, ()))))
        return {"at": 0}


def test_a_loader_that_has_not_begun_is_not_made_to_begin() -> None:
    loader = Waiting(_iterator=None, next_iter_state={"at": 5})
    before = torch.get_rng_state()
    assert values(loader=loader) == {"extra_state rank0.loader.at": "int 5"}
    assert loader._iterator is None
    assert torch.equal(before, torch.get_rng_state())


def test_what_a_state_dict_changes_is_put_back_and_said() -> None:
    class Drawing:
        calls = 0

        def state_dict(self) -> dict[str, Any]:
            self.calls += 1
            return {"x": random.random(), "y": np.random.rand(), "z": float(torch.rand(()))}

    before = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())  # type: ignore[index,union-attr]
    target = Drawing()
    (item,) = hidden(thing=target)
    assert "draws random numbers and sets calls, which was put back" in item.detail
    assert vars(target) == {}
    assert before == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())  # type: ignore[index,union-attr]


def test_a_state_dict_that_raises_is_said() -> None:
    class Broken:
        def state_dict(self) -> dict[str, Any]:
            raise RuntimeError("not now")

    (item,) = hidden(callback=Broken())
    assert item == Item("callback", "stateful", "asked for its state, it raises RuntimeError: not now; give what it "
                        "keeps in `state()`")  # fmt: skip


def test_what_an_outer_object_tells_is_told_once() -> None:
    class Progress(SimpleNamespace):
        def state_dict(self) -> dict[str, Any]:
            return {n: v.state_dict() if isinstance(v, Progress) else v for n, v in vars(self).items()}

    progress = Progress(done=3, scheduler=Progress(done=4))
    state = State({"progress": progress}, 0, 1)
    assert (state.found, state.hidden) == ([Item("progress", "stateful", "Progress")], [])
    assert len([record for record in state.records(0) if record.role == "extra_state"]) == 2


def test_a_wrapper_that_knows_no_names_is_one_with_what_it_wraps() -> None:
    class Knowing:
        def __init__(self, optimizer: Any) -> None:
            self._optimizer = optimizer

        def step(self) -> None: ...

        def zero_grad(self) -> None: ...
        def state_dict(self) -> None:
            raise AssertionError("called")

        def __getattr__(self, name: str) -> Any:
            return getattr(vars(self)["_optimizer"], name)

        optimizer = property(lambda self: self._optimizer)

    model = bare(2, 2)
    state = State({"o": Knowing(torch.optim.SGD(model.parameters())), "model": model}, 0, 1)
    assert (names_of(state.found), state.hidden) == (["model", "o._optimizer"], [])


def test_a_proxy_is_not_what_it_stands_for() -> None:
    model = bare(2, 2)
    assert State({"model": model, "proxy": weakref.proxy(model)}, 0, 1).hidden == []
    assert list(values(model=model, proxy=weakref.proxy(model))) == ["param 0.weight"]


def test_the_state_dict_of_what_holds_a_model_is_not_called() -> None:
    class Holder:
        def __init__(self) -> None:
            self.model, self.seen_tokens = bare(2, 2), 7

        def state_dict(self) -> dict[str, Any]:
            raise AssertionError("called")

    assert values(app=(app := Holder()))["extra_state app.seen_tokens"] == "int 7"
    assert not hidden(app=app)


def test_loose_tensors_arrays_and_numbers() -> None:
    model = bare(2, 2)
    found = values(
        model=model, ema={"module.0.weight": torch.ones(2, 2)}, last=torch.ones(3, dtype=torch.complex64),
        table=np.arange(3, dtype=np.int16), updates=4, small=torch.ones(2).to(torch.float8_e5m2),
    )  # fmt: skip
    assert found["extra_state ema.0.weight"].shape == (2, 2)
    assert (found["extra_state rank0.last"].dtype, found["extra_state rank0.last"].shape) == ("fp32", (3, 2))
    assert (found["extra_state rank0.table"].dtype, found["extra_state rank0.table"].shape) == ("int16", (3,))
    assert found["extra_state rank0.small"].dtype == "fp8e5m2"
    assert found["extra_state updates"] == "int 4"


def test_a_tensor_that_a_step_makes_anew_is_told_and_not_recorded() -> None:
    roots = {"last_loss": torch.ones(()), "batch": {"x": torch.ones(2)}, "lossless": torch.ones(1)}
    assert list(values(**roots)) == ["extra_state rank0.lossless"]
    told = State(roots, 0, 1).found[0]
    assert told.name == "last_loss"
    assert (
        "not recorded: its name is that of what a step makes anew; to have it compared, give it in `state()`"
        in told.detail
    )


def test_what_a_state_of_ones_own_names_is_recorded_as_all_ranks_whatever_its_name() -> None:
    held = torch.ones(2)
    roots = {
        "other": [held], "loss": torch.ones(()), "absent": None,
        "metrics": {"z_loss": 0.5, "seen": 0, "none": 0, "deep": [True, b"rng"]},
        "table": np.arange(3), "gain": np.float32(2), "curve": held,
    }  # fmt: skip
    logical, _ = assemble(State(roots, 0, 1, ["metrics.deep.*", "table"], named=roots.keys() - {"other"}).records(1))
    assert {key.fqn for key in logical if key.role == "extra_state"} == {
        "loss", "metrics.z_loss", "metrics.seen", "metrics.none", "rank0.metrics.deep.0", "rank0.metrics.deep.1",
        "rank0.table", "gain", "curve",
    }  # fmt: skip


@pytest.mark.parametrize(("rank", "start", "elements"), [(0, 0, [0.0, 1, 2, 3]), (1, 4, [4.0, 5])])
def test_a_parameter_that_zero3_has_taken_apart_is_its_partition(
    monkeypatch: pytest.MonkeyPatch, rank: int, start: int, elements: list[float]
) -> None:
    module = nn.Linear(3, 2, bias=False)
    weight: Any = module.weight
    weight.data = torch.empty(0)
    weight.ds_shape, weight.ds_process_group = torch.Size((2, 3)), None
    weight.ds_tensor = torch.arange(8.0)[4 * rank : 4 * rank + 4]  # the last two elements are padding
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group: rank)
    (record,) = (one for one in State({"model": module}, rank, 2).records(1) if one.role == "param")
    assert (record.fqn, record.shape, record.start, record.size) == ("weight", (2, 3), (start,), (len(elements),))
    assert np.frombuffer(record.data, np.float32).tolist() == elements


def test_what_a_trainers_own_state_names_is_told_from_its_attributes() -> None:
    class Mine(Trainer):
        def state(self) -> dict[str, Any]:
            return super().state() | {"other": self.held, "seen": 3, "history": self.history}

    rank: Any = object.__new__(Rank)
    rank.trainer = Mine()
    rank.trainer.held, rank.trainer.history = [torch.ones(1)], [2, 4]
    assert (rank._asked().keys(), rank.named) == (
        {"held", "history", "other", "seen"}, {"history", "other", "seen"}
    )  # fmt: skip
    assert "extra_state history.1" in named_values(rank)
    assert "_attributes" not in rank._asked()
    Mine.state = lambda self: {"held": self.held}  # type: ignore[method-assign]
    assert (rank._asked().keys(), rank.named) == ({"held"}, {"held"})


class Gives(Trainer):
    """Gives its batch under the attribute's own name, in one of the ways to write it."""

    way: int = 0

    def state(self) -> dict[str, Any]:
        found = super().state()
        if self.way == 0:
            found["batch"] = self.batch
        return [found, found | {"batch": self.batch}, {**found, "batch": self.batch}, dict(found, batch=self.batch)][
            self.way
        ]


class Inherits(Gives):
    """Has the `state` of another trainer."""


class Holds(Trainer):
    """Has the attribute alone."""


@pytest.mark.parametrize("way", [0, 1, 2, 3])
@pytest.mark.parametrize("kind", [Gives, Inherits])
def test_a_batch_that_state_gives_under_its_own_name_is_named(kind: type[Trainer], way: int) -> None:
    rank = Rank.__new__(Rank)
    rank.trainer = kind()
    rank.trainer.__dict__ |= {"way": way, "batch": torch.ones(2), "table": torch.ones(2)}
    rank._asked()
    assert rank.named == {"batch"}
    assert "extra_state batch" in named_values(rank)


def test_a_batch_that_hangs_on_a_trainer_alone_is_not_named() -> None:
    rank = Rank.__new__(Rank)
    rank.trainer = Holds()
    rank.trainer.__dict__ |= {"batch": torch.ones(2)}
    rank._asked()
    assert (rank.named, named_values(rank)) == (set(), [])


def named_values(rank: Rank) -> list[str]:
    found = State(rank._asked(), 0, 1, named=rank.named).records(1)
    return [f"{record.role} {record.fqn}" for record in found if record.role == "extra_state"]


@pytest.mark.parametrize("wrong", [("a", "b"), ["a"], [("a",)], "ab", [("a", 1)]])
def test_names_of_one_parameter_in_another_form_are_bad_input(wrong: Any) -> None:
    with pytest.raises(UsageError, match="two names of one parameter or more"):
        list(pairs_of(wrong))
    assert list(pairs_of([("a", "b", "c"), ["d", "e"]])) == [("a", "b"), ("a", "c"), ("d", "e")]


def test_two_names_are_one_parameter_where_they_share_its_memory() -> None:
    module = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2), "c": nn.Linear(2, 2), "d": nn.Linear(2, 2)})
    module["b"].weight = module["a"].weight
    module["c"].weight.data = module["a"].weight.data
    module["d"].load_state_dict(module["a"].state_dict())
    state = State({"model": module}, 0, 1)
    tied = {other: state.tie("a.weight", f"{other}.weight") for other in ("b", "c", "d", "e")}
    assert tied == {"b": "one", "c": "one", "d": "two", "e": "not here"}


def test_the_tensors_of_a_container_are_one_line() -> None:
    many = {"a.weight": torch.ones(2), "b.bias": torch.ones(1)}
    state = State({"one": [torch.ones(2)], "many": many, "t": torch.ones(1)}, 0, 1)
    assert state.found == [
        Item("t", "tensor", "Tensor of [1]"), Item("one.0", "tensor", "Tensor of [2]"),
        Item("many", "tensor", "2 tensors, a.weight to b.bias"),
    ]  # fmt: skip


def test_an_optimizer_of_the_parameters_from_before_the_model_was_sharded_is_told() -> None:
    """Sharding has put rows of the weight in its place; the optimizer still has the whole one."""
    before, other = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(3))
    rows = nn.Parameter(torch.ones(1, 2))
    shard = Held(rows, (Cut(("w",), (2, 2), Box((0, 0), (1, 2)), Box((0, 0), (1, 2))),))
    sharded = Modules(parameters={id(rows): shard}, params=[shard])
    assert Optimizer("o", torch.optim.SGD([before])).misses(sharded) == OF_BEFORE
    assert Optimizer("o", torch.optim.SGD([rows])).misses(sharded) == ""
    assert Optimizer("o", torch.optim.SGD([other])).misses(sharded) == "", "a parameter of the trainer's own"
    whole = whole_tensor(before, ("w",))
    assert Optimizer("o", torch.optim.SGD([nn.Parameter(torch.ones(2, 2))])).misses(Modules(params=[whole])) == "", (
        "copies of whole parameters, as of fp32 masters"
    )


def test_what_an_optimizer_keeps_besides_its_state() -> None:
    class Averaging(torch.optim.SGD):
        pass

    model = bare(2, 2)
    optimizer = Averaging(model.parameters())
    optimizer.average = {"0.weight": torch.ones(2, 2)}  # type: ignore[attr-defined]
    optimizer.copies = list(model.parameters())  # type: ignore[attr-defined]
    found = values(model=model, optimizer=optimizer)
    assert [name for name in found if name.startswith("extra")] == ["extra_state optimizer.average.0.weight"]


def test_a_container_of_optimizers_speaks_through_them() -> None:
    class Container(torch.optim.Optimizer):
        def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
            self.optimizers = optimizers
            super().__init__([p for one in optimizers for group in one.param_groups for p in group["params"]], {})

        def state_dict(self) -> dict[str, Any]:
            raise AssertionError("called")

    model = bare(2, 2, 2)
    parts = [stepped(torch.optim.AdamW(part.parameters()), part) for part in model]
    state = State({"model": model, "optimizers": Container(parts)}, 0, 1)
    assert names_of(state.found) == ["model", "optimizers.optimizers.0", "optimizers.optimizers.1"]
    assert not state.hidden
    assert "exp_avg 1.weight" in values(model=model, optimizers=Container(parts))


def test_an_optimizer_by_parameter_and_one_parameter_in_two() -> None:
    model = bare(2, 2)
    (weight,) = model.parameters()
    one, other = (stepped(torch.optim.SGD([weight], lr=0.5, momentum=0.5), model) for _ in range(2))
    found = values(model=model, by={weight: one}, second=other)
    assert {"momentum 0.weight", "momentum by.0.0.weight", "setting second.group0.lr"} <= found.keys()


class Pair(torch.Tensor):
    """A subclass that keeps a tensor as whole numbers and a scale for each row, and has no operators at all."""

    codes: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor) -> Pair:
        made: Pair = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)  # type: ignore[attr-defined]
        made.codes, made.scale = codes, scale
        return made

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(str(func))


def test_a_subclass_that_wraps_tensors_is_read_through_them() -> None:
    model = bare(3, 2)
    codes, scale = torch.tensor([[1, 2, 3], [-1, -2, -3]], dtype=torch.int8), torch.ones(2)
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.state[model[0].weight] = {"exp_avg": Pair(codes, scale)}
    found = values(model=model, optimizer=optimizer)
    assert found["exp_avg 0.weight.codes"] == ("int8", (2, 3), raw(codes))
    assert found["exp_avg 0.weight.scale"] == ("fp32", (2,), raw(scale))


def test_what_has_a_position_and_does_not_show_it_is_said() -> None:
    with open("/dev/null") as file:
        items = hidden(it=iter([1]), squares=(i * i for i in range(3)), file=file, raw=memoryview(b""), c=object())
    assert names_of(items) == ["it", "squares", "file", "c"]
    assert all("`state()`" in item.detail for item in items)


def test_what_looks_like_state_and_shows_none_is_said() -> None:
    class EMAHelper:
        def __init__(self) -> None:
            self.decay = 0.5

    items = hidden(a=EMAHelper(), lr_scheduler=SimpleNamespace(factor=0.5), ema={"w": 0.5})
    assert names_of(items) == ["a", "lr_scheduler", "ema"]


def test_what_is_no_state_is_not_said() -> None:
    data = TensorDataset(torch.ones(4, 2))
    passive = {
        "loss": nn.MSELoss(), "loader": DataLoader(data, batch_size=2), "dataset": data, "device": torch.device("cpu"),
        "sampler_config": SimpleNamespace(a=1), "optimizer_kwargs": {"lr": 1.0}, "function": print, "kind": int,
        "shuffled": DataLoader(data, sampler=RandomSampler(data)), "schedulers": [], "mesh": None, "names": {"a"},
        "scheduler_type": "cosine", "tokenizer": SimpleNamespace(vocab={"a": 1}), "lock": Lock(),
    }  # fmt: skip
    state = State(passive, 0, 1)
    assert (state.found, state.hidden) == ([Item("scheduler_type", "value", "str")], [])


def test_the_generator_and_the_epoch_of_a_sampler_are_state() -> None:
    data = TensorDataset(torch.ones(4, 2))
    sampler: DistributedSampler[Any] = DistributedSampler(data, 1, 0)
    sampler.set_epoch(3)
    found = values(a=DataLoader(data, sampler=sampler), b=DataLoader(data, shuffle=True, generator=torch.Generator()))
    assert found["extra_state a.sampler.epoch"] == "int 3"
    assert "rng rank0.b.generator" in found


def test_a_meta_tensor_and_a_lazy_parameter_cannot_be_read() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False, device="meta"), nn.LazyLinear(2, bias=False))
    assert names_of(hidden(model=model)) == ["0.weight", "1.weight"]


def test_a_circle_and_a_deep_nesting_end() -> None:
    circle: dict[str, Any] = {}
    circle["again"] = circle
    deep: Any = torch.ones(1)
    for _ in range(30):
        deep = [deep]
    assert [item.name for item in hidden(circle=circle, deep=deep)] == ["deep" + ".0" * 12]


def test_looking_changes_nothing() -> None:
    def run(*, look: bool) -> tuple[Any, ...]:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(), nn.BatchNorm1d(3))
        optimizer = torch.optim.AdamW(model.parameters())
        roots = {"model": model, "optimizer": optimizer, "scaler": torch.amp.GradScaler("cpu"), "data": Counting()}
        for _ in range(3):
            versions = [tensor._version for tensor in (*model.parameters(), *model.buffers())]
            kept = [dict(state) for state in optimizer.state.values()]
            if look:
                list(State(roots, 0, 1).records(0))
            assert versions == [tensor._version for tensor in (*model.parameters(), *model.buffers())]
            assert [list(state) for state in kept] == [list(state) for state in optimizer.state.values()]
            model(torch.ones(4, 3)).sum().backward()
            optimizer.step()
        return *map(raw, model.parameters()), *map(raw, model.buffers()), torch.get_rng_state().tolist()

    assert run(look=True) == run(look=False)


def test_a_model_on_the_cpu_is_told_where_the_cell_asks_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A result that says `cuda` of a run on the CPU would be a claim that nobody has checked."""
    monkeypatch.setattr("shardproof.trainer.rank.found._cuda_is_in_use", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: torch.zeros(16, dtype=torch.uint8))
    (item,) = hidden(model=bare(3, 2))
    assert item.name == "device"
    assert "no parameter lies on a GPU" in item.detail
    assert hidden(value=3) == []


@pytest.mark.parametrize(("rank", "broadcasts", "kept"), [(0, True, True), (1, True, False), (1, False, True)])
def test_buffers_that_the_first_ranks_take_the_place_of_are_its_own(
    monkeypatch: pytest.MonkeyPatch, rank: int, *, broadcasts: bool, kept: bool
) -> None:
    wrapped = DistributedDataParallel.__new__(DistributedDataParallel)
    torch.nn.Module.__init__(wrapped)
    wrapped.module = torch.nn.BatchNorm1d(2)
    wrapped.broadcast_buffers, wrapped.modules_buffers = broadcasts, list(wrapped.module.buffers())
    wrapped.process_group = None
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group: rank)
    modules = Modules()
    modules.add(wrapped, "")
    assert ("running_mean" in modules.buffers) == kept
    assert [held.names[0] for held in modules.params]


@pytest.mark.parametrize("own", ["*", 3, [3], {"a": 1}, torch.nn.Linear(1, 1)])
def test_an_attribute_that_is_called_local_and_has_no_patterns_is_the_trainers_own(own: object) -> None:
    assert patterns_of(own, ("w",)) == ("w",)
    assert patterns_of(["*.experts.*"], ("w",)) == ["*.experts.*"]
