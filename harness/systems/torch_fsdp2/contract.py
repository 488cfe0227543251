"""What FSDP2 promises: a plain torch training loop, with the dtypes of its mixed precision policy."""

from __future__ import annotations

from harness.mechanisms.fsdp2 import limits as fsdp2
from harness.oracle.contract import Contract


class Fsdp2Contract(Contract):
    """Everything is as `Contract` says; the clauses say where torch promises it."""

    clauses = fsdp2.CLAUSES


CONTRACT = Fsdp2Contract()
