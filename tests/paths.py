"""Where the project lies, and the PYTHONPATH of child processes that import the package and the systems of tests."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTHONPATH = os.pathsep.join((str(ROOT), str(ROOT / "harness")))
"""Both of this checkout, whichever one is installed."""
