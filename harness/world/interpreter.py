"""An interpreter that ranks run in: its tag, its platform and what is installed in it, asked once.

The parent answers for itself; another interpreter is started to ask. Nothing of a library is imported.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache

from harness.errors import UsageError

ASK_S = 60.0

_QUESTION = """
import json, pathlib, re, sys, sysconfig
from importlib.metadata import distributions
from importlib.util import find_spec
found = {}
for dist in distributions():
    found.setdefault(dist.metadata["Name"] or "", dist.version)
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
        done = subprocess.run(
            [command, "-c", _QUESTION], capture_output=True, text=True, timeout=ASK_S, check=True,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        answer = json.loads(done.stdout.splitlines()[-1])
        if not isinstance(answer, dict):
            raise ValueError(f"it answers {answer!r}")
    except subprocess.CalledProcessError as error:
        raise _unusable(command, f"it ended with status {error.returncode}: {error.stderr.strip()[-300:]}") from None
    except (OSError, subprocess.TimeoutExpired, ValueError, IndexError) as error:
        raise _unusable(command, str(error)) from None
    installed = {normalised(name): release for name, release in answer.pop("installed").items()}
    return Interpreter(command, installed=installed, **answer)


def _unusable(command: str, why: str) -> UsageError:
    return UsageError.of("--python", command, f"a Python interpreter that runs ({why})", f"--python {sys.executable}")
