"""What is told of a trainer's file without running it, and what every wrong file is told.

*Verifies*: the description of sound files, and each message's three parts. *Does not verify*: that a file can be
imported; the ranks do that.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from shardproof.errors import UsageError
from shardproof.protocol import registry
from shardproof.protocol.registry import system_named
from shardproof.protocol.releases import package
from shardproof.trainer.described import Described, described, is_trainer, text_of
from shardproof.trainer.system import register
from shardproof.world.interpreter import interpreter
from shardproof.world.resolved import named
from trainer_texts import FIT, STEPWISE, text_of_trainer

Read = Callable[..., Described]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    def reading(text: str, wanted: str = "") -> Described:
        file = tmp_path / "mine.py"
        file.write_text(text, "utf-8")
        return described(f"{file}{wanted}")

    return reading


def refusal(read: Read, text: str, wanted: str = "") -> str:
    with pytest.raises(UsageError) as error:
        read(text, wanted)
    return str(error.value)


# Sound files


def test_a_file_is_read_without_running_it(read: Read) -> None:
    found = read("import absent_stack\nraise SystemExit\n" + text_of_trainer("axes = {'a': [1, 2]}"))
    assert (found.name, found.doc, found.axes, found.fits) == ("Mine", "One of tests.", {"a": ("1", "2")}, False)
    assert (found.requires, found.steps, found.altered, found.transient) == ((), (2, 2), {}, ())
    assert (found.system, found.plugin) == ("mine:Mine", f"{found.file}:Mine")


def test_all_of_a_trainers_data(read: Read) -> None:
    data = """axes = {"mesh": ["2", "2x2"], "lr": [0.1, 1e-05], "on": [False, True, None]}
