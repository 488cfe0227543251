"""What surrounds the code: packages that it imports, pins, targets of the Makefile, what a wheel holds, and that every
system is walked.

*Verifies*: names against what exists, that what is imported is declared, and that nothing is pinned that nothing needs.
*Does not verify*: that a target succeeds.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from shardproof.space.files import load_space, space_names

from tests.conformance.built_in import BUILT_IN

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = {system.name for system in BUILT_IN}
"""Other tests of this process may register systems of their own."""

MAKEFILE = (ROOT / "Makefile").read_text("utf-8")


_SPHINX = (
    "alabaster", "babel", "docutils", "imagesize", "jinja2", "packaging", "pygments", "requests", "roman-numerals",
    "snowballstemmer", "sphinxcontrib-applehelp", "sphinxcontrib-devhelp", "sphinxcontrib-htmlhelp",
    "sphinxcontrib-jsmath", "sphinxcontrib-qthelp", "sphinxcontrib-serializinghtml",
)  # fmt: skip
OPTIONAL: dict[str, tuple[str, ...]] = {
    "playwright": ("greenlet",),
    "axe-playwright-python": (),
    "greenlet": (),
    "lxml": (),
    "check-jsonschema": ("click", "jsonschema", "regress", "requests", "ruamel-yaml"),
    "regress": (),
    "ruamel-yaml": (),
    "pytest-reportlog": (),
    "myst-parser": ("sphinx", "docutils", "markdown-it-py", "mdit-py-plugins", "pyyaml"),
    "sphinx": _SPHINX,
    "ray": ("click", "filelock", "jsonschema", "msgpack", "packaging", "protobuf", "pyyaml", "requests"),
    "jsonschema": ("attrs", "jsonschema-specifications", "referencing", "rpds-py"),
    "requests": ("certifi", "charset-normalizer", "idna", "urllib3"),
    **dict.fromkeys([name for name in _SPHINX if name != "requests"], ()),
    **dict.fromkeys(["mdit-py-plugins", "pyyaml", "certifi", "charset-normalizer", "idna", "urllib3"], ()),
    **dict.fromkeys(["attrs", "jsonschema-specifications", "msgpack", "protobuf", "referencing", "rpds-py"], ()),
}
"""Packages without which tests run, less those in a browser, of the site, of JUnit, of CI's files and of Ray, and what
is pinned for them."""


def is_installed(name: str) -> bool:
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True


def needed(requirements: list[str]) -> set[str]:
    """The distributions that these requirements come to, with all that those require in turn, as installed here."""
    left, found = [Requirement(text) for text in requirements], set()
    while left:
        wanted = left.pop()
        name = canonicalize_name(wanted.name)
        if name not in found:
            found.add(name)
            if name in OPTIONAL and not is_installed(name):
                left += map(Requirement, OPTIONAL[name])
                continue
            extras = ("", *wanted.extras)
            left += [
                each
                for each in map(Requirement, distribution(name).requires or ())
                if each.marker is None or any(each.marker.evaluate({"extra": extra}) for extra in extras)
            ]
    return found


def test_nothing_is_pinned_that_nothing_needs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    pinned = {canonicalize_name(line.partition("==")[0]) for line in lines}
    extras = project["optional-dependencies"]
    wanted = needed([*project["dependencies"], *extras["test"], *extras["browser"], *extras["docs"], *extras["ray"]])
    assert pinned - wanted == set()
    unpinned = {name for name in wanted - pinned if not name.startswith(("nvidia-", "cuda-"))}
    assert unpinned <= {"setuptools", "triton"}, "torch's own limits on these, and on NVIDIA's libraries, are the pins"


SCANNED = ("harness", "benchmarks", "tests", "docs/written", "docs/site")

UNDECLARED = {
    "megatron": "a library under test: whoever tests Megatron-Core has it, and its releases come from overlays",
    "megatron_fsdp": "a library under test, as megatron",
    "nemo_automodel": "a library under test, as megatron",
    "transformers": "comes with NeMo AutoModel, whose models are of its classes",
    "fakelib": "a library that tests write, as if it were under test",
    "headslib": "as fakelib",
    "shardproof_absent": "a name that a test needs to be absent",
}
"""What is imported and stands in no list of `pyproject.toml` → why."""


_IMPORT = re.compile(r"^ *(?:import|from) +([A-Za-z]\w*)", re.MULTILINE)
"""A line that imports, or looks so: ruff leaves one import a line."""


def imported(file: Path, known: set[str]) -> Iterator[str]:
    """The packages that a file imports, wherever in it, but for those that are known. It is parsed only where one of
    its lines names another: parsing all files takes seconds."""
    text = file.read_text("utf-8")
    if known.issuperset(_IMPORT.findall(text)):
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            yield node.module.partition(".")[0]


def test_everything_imported_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    lists = [project["dependencies"], *project["optional-dependencies"].values()]
    declared = {canonicalize_name(Requirement(text).name) for texts in lists for text in texts}
    beside_tests = {file.stem for file in (ROOT / "tests").rglob("*.py")}  # pytest puts their folders on the path
    known = {"shardproof", "benchmarks", "tests", "docs", *beside_tests, *sys.stdlib_module_names}
    known |= {name.replace("-", "_") for name in declared}  # each is imported by its own name
    files = [file for folder in SCANNED for file in sorted((ROOT / folder).rglob("*.py"))]
    found = [(name, str(file.relative_to(ROOT))) for file in files for name in imported(file, known)]
    elsewhere = {name: file for name, file in found if name not in known}
    assert {name: file for name, file in elsewhere.items() if name not in UNDECLARED} == {}
    assert sorted(UNDECLARED.keys() - elsewhere.keys()) == [], "named, and no longer imported"


def test_the_makefile_runs_spaces_that_exist() -> None:
    chosen = re.findall(r"^GPU_SET := (.*)$", MAKEFILE, re.MULTILINE)
    named = re.findall(r"-m shardproof run ((?:\w[\w/-]* )+)--", MAKEFILE)
    names = [name for words in (*chosen, *named) for name in words.split()]
    assert {"gpu", "smoke", "nightly"} <= set(names)
    assert [name for name in names if name not in space_names()] == []


@pytest.mark.parametrize("name", ["nightly", "weekly"])
def test_every_system_is_walked(name: str) -> None:
    assert {walk.system for walk in load_space(name).walks} & SHIPPED == SHIPPED


def test_weekly_is_nightly_with_nothing_left_out() -> None:
    nightly, weekly = (load_space(name) for name in ("nightly", "weekly"))
    assert {(w.system, w.part) for w in nightly.walks} <= {(w.system, w.part) for w in weekly.walks}
    assert any(walk.leave_out for walk in nightly.walks)
    assert not any(walk.leave_out for walk in weekly.walks)
    assert {walk.strength for walk in weekly.walks} >= {3}
