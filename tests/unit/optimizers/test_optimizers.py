"""`shardproof optimizer`: what is asked, how two runs are compared, and what an answer is."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from shardproof.errors import UsageError
from shardproof.observe.record import LIVE, Record, pack
from shardproof.optimizers import compare
from shardproof.optimizers.answers import (
    Answer,
    AnsweredQuestion,
    exit_status,
    is_statement,
    of_deviations,
    of_failure,
    sentence,
)
from shardproof.optimizers.request import Asked, asked, require_mesh, value_of
from shardproof.result import Failure
from shardproof.scenario import Mesh
from shardproof.verdict import ExitStatus

# What is asked


def test_a_path_and_arguments_are_read() -> None:
    assert asked("torch.optim.SGD", ["momentum=0.9", "betas=(0.9, 0.5)"]) == Asked(
        "torch.optim.SGD", (("momentum", "0.9"), ("betas", "(0.9, 0.5)"))
    )
    assert asked("a.b.C").module == "a.b"
    assert asked("a.b.C").name == "C"


@pytest.mark.parametrize("path", ["AdamW", "torch.optim.", ".AdamW", "torch optim.AdamW", "torch:AdamW", "1a.B"])
def test_a_path_of_another_form_is_refused(path: str) -> None:
    with pytest.raises(UsageError, match="for example: shardproof optimizer torch"):
        asked(path)


@pytest.mark.parametrize("given", [["momentum"], ["=3"], ["momentum="], ["a b=3"], ["lr=1", "lr=2"]])
def test_an_argument_of_another_form_is_refused(given: list[str]) -> None:
    with pytest.raises(UsageError, match="--arg"):
        asked("torch.optim.SGD", given)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0.9", 0.9), ("(0.9, 0.95)", (0.9, 0.95)), ("true", True), ("False", False), ("none", None),
        ("None", None), ("abs", "abs"), ("torch.bfloat16", "torch.bfloat16"), ("'0.9'", "0.9"), ("[1,", "[1,"),
    ],
)  # fmt: skip
def test_values_are_literals_or_text(text: str, value: object) -> None:
    assert value_of(text) == value


def test_a_mesh_shards() -> None:
    assert require_mesh("2x2x1") == Mesh(2, 2, 1)


@pytest.mark.parametrize("text", ["1x1x1", "1x2x2", "2", "4x4x1", "0x2x1", "1x2x1x1"])
def test_a_mesh_that_does_not_shard_over_eight_ranks_at_most_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="dp_shard from 2 to 8"):
        require_mesh(text)


# Two runs side by side


def numbers(op: int, rank: int, role: str, name: str, values: list[float], start: int = 0, total: int = 0) -> Record:
    data = struct.pack(f"<{len(values)}f", *values)
    return Record(op, rank, LIVE, role, name, "fp32", (total or len(values),), (start,), (len(values),), data)


def scalar(op: int, rank: int, role: str, name: str, value: float) -> Record:
    return Record(op, rank, LIVE, role, name, "fp32", (), (), (), struct.pack("<f", value))


def run(folder: Path, name: str, *ranks: list[Record]) -> list[str]:
    """The observation files of a run."""
    paths = []
    for rank, records in enumerate(ranks):
        path = folder / f"{name}.rank{rank}"
        blob = pack(records)
        path.write_bytes(len(blob).to_bytes(8, "little") + blob)
        paths.append(str(path))
    return paths


def compared(left: list[str], right: list[str], order: dict[str, float] | None = None) -> dict[str, Any]:
    request = {"left": left, "right": right, "pairs": [[1, 1]], "roles": ["param", "state", "own", "setting"]}
    reply: dict[str, Any] = json.loads(compare.serve(json.dumps({**request, "order": order or {}}).encode()))
    return reply


def halves(op: int, role: str, name: str, values: list[float]) -> tuple[list[Record], list[Record]]:
    """A tensor on two ranks."""
    middle = len(values) // 2
    first, second = values[:middle], values[middle:]
    own = numbers(op, 0, role, name, first, 0, len(values)), numbers(op, 1, role, name, second, middle, len(values))
    return [own[0]], [own[1]]


START = numbers(0, 0, "param", "w", [0.0, 0.0, 0.0, 0.0])


def test_pieces_of_ranks_equal_the_whole(tmp_path: Path) -> None:
    whole = [START, numbers(1, 0, "param", "w", [1, 2, 3, 4]), scalar(1, 0, "own", "w|step", 1)]
    ranks = halves(1, "param", "w", [1, 2, 3, 4])
    for rank, records in enumerate(ranks):
        records.append(scalar(1, rank, "own", "w|step", 1))
    reply = compared(run(tmp_path, "whole", whole), run(tmp_path, "ranks", *ranks))
    assert reply["deviations"] == []
    assert reply["states"] == 1


@pytest.mark.parametrize(
    ("values", "order", "rounding"),
    [
        ([1, 2, 3, 4.0000005], {}, True),  # a unit in the last place
        ([1, 2, 3, 4.003], {}, True),  # less than a thousandth of the largest change
        ([1, 2, 3, 4.03], {}, False),
        ([1, 2, 3, 4.03], {"w": 0.005}, True),  # what another order of rows makes of it is a fourth of that, or more
        ([1, 2, 3, 4.03], {"w": 0.5}, False),  # an order that matters so much is no measure of rounding
    ],
)
def test_a_difference_is_measured_by_what_steps_changed(
    tmp_path: Path, values: list[float], order: dict[str, float], rounding: bool
) -> None:
    whole = [START, numbers(1, 0, "param", "w", [1, 2, 3, 4])]
    reply = compared(run(tmp_path, "whole", whole), run(tmp_path, "ranks", *halves(1, "param", "w", values)), order)
    (deviation,) = reply["deviations"]
    assert (deviation["count"], deviation["total"], deviation["index"]) == (1, 4, "[3]")
    assert deviation["rounding"] is rounding
    found = of_deviations("sharded", reply, "on the ranks")
    assert found is not None
    assert found.said == ("no (rounding)" if rounding else "no")
    assert (of_deviations("sharded", reply, "on the ranks", forgiving=True) is None) is rounding


def test_ranks_that_disagree_are_told(tmp_path: Path) -> None:
    whole = [START, scalar(1, 0, "setting", "group0.d", 0.5), numbers(1, 0, "param", "w", [1, 2])]
    ranks = halves(1, "param", "w", [1, 2])
    for rank, records in enumerate(ranks):
        records.append(scalar(1, rank, "setting", "group0.d", rank / 4))
    (deviation,) = compared(run(tmp_path, "whole", whole), run(tmp_path, "ranks", *ranks))["deviations"]
    assert sentence(deviation) == (
        "ranks disagree about group0.d: rank 0 has 0.0, rank 1 has 0.25; on whole tensors it is 0.5"
    )


def test_state_that_only_whole_tensors_have_is_named_unless_there_is_none_at_all(tmp_path: Path) -> None:
    whole = [START, numbers(1, 0, "param", "w", [1, 2]), numbers(1, 0, "own", "w|row", [1])]
    bare = run(tmp_path, "bare", *halves(1, "param", "w", [1, 2]))
    (deviation,) = compared(run(tmp_path, "whole", whole), bare)["deviations"]
    assert deviation["kind"] == "missing"
    ranks = halves(1, "param", "w", [1, 2])
    for rank, records in enumerate(ranks):
        records.append(numbers(1, rank, "own", "w|row", [1] * (rank + 1)))
    reply = compared(run(tmp_path, "whole", whole), run(tmp_path, "ranks", *ranks))
    assert reply["deviations"] == []
    assert reply["not_compared"] == ["w|row"]


def test_within_a_run_what_a_load_lost_is_missing(tmp_path: Path) -> None:
    records = [START, numbers(1, 0, "param", "w", [1]), scalar(1, 0, "own", "w|step", 2)]
    paths = run(tmp_path, "run", [*records, numbers(2, 0, "param", "w", [1])])
    request = {"left": paths, "right": paths, "pairs": [[1, 2]], "roles": ["param", "own"], "order": {}}
    (deviation,) = json.loads(compare.serve(json.dumps(request).encode()))["deviations"]
    assert (deviation["kind"], deviation["name"]) == ("missing", "w|step")


def test_a_piece_that_no_rank_holds_is_a_gap(tmp_path: Path) -> None:
    whole = [START, numbers(1, 0, "param", "w", [1, 2, 3, 4])]
    first, _ = halves(1, "param", "w", [1, 2, 3, 4])
    (deviation,) = compared(run(tmp_path, "whole", whole), run(tmp_path, "ranks", first, []))["deviations"]
    assert deviation["kind"] == "gap"


def test_a_run_cut_off_in_the_middle_compares_nothing(tmp_path: Path) -> None:
    whole = run(tmp_path, "whole", [START, numbers(1, 0, "param", "w", [1, 2])])
    (tmp_path / "dead").write_bytes(b"\x00\x01")
    assert compared(whole, [str(tmp_path / "dead")])["compared"] == 0


def test_nested_state_is_named_by_its_path() -> None:
    from shardproof.optimizers.rank.observe import leaves

    kept = {"a": 1, "inner": [2, {"b": 3}], (0, 1): {"m": 4}, 7: 5}
    assert dict(leaves(kept)) == {"a": 1, "inner.0": 2, "inner.1.b": 3, "#2.m": 4, "7": 5}


# What an answer is

OWN = '  File "/site/lion/lion.py", line 3, in step\n    {line}\n{type}: no\n'


def failure(message: str, line: str = "torch.boom()", type_: str = "RuntimeError", home: str = "/site/lion") -> Failure:
    above = '  File "/site/ours.py", line 1, in step\n    optimizer.step()\n'
    return Failure(type_, message, 0, above + OWN.format(line=line, type=type_).replace("/site/lion", home), 1)


@pytest.mark.parametrize(
    ("error", "states"),
    [
        (failure("Lion does not support sparse gradients"), True),
        (failure("", type_="NotImplementedError"), True),
        (failure("unsupported dtype"), True),
        (failure("size of tensor a must match tensor b"), False),
        (failure("DTensor does not support this", home="/site/torch"), False),  # torch says it, and not the optimizer
    ],
)
def test_a_refusal_is_the_optimizers_own_word(error: Failure, states: bool) -> None:
    assert is_statement(error, "/site/lion") is states
    found = of_failure("sharded", error, "on the ranks", "/site/lion")
    assert found.answer is (Answer.REFUSES if states else Answer.NO)
    assert found.failed


def test_what_a_constructor_raises_of_its_own_is_a_refusal() -> None:
    made = '  File "/site/ours.py", line 1, in optimizer_of\n    return cls(described, **options)\n'
    own = '  File "/site/lion/lion.py", line 3, in __init__\n    raise ValueError("lr")\n'
    assert is_statement(Failure("ValueError", "bad lr", 0, made + own, 0), "/site/lion")
    assert not is_statement(Failure("ValueError", "bad lr", 0, own, 1), "/site/lion")


@pytest.mark.parametrize(
    ("answers", "status"),
    [
        (["yes", "nothing to compare", "refuses"], ExitStatus.OK),
        (["yes", "no", "cannot be asked"], ExitStatus.FAILURE),
        (["no", "unknown"], ExitStatus.HARNESS),
        (["cannot be asked", "nothing to compare"], ExitStatus.NOTHING_RUN),
    ],
)
def test_exit_statuses(answers: list[str], status: ExitStatus) -> None:
    assert exit_status(AnsweredQuestion("sharded", Answer(answer)) for answer in answers) is status