requires = ["einops==0.8.1", "psutil"]
steps: tuple[int, int] = (1, 3)
altered = {"lr": "run", "on": "checkpoint"}
transient = ("grad *",)
local = ["*.experts.*"]
emulates = "cuda"
"""
    found = read(text_of_trainer(data))
    axes = {"mesh": ("2", "2x2"), "lr": ("0.1", "1e-05"), "on": ("false", "true", "none")}
    assert found.axes == axes
    assert (found.requires, found.steps) == (("einops==0.8.1", "psutil"), (1, 3))
    assert (found.altered, found.transient) == ({"lr": "run", "on": "checkpoint"}, ("grad *",))
    assert (found.local, found.emulates) == (("*.experts.*",), "cuda")


def test_an_axis_that_ends_in_dots_takes_other_values(read: Read) -> None:
    found = read(text_of_trainer("axes = {'kind': ['adamw', ...], 'mesh': ['2', ...], 'on': [False, True]}"))
    assert found.axes == {"kind": ("adamw",), "mesh": ("2",), "on": ("false", "true")}
    assert found.open == {"kind", "mesh"}
    taken = [("kind", "torch.optim.SGD(lr=1,momentum=0.9)"), ("mesh", "2x4"), ("on", "true")]
    assert all(found.takes(*pair) for pair in taken)
    assert not any(found.takes(*pair) for pair in [("kind", "a b"), ("kind", "a+b"), ("mesh", "2x"), ("on", "maybe")])


def test_a_trainer_without_steps_after_the_save_needs_none(read: Read) -> None:
    methods = "    def build(self, cell): ...\n    def step(self, index): ...\n"
    found = read(text_of_trainer("steps = (4, 0)", methods))
    assert (found.steps, found.saves) == ((4, 0), False)
    assert read(text_of_trainer("steps = (4, 0)")).saves


def test_ways_that_are_alike(read: Read) -> None:
    data = "axes = {'way': [1, 2], 'fast': [False, True]}\nalike = {'way': 'rounding', 'fast': 'bits'}"
    assert read(text_of_trainer(data)).alike == {"way": "rounding", "fast": "bits"}


def test_a_trainer_with_fit_needs_no_other_method(read: Read) -> None:
    assert read(text_of_trainer(methods=FIT)).fits


def test_names_at_the_top_stand_for_their_literals(read: Read) -> None:
    top = 'KINDS = ["adamw", "sgd"]\nSIZE: int = 4\n'
    found = read(top + text_of_trainer('axes = {"kind": KINDS, "size": [2, SIZE]}'))
    assert found.axes == {"kind": ("adamw", "sgd"), "size": ("2", "4")}


def test_a_base_class_in_the_file_gives_methods_and_data_and_is_no_choice(read: Read) -> None:
    base = text_of_trainer("steps = (1, 1)\ntransient = ('a *',)", name="Base")
    found = read(base + text_of_trainer("steps = (3, 3)", "", base="Base"))
    assert (found.name, found.steps, found.transient) == ("Mine", (3, 3), ("a *",))


def test_a_base_class_elsewhere_may_have_the_methods(read: Read) -> None:
    assert read(text_of_trainer(methods="    pass", base="other.Base"), ":Mine").name == "Mine"
    assert read(text_of_trainer(methods="    pass", base="Trainer, Mixin")).name == "Mine"


def test_a_trainer_is_derived_by_its_modules_name_too(read: Read) -> None:
    assert read(text_of_trainer(base="shardproof.trainer.Trainer")).name == "Mine"


def test_one_of_several_is_named_behind_a_colon(read: Read) -> None:
    assert read(text_of_trainer() + text_of_trainer(name="Other"), ":Other").name == "Other"


def test_a_changed_file_is_read_again(read: Read, tmp_path: Path) -> None:
    assert read(text_of_trainer("steps = (1, 1)")).steps == (1, 1)
    file = tmp_path / "mine.py"
    file.write_text(text_of_trainer("steps = (3, 1)"), "utf-8")
    changed = file.stat().st_mtime_ns + 1_000_000_000
    os.utime(file, ns=(changed, changed))
    assert described(str(file)).steps == (3, 1)


@pytest.mark.parametrize(
    ("value", "text"),
    [(True, "true"), (False, "false"), (None, "none"), (0.001, "0.001"), (1e-9, "1e-09"), (3, "3"), ("2x2", "2x2")],
)
def test_the_text_of_a_value(value: object, text: str) -> None:
    assert text_of(value) == text


@pytest.mark.parametrize(
    ("text", "is_one"),
    [("a.py", True), ("b/a.py:Mine", True), ("a.py:", True), ("a.b", False), ("a.pyc", False), ("a.py:b c", False)],
)
def test_a_file_is_told_from_a_module(text: str, *, is_one: bool) -> None:
    assert is_trainer(text) is is_one


# Wrong files


@pytest.mark.parametrize("name", ["absent.py", "folder.py", "mine.txt", "absent.py:Mine"])
def test_no_file(name: str, tmp_path: Path) -> None:
    (tmp_path / "folder.py").mkdir()
    (tmp_path / "mine.txt").write_text(text_of_trainer(), "utf-8")
    with pytest.raises(UsageError, match=r"FILE: given .*allowed: a Python file that is there.*shardproof trainer"):
        described(str(tmp_path / name))


@pytest.mark.parametrize("text", ["class Mine(:", "a = '\0'"])
def test_no_python(read: Read, text: str) -> None:
    assert "given 'mine.py'; allowed: Python that can be read (" in refusal(read, text)


@pytest.mark.parametrize("text", ["", "a = 1\n", "class Mine:\n    pass\n"])
def test_no_trainer(read: Read, text: str) -> None:
    told = refusal(read, text)
    assert "allowed: a file with one class that derives from shardproof.trainer.Trainer" in told
    assert "; for example: class Mine(Trainer): ...\ninstead: `shardproof trainer --command " in told


def test_two_trainers(read: Read) -> None:
    told = refusal(read, text_of_trainer() + text_of_trainer(name="Other"))
    assert "or the name of one of its 2 behind a colon: Mine, Other" in told
    assert told.endswith("my_trainer.py:Mine")


def test_a_class_that_is_not_there(read: Read) -> None:
    assert "class of mine.py: given 'Absent'; allowed: Mine;" in refusal(read, text_of_trainer(), ":Absent")
    assert "allowed: none: it has no class" in refusal(read, "a = 1", ":Absent")


@pytest.mark.parametrize(
    ("without", "told"),
    [
        ("build", "(there is no build): given 'load, save, step'"), ("step", "for example: def step(self, index): ..."),
        ("save", "for example: def save(self, folder): ..."), ("load", "there is no load"),
    ],
)  # fmt: skip
def test_a_method_that_is_missing(read: Read, without: str, told: str) -> None:
    methods = "".join(f"{line}\n" for line in STEPWISE.splitlines() if f"def {without}(" not in line)
    found = refusal(read, text_of_trainer(methods=methods))
    assert told in found
    assert "allowed: build, step, save and load; or fit alone" in found


def test_no_method_at_all(read: Read) -> None:
    told = refusal(read, text_of_trainer(methods="    pass"))
    assert "(there is no build, no step, no save, no load): given 'none of them'" in told


@pytest.mark.parametrize(
    ("data", "given", "allowed"),
    [
        ("axes = ['mesh']", "axes of mine.py: given ['mesh']", "a mapping of names to lists of values"),
        ("axes = {1: [1]}", "axes of mine.py: given 1", "names that a cell has not already"),
        ("axes = {'a b': [1]}", "given 'a b'", "names that a cell has not already"),
        *((f"axes = {{'{name}': [1]}}", f"given '{name}'", "names that a cell has not already")
          for name in ("rank", "world", "seed", "device", "folder", "sizes", "values")),
        ("axes = {'a': 'text'}", "axes['a'] of mine.py: given 'text'", "a list of one value or more, the plainest"),
        ("axes = {'a': []}", "given []", "a list of one value or more"),
        ("axes = {'a': ['b c']}", "given ['b c']", "without blanks and none of + , ="),
        ("axes = {'a': ['b=c']}", "given ['b=c']", "without blanks and none of + , ="),
        ("axes = {'a': ['b+c']}", "given ['b+c']", "without blanks and none of + , ="),
        ("axes = {'a': ['']}", "given ['']", "different texts"),
        ("axes = {'a': [[1, 2]]}", "given [[1, 2]]", "without blanks and none of + , ="),
        ("axes = {'a': [1, '1']}", "given [1, '1']", "different texts"),
        ("axes = {'a': [True, 'true']}", "given [True, 'true']", "different texts"),
        ("axes = {'mesh': ['2x']}", "axes['mesh'] of mine.py: given '2x'", "sizes with an x between them"),
        ("axes = {'mesh': ['0']}", "given '0'", "sizes with an x between them"),
        ("axes = {'mesh': ['64x32']}", "given '64x32'", "of 1024 ranks at most"),
        ("requires = 'einops'", "requires of mine.py: given 'einops'", "a list of packages as pip names them"),
        ("requires = ['a b']", "given 'a b'", "packages as pip names them, such as"),
        ("requires = [3]", "given 3", "packages as pip names them, such as"),
        ("requires = ['a==1', 'b @ https://a.b/c.whl']", "given 'b @", "packages of an index, and no addresses"),
        ("requires = ['einops']", "given 'einops'", "the package under test first, with its release behind =="),
        ("requires = ['einops>=1']", "given 'einops>=1'", "with its release behind =="),
        ("requires = ['einops==1.*']", "given 'einops==1.*'", "with its release behind =="),
        ("requires = ['einops==1,!=2']", "given 'einops==1,!=2'", "with its release behind =="),
        ("steps = 3", "steps of mine.py: given 3", "two numbers up to 100"),
        ("steps = (0, 1)", "given (0, 1)", "two numbers up to 100"),
        ("steps = (1, 101)", "given (1, 101)", "two numbers up to 100"),
        ("steps = (1, 1, 1)", "given (1, 1, 1)", "two numbers up to 100"),
        ("steps = ('1', 1)", "given ('1', 1)", "two numbers up to 100"),
        ("altered = ['lr']", "altered of mine.py: given ['lr']", "of axes to `run`, `checkpoint` or `refuse`"),
        ("altered = {'lr': 'run'}", "given {'lr': 'run'}", "axes of two values or more"),
        ("axes = {'lr': [1]}\naltered = {'lr': 'run'}", "given {'lr': 'run'}", "axes of two values or more"),
        ("axes = {'lr': [1, 2]}\naltered = {'lr': 'both'}", "given {'lr': 'both'}", "each with `run` or `checkpoint`"),
        ("transient = 'grad *'", "transient of mine.py: given 'grad *'", "a list of patterns"),
        ("transient = 3", "transient of mine.py: given 3", "a list of patterns"),
        ("transient = [3]", "transient of mine.py: given [3]", "a list of patterns"),
        ("local = '*'", "local of mine.py: given '*'", "a list of patterns of `NAME`"),
        ("emulates = 'rocm'", "emulates of mine.py: given 'rocm'", "cuda, or nothing"),
        ("axes = dict(a=[1])", "given 'dict(a=[1])'", "a literal, or the name of one"),
        ("alike = {'a': 'bits'}", "given {'a': 'bits'}", "axes of two values or more, each with"),
        ("axes = {'a': [1, 2]}\nalike = {'a': 'nearly'}", "given {'a': 'nearly'}", "each with `bits`, `rounding` or"),
        ("axes = {'a': [...]}", "given []", "a list of one value or more"),
        ("steps = make()", "steps of mine.py: given 'make()'", "the file is read before it is run"),
        ("steps = (ABSENT, 1)", "given '(ABSENT, 1)'", "a literal, or the name of one"),
    ],
)  # fmt: skip
def test_data_of_another_form(read: Read, data: str, given: str, allowed: str) -> None:
    told = refusal(read, text_of_trainer(data))
    assert given in told
    assert allowed in told
    name = data.splitlines()[-1].split(" ", 1)[0]
    assert f"for example: {name} = " in told


def test_a_trainer_that_is_forgotten_lends_its_package_to_no_other(tmp_path: Path) -> None:
    text = "from shardproof.trainer import Trainer\nclass Mine(Trainer):\n    requires = ['somelib==%s']\n"
    text += "".join(f"    def {name}(self, given=None): ...\n" for name in ("build", "step", "save", "load"))
    for version in ("1.0", "2.0"):
        file = tmp_path / f"of_{version[0]}.py"
        file.write_text(text % version)
        found = register(str(file))
        assert package("somelib").newest.version == version
        registry.forget(found.name)


def test_a_trainer_runs_the_release_that_it_requires_though_a_system_has_the_library(tmp_path: Path) -> None:
    file = tmp_path / "of_an_old_deepspeed.py"
    file.write_text(text_of_trainer("requires = ['deepspeed==0.19.3']"))
    found = register(str(file))
    assert found.under_test == system_named("deepspeed").under_test
    asked = named(found, "", interpreter())
    registry.forget(found.name)
    assert asked.package is not None
    assert asked.package.newest.version == "0.19.3"
