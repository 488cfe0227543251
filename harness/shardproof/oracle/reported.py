"""What an oracle takes from the system that it judges: values whose bits depend on how work is shared out.

Each of them is held against the exact one within a bound (norms in `shardproof.diff`, directions in
`shardproof.oracle.muon`), and everything that follows from it is compared bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardproof.observe.logical import Value


@dataclass(frozen=True)
class Reported:
    """Values that a system reported of its steps.

    * norms: `(operation, the gradients' global norm)`.
    * directions: `((operation, name), the direction that Muon stepped a matrix in)`.
    """

    norms: tuple[tuple[int, float], ...] = ()
    directions: tuple[tuple[tuple[int, str], Value], ...] = ()


NOTHING = Reported()
"""A system that reported nothing: the exact values count."""
