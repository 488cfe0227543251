"""What every module of a trainer came to in a step, so that two ways to compute the same can be told apart by the first
module that does not.

*Does not see* modules inside a graph that `torch.compile` made, what is computed outside modules, and what a module is
given by keyword.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any

import torch
from torch import fx, nn
from torch.nn.modules import module
from torch.utils.hooks import RemovableHandle

from shardproof.observe.record import Record, whole
from shardproof.trainer.arms import CALLS
from shardproof.trainer.rank.pieces import parts, raw

MOST = 4000
"""Calls of a step that are kept."""

UNREAD = ""
"""In place of a digest, of an output that is not read."""


class Calls:
    """The calls of modules since the latest record: forward, and anew in a backward, as activation checkpoints do.

    Each has the module's path, its class, a digest of its output and a sketch of it, and a digest of what it was given.
    A path begins at the outermost module.
    """

    def __init__(self) -> None:
        self._paths: dict[int, str] = {}
        self._kept: list[nn.Module] = []  # so that no other module gets the same id
        self._last: dict[int, RemovableHandle] = {}  # of modules whose own hooks may put another output in its place
        self.forward: list[tuple[str, str, str, list[float], str]] = []
        self.anew: list[tuple[str, str, str, list[float], str]] = []

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Inside, calls are kept."""
        # without `with_kwargs`, of which torch 2.13 leaves a trace behind when the hook is removed
        hooks = [module.register_module_forward_pre_hook(self._begins), module.register_module_forward_hook(self._ends)]
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", ".*global hooks on modules.*")
                yield
        finally:
            for hook in (*hooks, *self._last.values()):
                hook.remove()
            self._last = {}

    def record(self, op: int, rank: int) -> Record:
        """The calls so far as a record that is not compared; what follows begins anew."""
        data = json.dumps({"forward": self.forward, "anew": self.anew}).encode()
        self.forward, self.anew = [], []
        return whole(op, rank, CALLS, "", "utf8", (len(data),), data)

    def _begins(self, called: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling() or isinstance(called, fx.GraphModule):
            return
        if called._forward_hooks and id(called) not in self._last:  # hooks of all modules run before its own
            self._last[id(called)] = called.register_forward_hook(self._ends_behind_hooks)
        if id(called) in self._paths:
            return
        for path, inner in called.named_modules():
            if id(inner) not in self._paths:
                self._paths[id(inner)] = path
                self._kept.append(inner)

    def _ends(self, called: nn.Module, args: Any, output: Any) -> None:
        if id(called) not in self._last:
            self._keep(called, args, output)

    def _ends_behind_hooks(self, called: nn.Module, args: Any, output: Any) -> None:
        hook = self._last.pop(id(called), None)
        if hook is not None:
            hook.remove()
        self._keep(called, args, output)

    def _keep(self, called: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or id(called) not in self._paths:
            return
        calls = self.forward if torch._C._current_graph_task_id() == -1 else self.anew
        if len(calls) < MOST:
            given = digest_of_given(args, output)
            calls.append((self._paths[id(called)], type(called).__name__, _digest(output), _sketch(output), given))


def digest_of_given(given: Any, output: Any) -> str:
    """Of the bits of all tensors that a module was given; `UNREAD` without any, or where it may have written to one."""
    try:
        places = {tensor.data_ptr() for tensor in tensors_of(given)}
        if not places or places & {tensor.data_ptr() for tensor in tensors_of(output)}:
            return UNREAD
    except Exception:  # as of `_digest`
        return UNREAD
    return _digest(given)


def _digest(output: Any) -> str:
    """Of the bits of all tensors of an output; `UNREAD` where they cannot be read, or not yet."""
    digest = blake2b(digest_size=8)
    try:
        with torch.no_grad():
            for tensor in tensors_of(output):
                for _, part in parts(tensor):
                    digest.update(raw(part)[2])
    except Exception:  # a tensor of a transform, or without memory: nothing is said of it, and the step goes on
        return UNREAD
    return digest.hexdigest()


def _sketch(output: Any) -> list[float]:
    """How many numbers an output has, their norm, and their sum with weights that are not alike, so that two outputs
    that are nearly the same have nearly the same sketch; empty of one that cannot be read."""
    found = [0.0, 0.0, 0.0]
    try:
        with torch.no_grad():
            for tensor in tensors_of(output):
                for _, part in parts(tensor):
                    numbers = part.detach().to(torch.float64).reshape(-1)
                    weights = torch.arange(numbers.numel(), dtype=torch.float64, device=numbers.device).cos()
                    found[0] += numbers.numel()
                    found[1] += float(numbers.square().sum())
                    found[2] += float((numbers * weights).sum())
    except Exception:  # as of `_digest`
        return []
    return [found[0], found[1] ** 0.5, found[2]]


def tensors_of(output: Any) -> Iterator[torch.Tensor]:
    """The tensors in what a module was given or came to.

    Raises:
        ValueError: one of them cannot be read without a collective of somebody else's.
    """
    if isinstance(output, torch.Tensor):
        if type(output).__name__ == "AsyncCollectiveTensor":  # which somebody else has to wait for
            raise ValueError(output)
        if any(placement.is_partial() for placement in getattr(output, "placements", ())):  # a part of a sum
            raise ValueError(output)
        yield output
    elif isinstance(output, dict):
        for value in output.values():
            yield from tensors_of(value)
    elif isinstance(output, (list, tuple)):
        for value in output:
            yield from tensors_of(value)
