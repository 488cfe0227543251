"""Results and their JSON form: the contract's keys, without loss."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import NamedTuple

import pytest
import report_samples as samples
from shardproof.codec import from_plain, to_plain
from shardproof.result import Failure, Result, differences_from_json, differences_to_json, from_elements, with_elements
from shardproof.verdict import Verdict

CONTRACT = {
    "id", "scenario", "system", "version", "verdict", "failed_op", "differences", "explanations", "error", "emulated",
    "duration_s", "known_issue",
}  # fmt: skip
DIFFERENCE = {
    "name", "role", "kind", "ranks", "op_index", "mismatched", "total", "max_ulp", "expected_digest", "observed_digest",
}  # fmt: skip


@pytest.mark.parametrize("result", [*samples.every_kind(), samples.struck()], ids=lambda r: r.verdict.value)
def test_json_loses_nothing(result: Result) -> None:
    text = json.dumps(result.to_json(), allow_nan=False)
    assert Result.from_json(json.loads(text)) == result


def test_the_keys_of_the_contract() -> None:
    data = samples.mismatch().to_json()
    assert data.keys() >= CONTRACT
    assert all(item.keys() >= DIFFERENCE for item in data["differences"])
    assert data["failed_op"] == {"index": 8, "name": "load"}
    assert data["explanations"][0].keys() >= {"mechanism", "confidence", "evidence", "bug_ids"}
    assert samples.crash().to_json()["error"].keys() >= {"type", "message", "rank"}


def test_the_courses_of_ranks_are_stored_of_failures_alone() -> None:
    assert "courses" not in samples.passing().to_json()
    data = samples.struck().to_json()
    assert data["courses"][2]["marks"][0] == [-1, "start", 0.01]
    del data["courses"]  # as older releases stored it
    assert Result.from_json(data) == samples.crash()


def test_a_key_of_another_release_is_ignored() -> None:
    data = samples.mismatch().to_json()
    data["differences"][0]["invented_later"] = 1
    data["invented_later"] = 1
    assert Result.from_json(data) == samples.mismatch()


def test_differences_alone() -> None:
    differences = samples.mismatch().differences
    assert differences_from_json(json.loads(json.dumps(differences_to_json(differences)))) == differences


def test_evidence_is_of_the_first_failing_operation() -> None:
    result = samples.mismatch()
    later = replace(result.differences[0], key=result.differences[0].key._replace(op=9, role="master"))
    assert [item.text for item in result.evidence] == ["exp_avg dtype", "param bits", "written step missing"]
    assert replace(result, differences=(*result.differences, later)).evidence == result.evidence


def test_signatures_of_one_error_agree_across_sizes_ranks_addresses_and_paths() -> None:
    crash = samples.crash()
    other = replace(
        crash,
        error=Failure(
            "builtins.RuntimeError",
            f"size of tensor a (5) must match b (16) {samples.HOSTILE}\x00",
            2,
            op=crash.error.op,
        ),
    )
    assert crash.signature == other.signature
    assert crash.signature.startswith("torch-fsdp2 crash: save: RuntimeError: size of tensor a (N) must match b (N)")
    first = replace(crash, error=Failure("OSError", "cannot open /tmp/a1/checkpoint0 at 0x7f10"))
    second = replace(crash, error=Failure("OSError", "cannot open /tmp/b2/other at 0x7eff"))
    assert first.signature == second.signature


def test_a_peer_that_went_away_is_one_error_whatever_gloo_says_of_it() -> None:
    texts = (
        "[/x/gloo/pair.cc:553] Connection closed by peer [127.0.0.1]:43945. This is typically caused by a remote "
        "worker crashing. Check the logs of the remote worker before reporting an error.",
        "[/y/gloo/pair.cc:537] Read error [127.0.0.1]:30126: Connection reset by peer. This is typically caused by a "
        "remote worker hanging or bugs in the application. Check the logs of the remote worker before reporting an "
        "error.",
    )
    crash = samples.crash()
    assert len({replace(crash, error=Failure("RuntimeError", text)).signature for text in texts}) == 1


def test_only_failures_have_a_signature() -> None:
    assert samples.passing().signature == ""
    assert samples.unsupported().signature == ""
    assert "twin and reference disagree" in samples.unknown().signature
    assert replace(samples.passing(), verdict=Verdict.MISMATCH).signature.endswith("no evidence")


class Pair(NamedTuple):
    a: int
    b: str


@dataclass(frozen=True)
class Everything:
    pair: Pair
    data: bytes
    fixed: tuple[int, str]
    many: tuple[Pair, ...]
    table: dict[str, tuple[float, ...]]
    verdict: Verdict
    either: int | str
    maybe: Pair | None = None


@pytest.mark.parametrize("maybe", [None, Pair(3, "c")])
@pytest.mark.parametrize("either", [1, "1"])
def test_the_codec_covers_every_shape_a_result_may_have(maybe: Pair | None, either: int | str) -> None:
    value = Everything(
        Pair(1, "a"), b"\x00\xff", (1, "x"), (Pair(2, "b"),), {"t": (1.0, float("inf"))}, Verdict.HANG, either, maybe
    )
    text = json.dumps(to_plain(value), allow_nan=False)
    assert from_plain(Everything, json.loads(text)) == value


def test_the_codec_refuses_what_has_no_json_form() -> None:
    with pytest.raises(TypeError, match="object"):
        to_plain({"x": object()})


def test_elements_travel_beside_the_json_form() -> None:
    for elements in (b"", b"\x00bits"):
        result = replace(samples.mismatch(), elements=elements)
        assert "elements" not in result.to_json()
        travelled = from_elements(json.loads(json.dumps(with_elements(result))))
        assert (travelled, travelled.elements) == (result, elements)
