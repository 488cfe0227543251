"""Its checkpoints: one file of torch.save with the sections `model`, `optim` and `extra`, which torch's reader knows.

The optimizer's section goes by numbers, as `torch.optim` writes it; the judge puts the names of the contract's param
groups in their place.
"""

from __future__ import annotations

from shardproof.readers.stored import TorchStored

STORED = TorchStored()
