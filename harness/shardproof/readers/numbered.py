"""Names for what a checkpoint calls by number: an optimizer's own `state_dict()`, as torch.optim gives it.

A parameter's number is its place in the param groups, one group after the other: `{"state": {0: …}, "param_groups":
[{"params": [0, 1], "lr": …}]}`. Which parameter has which place is what the contract says of the groups, and never what
the file says: a file whose state lies under another number has that parameter's state.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

from shardproof.observe.record import Record
from shardproof.observe.settings import SETTING
from shardproof.readers.errors import unfamiliar

T = TypeVar("T")

_PARAMS = ".params"


def named(
    records: Iterable[Record], groups: Sequence[Sequence[str]], *, by_parameter: bool, origin: str
) -> list[Record]:
    """Records of a checkpoint under the names of parameters, where its param groups go by numbers; else as they are.

    Args:
        groups: the names in each param group, in their order. by_parameter: a group's settings are recorded of each of
            its parameters (`Contract.owner_groups`). origin: the checkpoint, for messages.

    Raises:
        UnfamiliarError: a number that no parameter or group has.
    """
    found = list(records)
    listed = [n for r in found if r.fqn.endswith(_PARAMS) for n in r.data.decode(errors="replace").split("\n") if n]
    if not listed or not all(map(str.isdecimal, listed)):
        return found
    names = [name for group in groups for name in group]
    return [record for each in found for record in _named(each, groups, names, by_parameter, origin)]


def _named(
    record: Record, groups: Sequence[Sequence[str]], names: Sequence[str], by_parameter: bool, origin: str
) -> Iterator[Record]:
    group, _, key = record.fqn.partition(".")
    if record.fqn.isdecimal() and record.role not in ("param", "buffer"):
        yield record._replace(fqn=_at(names, record.fqn, origin))
    elif record.role in ("hyperparameter", SETTING) and by_parameter:
        for fqn in _at(groups, group.removeprefix("group"), origin) if key != "params" else ():
            yield record._replace(fqn=f"{fqn}.{key}")
    elif record.fqn.endswith(_PARAMS):
        text = "\n".join(_at(names, number, origin) for number in record.data.decode().split()).encode()
        yield record._replace(shape=(len(text),), size=(len(text),), data=text)
    else:
        yield record


def _at(those: Sequence[T], number: str, origin: str) -> T:
    if not number.isdecimal() or int(number) >= len(those):
        raise unfamiliar(f"{origin}: number in the optimizer's section", number, f"0 to {len(those) - 1}", "{0: …}")
    return those[int(number)]
