"""A library of two mistakes, for tests of whose an error is."""

from __future__ import annotations

import torch


def adds_across_devices() -> None:
    torch.ones(2, device="cuda").add_(torch.ones(2))


def adds_shapes_that_do_not_fit() -> None:
    torch.ones(2, device="cuda").add_(torch.ones(3, device="cuda"))
