"""The stacks of torch and safetensors: the calls that a user's training script makes, and nothing beside them."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

from shardproof.resilience.stages import MARK

State = dict[str, Any]

SHAPES = {"embedding": (96, 32), "layer.weight": (48, 48), "layer.bias": (48,), "head.weight": (64, 32)}
"""Parameters of the state that is saved: in fp32 from 192 bytes to 12 KiB, so that files have several blocks."""


def digests_of(state: Mapping[str, Any]) -> dict[str, str]:
    """Name → digest of dtype, shape and bytes of a tensor, or of the text of another value."""
    found = {}
    for name, value in state.items():
        digest = hashlib.blake2b(digest_size=12)
        if isinstance(value, torch.Tensor):
            digest.update(f"{value.dtype} {tuple(value.shape)} ".encode())
            digest.update(value.detach().reshape(-1).view(torch.uint8).numpy().tobytes())
        else:
            digest.update(repr(value).encode())
        found[name] = digest.hexdigest()
    return found


class Tensors:
    """States of tensors, all of one layout, as a small model and its Adam moments have them."""

    def state(self, generation: int, run: int) -> State:
        draw = torch.Generator().manual_seed(1000 * run + generation)
        found: State = {}
        for name, shape in SHAPES.items():
            found[f"model.{name}"] = torch.randn(shape, generator=draw)
            found[f"exp_avg.{name}"] = torch.randn(shape, generator=draw).bfloat16()
        return {**found, "step": torch.tensor(100 * run + generation)}

    def digests(self, state: Mapping[str, Any]) -> Mapping[str, str]:
        return digests_of(state)

    def warm(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            self.save(Path(folder), self.state(0, 0), 0, 0)
            self.load(Path(folder))

    def save(self, folder: Path, state: State, generation: int, run: int) -> None:
        raise NotImplementedError

    def load(self, folder: Path) -> State:
        raise NotImplementedError

    def blank(self) -> State:
        """Tensors to load into, that hold no state."""
        return {name: torch.full_like(value, 77) for name, value in self.state(0, 9).items()}


class TorchSave(Tensors):
    """`torch.save` and `torch.load` as they are by default."""

    def __init__(self, renames: bool = False) -> None:
        self.renames = renames

    def save(self, folder: Path, state: State, generation: int, run: int) -> None:
        if self.renames:
            torch.save(state, folder / "checkpoint.pt.tmp")
            os.replace(folder / "checkpoint.pt.tmp", folder / "checkpoint.pt")
        else:
            torch.save(state, folder / "checkpoint.pt")

    def load(self, folder: Path) -> State:
        found: State = torch.load(folder / "checkpoint.pt")
        return found


class SafeTensors(Tensors):
    """`save_file` and `load_file`."""

    def save(self, folder: Path, state: State, generation: int, run: int) -> None:
        from safetensors.torch import save_file  # type: ignore[import-not-found, unused-ignore]

        save_file(state, folder / "model.safetensors")

    def load(self, folder: Path) -> State:
        from safetensors.torch import load_file

        found: State = load_file(folder / "model.safetensors")
        return found


class Writer(FileSystemWriter):
    """The library's writer, which also says in which stage of a save it is: it asks for a file that is not there, named
    after the stage (`MARK`). Threads and ranks of one stage do not wait for each other. A user's writer may do the
    same; nothing of the library is changed."""

    def write_data(self, *given: Any, **named: Any) -> Any:
        _mark(self.path, 1)
        return super().write_data(*given, **named)

    def finish(self, *given: Any, **named: Any) -> None:
        _mark(self.path, 2)
        super().finish(*given, **named)


def _mark(folder: str | os.PathLike[str], stage: int) -> None:
    with suppress(FileNotFoundError):
        os.rmdir(os.path.join(folder, f"{MARK}{stage}"))


class Distributed(Tensors):
    """`torch.distributed.checkpoint.save` and `load` in one process, without a process group."""

    def __init__(self, steps: bool = False, **options: Any) -> None:
        self.steps, self.options = steps, options

    def save(self, folder: Path, state: State, generation: int, run: int) -> None:
        where = folder / f"step-{generation:08d}" if self.steps else folder
        state_dict_saver.save(state, storage_writer=Writer(where, **self.options), no_dist=True)

    def load(self, folder: Path) -> State:
        state = self.blank()
        state_dict_loader.load(state, storage_reader=FileSystemReader(self._newest(folder)), no_dist=True)
        return state

    def _newest(self, folder: Path) -> Path:
        """The latest step that has its metadata, which a save writes last."""
        if not self.steps:
            return folder
        return max(path.parent for path in folder.glob("step-*/.metadata"))


class DistributedAsync(Distributed):
    """`async_save` in one process, which needs a process group of one rank; the save is waited for."""

    def warm(self) -> None:
        Distributed().warm()

    def save(self, folder: Path, state: State, generation: int, run: int) -> None:
        dist.init_process_group("gloo", store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1)
        saving = state_dict_saver.async_save(state, storage_writer=FileSystemWriter(folder))
        assert isinstance(saving, Future)
        saving.result()
