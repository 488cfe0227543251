"""A system whose library is a package of two files, for tests of heads: which seeds its defects strike, what its one
function takes, and what its clone's log says, each test decides."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from pathlib import Path

from shardproof.observe.record import Record, whole
from shardproof.oracle.contract import Contract
from shardproof.program import Op
from shardproof.protocol.accepts import Accepts, Anything, Operations
from shardproof.protocol.registry import register
from shardproof.protocol.system import RankContext, System

ACCEPTS = Accepts(
    "heads", model=Anything(), mesh=Anything(), program=Operations(("build", "step")), seed=Anything(),
    optimizer=Anything(),
)  # fmt: skip
CONTRACT = Contract()
HEADS_SYSTEM = register(
    System(
        "heads", "right if its library is", __name__, package="heads-lib", data="tests/unit/heads_library",
        accepts_entry=":ACCEPTS", contract_entry=":CONTRACT", stored_entry="", rank=":HeadsRank",
    )
)  # fmt: skip

DEFECTS = "DEFECT = 7  # parameters are zero\nOTHER = 8\n"
REPAIRED = "DEFECT = None\nOTHER = 8\n"
TRAIN = "def train(width, *, depth=1):\n    return width * depth\n"


def write_tree(folder: Path, *, version: str = "1.0", defects: str = DEFECTS, train: str = TRAIN) -> Path:
    """A source tree of the library."""
    core = folder / "headslib" / "core"
    core.mkdir(parents=True, exist_ok=True)
    (core / "__init__.py").write_text(f"from .loop import train\n__version__ = {version!r}\n")
    (core / "loop.py").write_text(train)
    (core / "defects.py").write_text(defects)
    return folder


def commit(folder: Path, subject: str, body: str = "", tag: str = "") -> str:
    """Commit what a folder holds, which becomes a repository if it is none; the commit's id."""

    def git(*words: str) -> str:
        who = ["-c", "user.email=a@b", "-c", "user.name=a"]
        done = subprocess.run(["git", "-C", str(folder), *who, *words], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    if not (folder / ".git").exists():
        git("init", "-q", "-b", "main")
    git("add", "-A")
    git("commit", "-q", "--allow-empty", "-m", subject, *(["-m", body] if body else []))
    if tag:
        git("tag", tag)
    return git("rev-parse", "HEAD")


class HeadsRank:
    def __init__(self, context: RankContext) -> None:
        from shardproof.oracle import twin

        self._seed = context.scenario.seed
        self._truth = twin.run(context.contract.resolve(context.scenario)[0])

    def build(self, op: Op) -> None:
        from headslib.core import train

        options = {"depth": 2}
        train(3, **options)

    def step(self, op: Op) -> None:
        pass

    def observe(self, op: Op) -> Iterable[Record]:
        from headslib.core import defects

        for key, value in self._truth.items():
            if key.op == op.index:
                struck = key.role == "param" and self._seed in (defects.DEFECT, defects.OTHER)
                data = bytes(len(value.data)) if struck else value.data
                yield whole(op.index, 0, key.role, key.fqn, value.dtype, value.shape, data)
