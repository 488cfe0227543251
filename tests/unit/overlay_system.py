"""A system whose library is the fake package `fakelib`, which tests put into overlays: what the library says decides
whether its rank observes what the twin says, something else, or an error."""

from __future__ import annotations

import base64
import hashlib
import os
import sys
import zipfile
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from shardproof.folders import CACHE_VARIABLE
from shardproof.observe.record import Record, whole
from shardproof.oracle.contract import Contract
from shardproof.program import Op
from shardproof.protocol.accepts import Accepts, Anything, Limit, Operations
from shardproof.protocol.registry import register
from shardproof.protocol.system import RankContext, System
from shardproof.scenario import Scenario
from shardproof.versions import before

if TYPE_CHECKING:
    import pytest

warmed: list[str] = []


def warm_up() -> None:
    import fakelib.core

    warmed.append(f"{fakelib.core.__version__} {os.environ['SHARDPROOF_VARIANT']}")


def import_with_dependency() -> None:
    """Import the library where it lacks something that we have."""
    sys.modules["no_such_dependency"] = ModuleType("no_such_dependency")
    import fakelib.core  # noqa: F401


def variant(scenario: Scenario) -> str:
    return "odd" if scenario.seed % 2 else "even"


def not_exercised(scenario: Scenario) -> tuple[str, ...]:
    return ("overlap",) if scenario.seed == 2 else ()


ACCEPTS = Accepts(
    "fake",
    model=Anything(),
    mesh=Anything(),
    program=Operations(("build", "step")),
    seed=Anything(),
    limits=(
        Limit("one-rank", lambda scenario: scenario.mesh.world > 1, "the fake library has one rank"),
        Limit("dense", lambda s: s.model == "dense" and before(s.version, "1.5"), "dense models came with 1.5"),
    ),
)
CONTRACT = Contract()
FAKE_SYSTEM = register(
    System(
        "fake", "right if its library is", __name__,
        package="fake-lib", emulated=("everything",), data="tests/unit/fake_library",
        accepts_entry=":ACCEPTS", contract_entry=":CONTRACT", stored_entry="", rank=":FakeRank", warm_up=":warm_up",
        variant_entry=":variant", not_exercised_entry=":not_exercised",
    )
)  # fmt: skip
FAKE = Scenario(system="fake", program="train", model="short")


def write_library(folder: Path, version: str, behaviour: str = "right") -> Path:
    """A source tree of the fake library. behaviour: `right`, `wrong`, `raises` or `broken` (cannot be imported)."""
    core = folder / "fakelib" / "core"
    core.mkdir(parents=True)
    lines = [f"__version__ = {version!r}", f"BEHAVIOUR = {behaviour!r}", "def check():"]
    lines += ["    if BEHAVIOUR.startswith('raises'):", "        raise ArithmeticError(BEHAVIOUR)"]
    if behaviour == "broken":
        lines.append("import no_such_dependency")
    (core / "__init__.py").write_text("\n".join([*lines, ""]))
    return folder


BEHAVIOURS = {"1.0": "right", "1.1": "wrong", "1.2": "broken", "2.0": "raises"}


def isolate(patch: pytest.MonkeyPatch, folder: Path) -> Path:
    """An own cache below `folder`, and wheels of the fake library as pip's only index; the folder of overlays."""
    (folder / "wheels").mkdir()
    for version, behaviour in BEHAVIOURS.items():
        write_wheel(folder / "wheels", version, behaviour, folder / "scratch")
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        patch.delenv(name)
    patch.setenv("PIP_CONFIG_FILE", os.devnull)
    patch.setenv("PIP_NO_INDEX", "1")
    patch.setenv("PIP_FIND_LINKS", str(folder / "wheels"))
    patch.setenv(CACHE_VARIABLE, str(folder / "cache"))
    return folder / "cache" / "overlays"


def write_wheel(folder: Path, version: str, behaviour: str, scratch: Path) -> None:
    """A wheel of the fake library, as pip installs it."""
    write_wheel_of(write_library(scratch / version, version, behaviour), folder, "fake_lib", version)


def write_wheel_of(tree: Path, folder: Path, name: str, version: str) -> None:
    """A wheel of a source tree. name: of the distribution, with underscores."""
    info = f"{name}-{version}.dist-info"
    files = {str(p.relative_to(tree)): p.read_bytes() for p in tree.rglob("*.py")}
    said = f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n"
    files[f"{info}/METADATA"] = said.encode()
    files[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: us\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    rows = [f"{n},sha256={_encoded(data)},{len(data)}" for n, data in files.items()]
    files[f"{info}/RECORD"] = "\n".join([*rows, f"{info}/RECORD,,", ""]).encode()
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for path, data in files.items():
            wheel.writestr(path, data)


def _encoded(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


class FakeRank:
    def __init__(self, context: RankContext) -> None:
        from shardproof.oracle import twin

        inputs, _ = context.contract.resolve(context.scenario)
        self._truth = twin.run(inputs)

    def build(self, op: Op) -> None:
        assert len(warmed) == 1

    def step(self, op: Op) -> None:
        import fakelib.core

        fakelib.core.check()

    def observe(self, op: Op) -> Iterable[Record]:
        import fakelib.core

        for key, value in self._truth.items():
            if key.op == op.index:
                wrong = fakelib.core.BEHAVIOUR == "wrong" and key.role == "param"
                data = bytes(len(value.data)) if wrong else value.data
                yield whole(op.index, 0, key.role, key.fqn, value.dtype, value.shape, data)
