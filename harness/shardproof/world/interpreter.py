"""The Python interpreter that ranks run in: its tag, platform and installed packages, queried once.

The parent answers for itself; another interpreter is started to ask. Nothing of a library is imported.
"""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from shardproof.errors import UsageError

ASK_S = 20.0
"""How long an interpreter may take to say what it has; it imports nothing of a library."""

MOST_SAID_BYTES = 4 << 20

SAFE_PATH = {"PYTHONSAFEPATH": "1"}
"""Keeps the current folder off the `sys.path` of a Python that is given this in its environment, as `-P` does. Whoever
runs a scenario file in the folder in which he got it has not asked for the `json.py` that lies beside it."""

_QUESTION = """
import json, pathlib, re, sys, sysconfig
from importlib.metadata import distributions
from importlib.util import find_spec
found = {}
for dist in distributions():
    found.setdefault(dist.metadata["Name"] or "", str(dist.version))
torch = find_spec("torch")
says = pathlib.Path(torch.origin).with_name("version.py").read_text() if torch and torch.origin else ""
build = dict(re.findall(r"^(__version__|cuda|hip)\\b.*= '(.+)'$", says, re.MULTILINE))
print(json.dumps({"python": sys.version.split()[0], "tag": sys.implementation.cache_tag,
                  "platform": sysconfig.get_platform(), "installed": found,
                  "torch_build": build, "site": str(pathlib.Path(torch.origin).parents[1]) if says else ""}))
"""


@dataclass(frozen=True)
class Interpreter:
    """* path: as given.
    * python: its release.
    * tag: such as `cpython-311`.
    * platform: such as `linux-x86_64`.
    * installed: normalised distribution name → release.
    * torch_build: what torch's own `version.py` says, as text: `__version__` (such as `2.13.0+cu130`) and, where it
      was built for one, the release of `cuda` or `hip`.
    * site: the folder that holds torch; empty without one."""

    path: str
    python: str
    tag: str
    platform: str
    installed: Mapping[str, str] = field(hash=False)
    torch_build: Mapping[str, str] = field(hash=False, default_factory=dict)
    site: str = ""

    def release(self, distribution: str) -> str | None:
        """The installed release of a distribution, None without one."""
        return self.installed.get(normalised(distribution))


def normalised(distribution: str) -> str:
    """A distribution's name as PEP 503 compares it."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


@cache
def interpreter(path: str | None = None) -> Interpreter:
    """The interpreter at `path`; the parent's own without one.

    Raises:
        UsageError: it cannot be run, or does not answer.
    """
    command = path or sys.executable
    try:
        return _understood(command, _answer(command))
    except subprocess.TimeoutExpired:
        raise _unusable(command, f"it gave no answer in {ASK_S:.0f} s") from None
    except (OSError, ValueError, IndexError, RecursionError) as error:
        raise _unusable(command, str(error)[-300:] or type(error).__name__) from None


def _answer(command: str) -> object:
    """What the program says to the question, as JSON. It may be any program: one that writes without end is ended by
    the system, one that waits without end by us, with all that it started.

    Raises:
        OSError, ValueError, IndexError, subprocess.TimeoutExpired: it cannot be run, or does not answer.
    """
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        words = [command, "-c", _QUESTION]
        process = subprocess.Popen(
            words, env={**os.environ, **SAFE_PATH}, stdin=subprocess.DEVNULL, stdout=out, stderr=err,
            start_new_session=True,
        )  # fmt: skip
        try:
            with suppress(ProcessLookupError):
                resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (MOST_SAID_BYTES, MOST_SAID_BYTES))
            status = process.wait(ASK_S)
        finally:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        out.seek(0)
        err.seek(max(0, err.seek(0, os.SEEK_END) - 1200))
        if status:
            raise ValueError(f"it ended with status {status}: {err.read().decode(errors='replace').strip()[-300:]}")
        return json.loads(out.read(MOST_SAID_BYTES).splitlines()[-1])


def _understood(command: str, answer: object) -> Interpreter:
    """The interpreter of an answer.

    Raises:
        ValueError: it is no answer to the question.
    """
    if not isinstance(answer, dict):
        raise ValueError(f"it answers {answer!r}"[:300])
    texts: dict[str, Any] = {key: answer.get(key) for key in ("python", "tag", "platform", "site")}
    tables: dict[str, Any] = {key: answer.get(key) for key in ("installed", "torch_build")}
    whole = all(isinstance(text, str) for text in texts.values()) and all(map(_is_texts, tables.values()))
    if not whole or not re.match(r"[0-9]{1,4}\.[0-9]{1,4}", str(texts["python"])):
        raise ValueError(f"it answers {answer!r}"[:300])
    tables["installed"] = {normalised(name): release for name, release in tables["installed"].items()}
    return Interpreter(command, **texts, **tables)


def _is_texts(table: object) -> bool:
    return isinstance(table, dict) and all(isinstance(text, str) for text in table.values())


def _unusable(command: str, why: str) -> UsageError:
    return UsageError.of("--python", command, f"a Python interpreter that runs ({why})", f"--python {sys.executable}")
