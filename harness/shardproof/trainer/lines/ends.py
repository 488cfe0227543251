"""What a trainer with `fit` has when it has returned, as its ranks recorded it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from shardproof.observe.assemble import assemble
from shardproof.observe.record import Record
from shardproof.trainer.arms import AT_THE_END
from shardproof.trainer.lines.statements import OfRanks, ran_by_op
from shardproof.trainer.values.every_mesh import OF_MODULES
from shardproof.trainer.values.rounding import At


class End(NamedTuple):
    """The end of a `fit`. values: parameters and buffers when it had returned. ran: what ran behind its last update."""

    values: At
    ran: OfRanks


def ends_by_op(records: Iterable[Record]) -> Mapping[int, End]:
    """Operation of a `fit` → what is known of its end."""
    own = [each for each in records if each.where == AT_THE_END]
    logical, _ = assemble([each for each in own if each.role in OF_MODULES])
    ran = ran_by_op(own)
    found: dict[int, End] = {}
    for key, value in logical.items():
        end = found.get(key.op, End({}, ran.get(key.op, {})))
        found[key.op] = end._replace(values={**end.values, (key.role, key.fqn): value})
    return found
