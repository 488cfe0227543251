"""One rank of `own-adamw-hasty`."""

from __future__ import annotations

from tests.conformance.own_adamw.optimizer import HastyAdamW
from tests.conformance.own_adamw.rank import Rank


class Hasty(Rank):
    """The example with the optimizer that leaves out what is empty here."""

    optimizer_class = HastyAdamW
