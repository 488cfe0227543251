"""What the model of a trainer was given in a step, so that a step can be told from one that was given other data.

Whatever a trainer calls its data, they come to a module sooner or later. The first module inside each call of a model
that is given a tensor by position, such as an embedding or a first layer, gets them as they are.

*Does not see* data that a model computes with before a module gets them, and models that `torch.compile` has made.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module

from shardproof.observe.record import Record, whole
from shardproof.trainer.arms import GIVEN
from shardproof.trainer.rank.calls import MOST, UNREAD, digest_of_given, tensors_of


class Inputs:
    """What the first module was given, once for each call of a model since the latest record: a digest, and how many
    rows the first tensor has."""

    def __init__(self) -> None:
        self.given: list[tuple[str, int]] = []
        self._open = 0  # modules that are being called
        self._seen = False  # whether the call of the model has its digest

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Inside, inputs are kept."""
        # without `with_kwargs` and `always_call`, of which torch leaves traces behind when a hook is removed
        hooks = [module.register_module_forward_pre_hook(self._begins), module.register_module_forward_hook(self._ends)]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def record(self, op: int, rank: int) -> Record:
        """The digests so far as a record that is not compared; what follows begins anew."""
        data = json.dumps(self.given).encode()
        self.given, self._open, self._seen = [], 0, False  # a module that raised has not ended
        return whole(op, rank, GIVEN, "", "utf8", (len(data),), data)

    def _begins(self, called: nn.Module, args: Any) -> None:
        if not _is_forward():
            return
        self._seen = self._seen and bool(self._open)
        self._open += 1

    def _ends(self, called: nn.Module, args: Any, output: Any) -> None:
        if not _is_forward():
            return
        self._open -= 1
        if self._seen or len(self.given) >= MOST:
            return
        given = digest_of_given(args, output)
        if given != UNREAD:
            self._seen = True
            tensors = [*tensors_of(args)]
            if not any(tensor.requires_grad for tensor in tensors):  # computed from parameters: no data
                self.given.append((given, tensors[0].shape[0] if tensors[0].ndim else 1))


def _is_forward() -> bool:
    """Whether a module is called by the trainer, and neither traced nor computed anew in a backward."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() == -1
