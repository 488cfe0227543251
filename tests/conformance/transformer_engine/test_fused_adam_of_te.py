"""TransformerEngine's own Python, in the oldest and newest release, against the reference's FusedAdam, bit for bit.

*Verifies*: parameter, masters, remainders, moments and scales after three steps of every combination of parameter,
master, moment and gradient dtype, AdamW and L2, with and without bias correction, and of the capturable kernel.
*Does not verify* the real kernels: `tests/gpu/test_fused_adam_gpu.py`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from shardproof.systems.transformer_engine import SYSTEM
from shardproof.world.environments import Environments
from shardproof.world.server import DETERMINISM

from tests.paths import PYTHONPATH

SCRIPT = Path(__file__).with_name("fused_adam_steps.py")
ROOT = SCRIPT.parents[3]


@pytest.mark.real
@pytest.mark.parametrize("release", [pytest.param("2.10.0", marks=pytest.mark.nightly), "2.20.2"])
def test_the_library_steps_as_the_reference(release: str) -> None:
    environments = Environments(None, ())
    overlay = environments.overlay(environments.resolve(SYSTEM, release))
    path = os.pathsep.join(map(str, (*overlay.paths, PYTHONPATH)))
    done = subprocess.run(
        [sys.executable, SCRIPT], capture_output=True, text=True, check=False,
        env={**os.environ, **DETERMINISM, **overlay.environment, "PYTHONPATH": path},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["wrong"] == []
    assert found["steps"] == 1_728 + 18
