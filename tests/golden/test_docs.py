"""What the documents name is there: files, commands with their options, and the code that they quote.

*Verifies*: every path below one of our folders exists, every `shardproof` command line parses and names scenarios,
systems and axes that there are, every `make` target and `python -m` module exists, and a block of Python under the name
of a file is a part of that file. What docstrings of the package name by `harness.…` or by path is there too.
*Does not verify*: what a command prints, and prose.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import click
import pytest
from shardproof.cli.main import cli
from shardproof.compare.dtypes import SAFETENSORS, WIDE
from shardproof.protocol.registry import system_named
from shardproof.protocol.releases import package_of
from shardproof.protocol.system import System
from shardproof.readers.values import JUDGED
from shardproof.scenario import AXES, parse_axis
from shardproof.space.files import load_space, split_system
from shardproof.world import torches

from tests.conformance.built_in import BUILT_IN

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("*/README.md"),
        *ROOT.glob("harness/shardproof/cli/main.py"),
    )
)
OURS = ("harness", "scenarios", "tests", "docs", "benchmarks", "reports", ".ci")
"""Folders whose files a document may name in full."""

LONGEST_CELL = 200

_PATH = re.compile(r"(?<![\w./@:~-])(?:\.\./)*([\w.-]+(?:/[\w.*<>-]+)+\.(?:py|toml|md|patch|html))(?![\w/])")
_FOLDER = re.compile(r"`([\w.]+/(?:[\w.*<>-]+/)*)`")
_COMMAND = re.compile(r"(?:^\$ |`|^    )(shardproof [^`\n]*)", re.MULTILINE)
_MODULE = re.compile(r"python -m ((?:shardproof|benchmarks|docs)[\w.]*)")
_TARGET = re.compile(r"(?:`|^\$ )make ([a-z-]+)", re.MULTILINE)
_QUOTED = re.compile(r"`(?P<path>[\w/.-]+\.py)`:\n\n(?P<blocks>(?:```python\n.*?```\n+)+)", re.DOTALL)
_TEST = re.compile(r"`([\w/]+\.py)::(\w+)`")
_NAMES = re.compile(r"[A-Z]{2,}|<\w+>|^my[_-]")
"""A word in capitals or brackets, or one of mine, stands for something of the reader's: ID, <bug>, my_plugin."""


def text_of(document: str) -> str:
    """A document, with lines that end in a backslash joined to the next."""
    return (ROOT / document).read_text("utf-8").replace("\\\n", " ")


def cases(pattern: re.Pattern[str]) -> list[tuple[str, str]]:
    """(document, what the pattern's group matched), each once."""
    found = [(document, match) for document in DOCUMENTS for match in pattern.findall(text_of(document))]
    return sorted(set(found))


def places(path: str) -> Iterator[Path]:
    """Where a path of a document may lie: from the root, from `harness/shardproof/`, or from `docs/`."""
    pattern = re.sub(r"<\w+>", "*", path)
    for folder in (ROOT, ROOT / "harness" / "shardproof", ROOT / "docs"):
        yield from folder.glob(pattern)


KEPT_REPORTS = ("reports/README.md", "reports/sample/")
"""What git has below `reports/`; the rest is what the reader's own runs write."""


def is_ours(path: str) -> bool:
    first = path.partition("/")[0]
    if first == "reports" and not path.startswith(KEPT_REPORTS):
        return False
    below = (ROOT / "harness" / "shardproof" / first).is_dir() and not path.endswith((".md", ".html"))
    return first in OURS or below


@pytest.mark.parametrize(("document", "path"), [case for case in cases(_PATH) if is_ours(case[1])])
def test_a_file_that_a_document_names_is_there(document: str, path: str) -> None:
    assert any(places(path)), f"{document} names {path}"


@pytest.mark.parametrize(
    ("document", "path"), [case for case in cases(_FOLDER) if is_ours(case[1]) and not _NAMES.search(case[1])]
)
def test_a_folder_that_a_document_names_is_there(document: str, path: str) -> None:
    assert any(places(path)), f"{document} names {path}"


def test_the_map_of_the_house_names_every_room() -> None:
    page = (ROOT / "docs/architecture.md").read_text("utf-8")
    rooms = [path for path in (ROOT / "harness" / "shardproof").iterdir() if not path.name.startswith("_")]
    names = [f"{room.name}/" if room.is_dir() else room.name for room in rooms]
    assert [name for name in sorted(names) if f"`{name}`" not in page] == []


WORDS = (
    "scenario", "axes", "island", "unit", "space", "walk", "cell", "limit", "constraint", "program", "session", "arm",
    "system", "variant", "overlay", "rank", "probe", "grid", "record", "piece", "role", "box", "logical", "observation",
    "contract", "inputs", "stepped", "domain", "placement", "twin", "reference", "known", "cured",
)  # fmt: skip
"""Words of ours, each of which the architecture page defines where it first occurs, in italics."""


@pytest.mark.parametrize("word", WORDS)
def test_a_word_of_ours_is_defined(word: str) -> None:
    assert re.search(rf"\*{word}s?\*", (ROOT / "docs/architecture.md").read_text("utf-8"))


def words_of(command: str) -> list[str]:
    """The words of a command line, without the remark behind it and without what the shell would do."""
    words = shlex.split(re.split(r"  +(?!-)", command)[0], comments=True)[1:]
    ends = [i for i, word in enumerate(words) if word in ("|", ">", "&&", "…") or word.startswith("$")]
    return words[: min(ends, default=len(words))]


COMMANDS = [(document, command) for document, command in cases(_COMMAND) if words_of(command)]


