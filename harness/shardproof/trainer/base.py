"""What a trainer's file is made of: `Trainer`, the `Cell` it is built for, and `Unsupported`, by which it refuses one.

Nothing here imports torch, so that a file may be looked at without it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, ClassVar

PLAIN = (bool, int, float, complex, str, bytes, type(None))
"""Types of values that are no state of training unless `Trainer.state` names them."""


class Unsupported(Exception):  # noqa: N818 (it is raised as `raise Unsupported("…")`, and is no error)
    """Raised by a trainer's `build` or `fit` for a cell that its stack does not have, with the reason as its text."""


@dataclass(frozen=True)
class Cell:
    """What a trainer is built for: one value of each of its axes, and the place of this rank. Every axis is an
    attribute too: of `axes = {"optimizer": ["adamw", "sgd"]}` that is `cell.optimizer`.

    * mesh: the sizes of the mesh as text, such as `2` or `2x2`; `2` where the trainer has no axis `mesh`.
    * rank, world: of this process, and how many there are. The process group is there already.
    * seed: to initialise weights from. Ranks that load get another one than those that saved.
    * device: `cpu` or `cuda`; also `cuda` where the trainer `emulates` one.
    * folder: an empty folder for whatever a stack wants to write besides checkpoints, the same for all ranks.
    """

    mesh: str
    rank: int
    world: int
    seed: int
    device: str
    folder: Path
    values: Mapping[str, Any] = field(default_factory=dict)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes of the mesh as numbers: `(2, 2)` of `2x2`."""
        return sizes_of(self.mesh)

    def __getattr__(self, name: str) -> Any:
        try:
            return vars(self)["values"][name]
        except KeyError:
            known = ", ".join(["mesh", "rank", "world", "seed", "device", "folder", *vars(self).get("values", ())])
            raise AttributeError(f"a cell has no {name!r}; it has {known}") from None


def sizes_of(mesh: str) -> tuple[int, ...]:
    """The sizes of a mesh's text, such as `2x2`."""
    return tuple(int(size) for size in mesh.split("x"))


def world_of(mesh: str) -> int:
    """How many ranks a mesh's text asks for."""
    return prod(sizes_of(mesh))


class Trainer:
    """A training script: how to build it, step it, save and load it, in the stack's own calls.

    A subclass has `build`, `step`, `save` and `load`; or, of a framework that owns its loop, `fit` alone. Each method
    runs on every rank.

    * axes: what cells vary; name → values, the simplest first, as literals. `mesh` is how many ranks there are, such
      as `2` or `2x2`. Behind the last value `...` says that other ones are taken too, such as another class of
      optimizer.
    * requires: packages as pip names them, such as `accelerate==1.15.0`, installed beside what is there and never into
      it, without what they depend on. The first is the one under test: `shardproof trainer FILE --version 1.14.0` puts
      another release in its place.
    * steps: how many steps come before the save, and how many after it. With 0 after it there is no save: such a
      trainer needs neither `save` nor `load`, and its steps alone are compared.
    * altered: axis → `run` or `checkpoint`: which of the two wins where the run that loads has another value of this
      axis than the run that saved; or `refuse`: `load` raises an error then.
    * alike: axis → `bits`, `rounding` or `rounding bf16`: every value of this axis must come to the same parameters and
      the same state of optimizers as its first value, bit for bit, or up to what another order of sums makes, where a
      part of the model may compute in bf16.
    * transient: names of state that checkpoints need not hold, as glob patterns such as `grad *` or `* cache`.
    * local: names of what every rank has of its own, as glob patterns: parameters that are plain tensors, such as
      `*.experts.*`, what `state` adds, and settings of param groups, such as `group*.params` of an optimizer that gives
      each rank other parameters. Any other parameter, setting or value of `state` must be equal on all ranks. `build`
      may set it as an attribute, where it depends on the cell, as on whether there is expert parallelism.
    * frozen: names of parameters that no step may change, as glob patterns such as `base.*`, whatever their
      `requires_grad` says.
    * tied: names of parameters that must be one, such as `[("lm_head.weight", "embed.weight")]`, which is looked at
      after every operation. `build` may set it as an attribute, where it depends on the cell.
    * emulates: `cuda` for a stack that calls `torch.cuda` whatever it runs on, such as Megatron-Core: without a GPU its
      file is imported, and its methods run, on an emulated one, as results say.
    """

    axes: ClassVar[Mapping[str, Sequence[Any]]] = {}
    requires: ClassVar[Sequence[str]] = ()
    steps: ClassVar[tuple[int, int]] = (2, 2)
    altered: ClassVar[Mapping[str, str]] = {}
    alike: ClassVar[Mapping[str, str]] = {}
    transient: ClassVar[Sequence[str]] = ()
    local: Sequence[str] = ()
    frozen: ClassVar[Sequence[str]] = ()
    tied: Sequence[tuple[str, ...]] = ()
    emulates: ClassVar[str] = ""

    _probe: Callable[[str, bool, str], Any] | None = None
    _taken: Callable[[], None] | None = None
    _attributes: frozenset[str] = frozenset()

    def build(self, cell: Cell) -> None:
        """Make model, optimizer and whatever else the stack has, as attributes of this object."""
        raise NotImplementedError

    def step(self, index: int) -> None:
        """One update. The batch is a function of `index`, so that every arm sees the same data; `index` counts updates
        from 0 and goes on after a load."""
        raise NotImplementedError

    def save(self, folder: Path) -> None:
        """Write a checkpoint into an empty folder, and return once it is complete. The arm `used` also saves into a
        folder that has one, which may be refused by raising."""
        raise NotImplementedError

    def load(self, folder: Path) -> None:
        """Read such a folder into what `build` made."""
        raise NotImplementedError

    def fit(self, cell: Cell, until: int, folder: Path | None, resume: Path | None) -> None:
        """Train until so many updates are done, for a framework that owns its loop. Call `self.updated()` after each
        update.

        Args:
            folder: where to write a checkpoint of the end; None to write none. resume: such a folder, to go on from.
        """
        raise NotImplementedError

    def state(self) -> dict[str, Any]:
        """What to look at: name → object, or a value. By default every attribute of this object that is not a plain
        value such as a number; override it to add some, or to remove some. A tensor or a value that it adds, by itself
        or in a list or a dict, is compared between ranks too, whatever its name."""
        found = {name: value for name, value in vars(self).items() if not isinstance(value, PLAIN)}
        found.pop("_attributes", None)
        self._attributes = frozenset(found)
        return found

    def probe(self, model: str, cell: Cell, *, twin: bool = True, dtype: str = "fp32") -> Any:
        """One of shardproof's tiny models (`shardproof list`), a `torch.nn.Module`, whose gradients are known
        beforehand and exact: `self.model(index).backward()` gives every parameter this rank's gradient of step `index`.

        With it, arms on other meshes are compared after their steps too, and an optimizer of `torch.optim` is judged
        by the twin: the same optimizer on whole tensors, with the mean of the ranks' gradients.

        Args:
            twin: False where the trainer does more to gradients than that: clips, scales or accumulates them, or
                reduces them in half precision. Then the trainer is judged by its arms alone.
            dtype: of the parameters, `fp32`, `bf16` or `fp16`; gradients are exact in it, and so is their mean.
        """
        if self._probe is None:
            raise RuntimeError("probe is there inside of build and fit, on the ranks of shardproof")
        return self._probe(model, twin, dtype)

    def updated(self) -> None:
        """Say, inside of `fit`, that one more update is done: the state is observed as it is now."""
        if self._taken is not None:
            self._taken()
