"""Which compiled extension TransformerEngine's Python layer runs over, and why: one decision for the parent and the
ranks.

On a GPU it is the real one, since it is there; on a CPU the emulated one, since the real kernels need a device.
SHARDPROOF_TE_EXTENSION forces one of them. Imports neither torch nor the library.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from shardproof.errors import UsageError

VARIABLE = "SHARDPROOF_TE_EXTENSION"
REAL, EMULATED = "real", "emulated"


@dataclass(frozen=True)
class Choice:
    """kind: `real` or `emulated`. why: for the reader of a result."""

    kind: str
    why: str

    def __str__(self) -> str:
        return f"{self.kind}, {self.why}"


def choice(device: str) -> Choice:
    """The extension of ranks on a device, `cpu` or `cuda`.

    Raises:
        UsageError: the environment asks for something else than the two.
    """
    asked = os.environ.get(VARIABLE, "")
    if asked not in ("", REAL, EMULATED):
        raise UsageError.of(VARIABLE, asked, (REAL, EMULATED, "unset"), f"{VARIABLE}={EMULATED}")
    if asked:
        return Choice(asked, f"as {VARIABLE} asks")
    return Choice(REAL, "on a GPU") if device == "cuda" else Choice(EMULATED, "on a CPU, which has no kernels of it")
