"""Its checkpoints: one file of torch.save whose optimizer section goes by numbers, as `torch.optim` writes it.

`{"model": …, "optim": {"state": {0: …}, "param_groups": [{"params": [0, 1], "lr": …}]}, "extra": …}`. A parameter's
number is its place in the param groups, one group after the other. The reader for torch's own formats gives numbers
where others have names; here they become names, by what the contract says of the groups, never by asking torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from shardproof.observe.record import Record
from shardproof.observe.settings import SETTING
from shardproof.program import Op
from shardproof.readers.errors import bad
from shardproof.readers.stored import TorchStored
from shardproof.scenario import Scenario

from .contract import CONTRACT

T = TypeVar("T")

OF_OPTIMIZER = ("exp_avg", "exp_avg_sq", "momentum", "step")


class ZeroStored(TorchStored):
    """Reads them; what they must hold is what every format of torch's holds."""

    def read(self, path: Path, op: Op, scenario: Scenario) -> list[Record]:
        """As `TorchStored.read`.

        Raises:
            CheckpointError: as there, and a number that no parameter or group has.
        """
        groups = [group.names for group in CONTRACT.resolve(scenario)[0].builds[0].groups]
        return [named for record in super().read(path, op, scenario) for named in _named(record, groups, path)]


def _named(record: Record, groups: Sequence[Sequence[str]], path: Path) -> Iterator[Record]:
    """A record under the names of parameters: what a group has each of its parameters has."""
    if record.role in ("hyperparameter", SETTING):
        group, _, name = record.fqn.partition(".")
        for fqn in _at(groups, group.removeprefix("group"), path) if name != "params" else ():
            yield record._replace(fqn=f"{fqn}.{name}")
    elif record.role in OF_OPTIMIZER:
        yield record._replace(fqn=_at([name for names in groups for name in names], record.fqn, path))
    else:
        yield record


def _at(those: Sequence[T], number: str, path: Path) -> T:
    if not number.isdecimal() or int(number) >= len(those):
        raise bad(f"{path}: number in the optimizer's section", number, f"0 to {len(those) - 1}", "{'state': {0: …}}")
    return those[int(number)]


STORED = ZeroStored()
