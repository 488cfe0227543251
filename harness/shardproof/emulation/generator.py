"""The device's own random generator: on a GPU, host and device draw different numbers for the same seed, and so they
do here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_SEED = 67280421310721  # a GPU's generator starts anywhere; here every run must repeat the last
_OTHER_STREAM = 0x5DEECE66D  # for one seed, a GPU's Philox and the CPU's Mersenne twister give unrelated numbers


class DeviceGenerator(torch.Generator):
    """A generator of the emulated device. Its state is that of torch's CPU generator (5056 bytes, a GPU's has 16)."""

    seed_given = _SEED

    def manual_seed(self, seed: int) -> DeviceGenerator:
        self.seed_given = int(seed)
        super().manual_seed((int(seed) ^ _OTHER_STREAM) & (2**63 - 1))
        return self

    def initial_seed(self) -> int:
        return self.seed_given


GENERATOR = DeviceGenerator().manual_seed(_SEED)


@contextmanager
def on_device_generator() -> Iterator[None]:
    """Let the functions inside draw from the device generator instead of the host's."""
    host = torch.default_generator
    state = host.get_state()
    host.set_state(GENERATOR.get_state())
    try:
        yield
    finally:
        GENERATOR.set_state(host.get_state())
        host.set_state(state)