@pytest.mark.parametrize(("document", "command"), COMMANDS)
def test_a_command_line_parses(document: str, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torches, "with_torch", lambda version, python: python)  # a release is not installed for this
    name, *words = words_of(command)
    if _NAMES.fullmatch(name) or name.startswith(("-", "[")):
        return
    found = cli.get_command(click.Context(cli), name)
    assert found is not None, f"{document}: there is no command {name}"
    if not words:  # the command itself is meant
        return
    context = found.make_context(name, words)  # raises what a user would see
    given = context.params
    plugins = [plugin for plugin in given.get("plugins") or () if not _NAMES.search(plugin)]
    for plugin in plugins:  # not imported: what it registers would be there for other tests
        assert find_spec(plugin), f"{document}: {command}"
    for system in given.get("systems") or ():
        if not _NAMES.search(system):
            system_named(split_system(system)[0])
    for setting in () if name in ("trainer", "resilience") else given.get("sets") or ():  # whose axes are its own
        axis, _, values = setting.partition("=")
        assert axis in AXES, f"{document}: {command}"
        for value in values.split(","):
            parse_axis(axis, value)
    for scenario in given.get("names") or ():
        if name in ("run", "plan") and not scenario.endswith(".toml") and not _NAMES.search(scenario):
            load_space(scenario)


@pytest.mark.parametrize(("document", "module"), cases(_MODULE))
def test_a_module_that_is_run_is_there(document: str, module: str) -> None:
    places = [root / module.replace(".", "/") for root in (ROOT, ROOT / "harness")]
    files = [file for place in places for file in (place.with_suffix(".py"), place / "__main__.py")]
    assert any(file.is_file() for file in files), f"{document} runs {module}"


@pytest.mark.parametrize(("document", "target"), cases(_TARGET))
def test_a_target_of_make_is_there(document: str, target: str) -> None:
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE), f"{document}: make {target}"


def quotations() -> Iterator[tuple[str, str, str]]:
    for document in DOCUMENTS:
        for match in _QUOTED.finditer((ROOT / document).read_text("utf-8")):
            for block in re.findall(r"```python\n(.*?)```", match["blocks"], re.DOTALL):
                yield document, match["path"], block


@pytest.mark.parametrize(("document", "path", "block"), list(quotations()))
def test_quoted_code_is_that_of_its_file(document: str, path: str, block: str) -> None:
    assert block in (ROOT / path).read_text("utf-8"), f"{document} quotes {path}"


_DOTTED = re.compile(r"`(shardproof(?:\.\w+)+)(?:`|:)")
MODULES = sorted(ROOT.glob("harness/shardproof/**/*.py"))


def docstrings(path: Path) -> Iterator[str]:
    """Every text of a module that is a statement by itself."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value.value


def _definition(name: str) -> re.Pattern[str]:
    return re.compile(rf"^\s*(?:(?:def|class) {name}\b|{name}(?:, \w+)*\s*[:=])", re.MULTILINE)


def is_defined(dotted: str) -> bool:
    """Whether a name is a module of the package, or stands in one."""
    parts = dotted.split(".")
    for length in range(len(parts), 1, -1):
        place = ROOT.joinpath("harness", *parts[:length])
        file = next((f for f in (place.with_suffix(".py"), place / "__init__.py") if f.is_file()), None)
        if file is not None:
            return length == len(parts) or bool(_definition(parts[length]).search(file.read_text("utf-8")))
    return False


@pytest.mark.parametrize(("document", "name"), cases(_DOTTED))
def test_a_name_of_the_package_is_there(document: str, name: str) -> None:
    assert is_defined(name), f"{document} names {name}"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_what_a_docstring_names_is_there(path: Path) -> None:
    for text in docstrings(path):
        assert [name for name in _DOTTED.findall(text) if not is_defined(name)] == []
        assert [name for name in _PATH.findall(text) if name.startswith(OURS) and not any(places(name))] == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_a_cell_of_a_table_is_no_paragraph(document: str) -> None:
    rows = [line for line in (ROOT / document).read_text("utf-8").splitlines() if line.startswith("|")]
    assert [cell for row in rows for cell in row.strip("|").split(" | ") if len(cell.strip()) > LONGEST_CELL] == []


@pytest.mark.parametrize(("file", "test"), sorted(set(_TEST.findall((ROOT / "tests/README.md").read_text("utf-8")))))
def test_a_test_that_the_guide_to_tests_names_is_there(file: str, test: str) -> None:
    (path,) = [ROOT / "tests" / file] if "/" in file else (ROOT / "tests" / "unit").rglob(file)
    assert f"def {test}(" in path.read_text("utf-8")


@pytest.mark.parametrize("system", [each for each in BUILT_IN if each.under_test], ids=lambda each: each.name)
def test_the_readme_names_the_releases_that_are_declared(system: System) -> None:
    (row,) = re.findall(rf"^\| `{system.name}` \| (.*)$", (ROOT / "README.md").read_text("utf-8"), re.MULTILINE)
    declared = package_of(system).releases
    assert f"{declared[0].version} to {declared[-1].version}" in row


def test_there_is_something_to_check() -> None:
    assert len(COMMANDS) > 50
    assert len(list(quotations())) >= 5


def test_the_limits_of_readers_name_every_dtype() -> None:
    section = text_of("docs/checkpoints.md").partition("**Limits.**")[2]
    judged, widely = section.split("also takes")
    ours = {*JUDGED.storages.values(), *JUDGED.dtypes.values()}
    theirs = {*WIDE.storages.values(), *WIDE.dtypes.values(), *SAFETENSORS.values()} - ours
    assert set(re.findall(r"\w+", judged.partition(" with a scale")[0])) - {"and"} == {*ours, "fp8e4m3"}
    assert set(re.findall(r"\w+", widely.partition(".")[0])) - {"and"} == theirs
