"""The emulated GPU of a trainer that asks for one, `emulates = "cuda"`, on ranks that have none.

The trainer's file is imported, its methods run, and its state is looked at, while `torch.cuda` answers and tensors go
to a device that is the CPU's memory. Results say that the device is emulated.

*Does not exercise* CUDA's streams, kernels and NCCL.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from packaging.requirements import Requirement

from shardproof.entry import resolve
from shardproof.trainer.base import Trainer
from shardproof.trainer.described import Described
from shardproof.trainer.rank.loading import class_of
from shardproof.trainer.system import declared_package

CAPABILITY = (9, 0)
"""Of the emulated GPU: libraries try fp8 from 8.9 on."""


def _prepare(trainer: Described) -> None:
    """Import the package of a system as the system does it, where it cannot be imported by itself without a GPU."""
    names = [Requirement(text).name for text in trainer.requires[:1]]
    package = declared_package(names[0]) if names and trainer.emulates else None
    if package is not None and package.importer:
        resolve(package.importer)()


@contextmanager
def device_for(trainer: Described, device: str) -> Iterator[None]:
    """Inside, what a trainer calls finds the GPU that it asks for."""
    if not trainer.emulates or device == "cuda":
        yield
        return
    from shardproof.emulation.device import on
    from shardproof.emulation.machine import Kind

    with on(device, Kind(CAPABILITY)):
        yield


def class_for(trainer: Described, device: str) -> type[Trainer]:
    """The trainer's class, its file imported where it finds the GPU that it asks for; and triton by name, should a
    library that it imports not do without.

    Raises:
        Whatever `class_of` raises.
    """
    with device_for(trainer, device):
        _prepare(trainer)
        try:
            return class_of(trainer.file, trainer.name)
        except ModuleNotFoundError as error:
            from shardproof.emulation.names import TRITON, importable

            if not trainer.emulates or error.name not in TRITON:
                raise
            with importable(TRITON):
                return class_of(trainer.file, trainer.name)
