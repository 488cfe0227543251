"""Generators that a loader's worker processes get copies of, which all begin alike."""

from __future__ import annotations

from torch.utils.data import DataLoader

from shardproof.trainer.rank import kinds
from shardproof.trainer.rank.walk import Walk


def copied_generators(way: Walk) -> list[str]:
    """Return a sentence on every loader whose workers get a copy of a generator that the dataset holds."""
    paths, told = {id(met.value): met.path for met in way.met}, list[str]()
    generators = {id(met.value): met.path for met in way.met if met.kind == kinds.GENERATOR}
    for met in way.met:
        loader = met.value
        if not isinstance(loader, DataLoader) or not loader.num_workers or loader.worker_init_fn is not None:
            continue
        held = [generators[one] for one in way.below(id(loader.dataset)) if one in generators]
        several = loader.num_workers > 1
        again = " and draw the same numbers in every epoch" if several else " and draws the same numbers in every epoch"
        if not held or (loader.persistent_workers and not several) or id(loader.dataset) not in paths:
            continue
        who = f"its {loader.num_workers} workers get copies that begin alike" if several else "its worker gets a copy"
        told.append(
            f"{met.path} has `num_workers={loader.num_workers}`, and its dataset holds {', '.join(held)}: {who}"
            f"{',' * (several and not loader.persistent_workers)}{again * (not loader.persistent_workers)}, unless the "
            "dataset seeds it there, as by `get_worker_info().seed`"
        )
    return told
