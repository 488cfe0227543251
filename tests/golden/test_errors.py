"""The messages a user gets for bad input, word for word. `EXPECTTEST_ACCEPT=1` rewrites them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import expecttest
import pytest

from harness.errors import UsageError
from harness.plan import Selection, make_plan, parse_shard
from harness.program import operations
from harness.scenario import Scenario, load_toml
from harness.space import load_space, parse_settings, parse_strength
from harness.systems.registry import system_info


def message(call: Callable[[], object]) -> str:
    with pytest.raises(UsageError) as caught:
        call()
    return str(caught.value)


class ErrorTexts(expecttest.TestCase):
    @pytest.fixture(autouse=True)
    def _in_an_empty_folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)

    def space_error(self, text: str) -> str:
        Path("mine.toml").write_text(text)
        return message(lambda: make_plan([load_space("mine.toml")]))

    def test_impossible_mesh(self) -> None:
        self.assertExpectedInline(message(lambda: Scenario().with_axes({"mesh": "0x2x1"})), """mesh: given '0x2x1'; allowed: sizes of 1 or more; for example: 2x2x1""")

    def test_unknown_axis(self) -> None:
        self.assertExpectedInline(message(lambda: Scenario().with_axes({"colour": "red"})), """axis: given 'colour'; allowed: system, version, model, dtype, mesh, load, sharding, reshard_after_forward, offload, optimizer, microbatches, grad_sync, checkpoint, program, faults, seed; for example: --set dtype=bf16""")

    def test_unknown_dtype_stage(self) -> None:
        self.assertExpectedInline(message(lambda: Scenario().with_axes({"dtype": "fp32/grad=bf16"})), """""")

    def test_optimizer(self) -> None:
        self.assertExpectedInline(message(lambda: Scenario().with_axes({"optimizer": "lion"})), """optimizer kind: given 'lion'; allowed: sgd, adam, adamw; for example: adamw""")

    def test_program(self) -> None:
        self.assertExpectedInline(message(lambda: operations("build load")), """program 'build load': operation 1 (load) comes before any save; correct form: 'build step step save step reshard build step build load step'""")

    def test_malformed_toml(self) -> None:
        self.assertExpectedInline(self.space_error("schema = 1\n[scenario\n"), """mine.toml: malformed TOML: Expected ']' at the end of a table declaration (at line 2, column 10); correct form: schema = 1, then [scenario]""")

    def test_another_schema(self) -> None:
        self.assertExpectedInline(message(lambda: load_toml("schema = 9", "mine.toml")), """mine.toml: schema: given 9; allowed: 1; for example: schema = 1""")

    def test_neither_space_nor_scenario(self) -> None:
        self.assertExpectedInline(self.space_error("schema = 1\n"), """\
mine.toml: given ['schema']; allowed: a table [space] or [scenario]; for example: [scenario]
model = "dense\"""")

    def test_unknown_key(self) -> None:
        text = 'schema = 1\n[space]\nstrenght = 2\n[axes]\n[system.torch-fsdp2]\n'
        self.assertExpectedInline(self.space_error(text), """""")

    def test_unknown_axis_of_a_space(self) -> None:
        text = 'schema = 1\n[space]\n[axes]\ndtypes = ["fp32"]\n[system.torch-fsdp2]\n'
        self.assertExpectedInline(self.space_error(text), """mine.toml: [space]: axis: given 'dtypes'; allowed: model, dtype, mesh, load, sharding, reshard_after_forward, offload, optimizer, microbatches, grad_sync, checkpoint, program, faults, seed; for example: dtype = ["fp32", "bf16"]""")

    def test_unknown_value_of_a_space(self) -> None:
        text = 'schema = 1\n[space]\n[axes]\nmodel = ["dense", "sparse"]\n[system.torch-fsdp2]\n'
        self.assertExpectedInline(self.space_error(text), """mine.toml: [space]: model: given 'sparse'; allowed: dense, twins, mixed_unit, short, many, tied, frozen_tower, swiglu, experts, groups, unused, later; for example: dense""")

    def test_repeated_value(self) -> None:
        text = 'schema = 1\n[space]\n[axes]\nmesh = ["world<=2", "1x2x1"]\n[system.torch-fsdp2]\n'
        self.assertExpectedInline(self.space_error(text), """mine.toml: [space]: values of mesh: given '1x2x1'; allowed: each value once; for example: mesh without the second 1x2x1""")

    def test_a_space_without_systems(self) -> None:
        self.assertExpectedInline(self.space_error('schema = 1\n[space]\n[axes]\nmodel = ["dense"]\n'), """mine.toml: systems: given 'none'; allowed: a table [system.NAME] for each; for example: [system.torch-fsdp2]""")

    def test_an_excluded_scenario(self) -> None:
        text = 'schema = 1\n[scenario]\nsystem = "torch-fsdp2"\nmesh = "1x8x1"\nload = "grow"\n'
        self.assertExpectedInline(self.space_error(text), """scenario: given 'system=torch-fsdp2 mesh=1x8x1 load=grow'; allowed: what constraint 'load-mesh' leaves; for example: the load relation has no answer for this mesh within world 8""")

    def test_a_scenario_that_no_system_supports(self) -> None:
        text = 'schema = 1\n[scenario]\nsystem = "torch-fsdp2"\nmodel = "mixed_unit"\ndtype = "mixed"\n'
        self.assertExpectedInline(self.space_error(text), """scenarios: given 'system=torch-fsdp2 model=mixed_unit dtype=mixed'; allowed: what a system supports; torch-fsdp2: FSDP2 takes one storage dtype for the trainable parameters of a group; for example: shardproof plan smoke""")

    def test_missing_file(self) -> None:
        self.assertExpectedInline(message(lambda: load_space("absent.toml")).partition("; allowed")[0], """scenario file (No such file or directory): given 'absent.toml'""")

    def test_unknown_name(self) -> None:
        self.assertExpectedInline(message(lambda: load_space("smokey")).partition("; allowed")[0], """scenario name: given 'smokey'""")

    def test_settings(self) -> None:
        self.assertExpectedInline(message(lambda: parse_settings(["dtype"])), """""")
        self.assertExpectedInline(message(lambda: parse_settings(["system=reference"])), """""")

    def test_strength(self) -> None:
        self.assertExpectedInline(message(lambda: parse_strength("most")), """--strength: given 'most'; allowed: all, 1, 2, 3, 4; for example: 2""")

    def test_shard(self) -> None:
        self.assertExpectedInline(message(lambda: parse_shard("3/2")), """--shard: given '3/2'; allowed: I/N with I from 1 to N; for example: --shard 2/4""")

    def test_unknown_system(self) -> None:
        self.assertExpectedInline(message(lambda: system_info("fsdp3")).partition("; allowed")[0], """system: given 'fsdp3'""")

    def test_nothing_left_of_a_space(self) -> None:
        Path("mine.toml").write_text('schema = 1\n[space]\n[axes]\nmodel = ["unused"]\n[system.torch-fsdp2]\n')
        selection = Selection(axes={"mesh": ("1x1x2",)})
        self.assertExpectedInline(message(lambda: make_plan([load_space("mine.toml")], selection)), """scenarios: given 'these axis values'; allowed: what a system supports; tensor parallelism has nothing to shard: no parameter of the model has a tp dim; for example: shardproof plan smoke""")
