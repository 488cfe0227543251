"""A universal checkpoint of DeepSpeed, as its tool `ds_to_universal` makes it out of the files of ranks.

`zero/NAME/{fp32,exp_avg,exp_avg_sq,…}.pt` hold a parameter's master and state whole: a dict with the tensor under
`param`, or under stage 3 the tensor itself. `zero/optimizer_state.pt` has the param groups, the loss scaler, and under
stage 3 the steps. The files of model states are copies of those of the ranks.

*Verifies*: that each tensor has its parameter's elements; what `shardproof.readers.archive` does. *Does not verify*:
the folders that the tool makes for frozen parameters and buffers under stages 1 and 2, which no load reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from shardproof.models import NamedParam
from shardproof.observe.record import WRITTEN, Record, whole
from shardproof.readers.archive import Archive, Budget
from shardproof.readers.errors import bad
from shardproof.readers.roles import STATE_ROLE, Target
from shardproof.readers.values import Tensor

FORM = "a checkpoint as ds_to_universal writes it"
STATE_FILE = "optimizer_state.pt"


def tensors_of(folder: Path, trained: Mapping[str, NamedParam], stepped: str, target: Target) -> Iterator[Record]:
    """The records of the files of `zero/`.

    Args:
        trained: the parameters that the optimizer steps, by name. stepped: the role of what it steps.

    Raises:
        CheckpointError: missing, damaged, or of another size than the parameter.
    """
    for fqn, named in trained.items():
        found = sorted((folder / fqn).glob("*.pt"))
        if not found:
            raise bad(f"{folder}: folder of {fqn}", "none", f"{fqn}/fp32.pt", FORM)
        for path in found:
            role = stepped if path.stem == "fp32" else STATE_ROLE.get(path.stem, path.stem)
            yield _record(path, role, named, target)


def _record(path: Path, role: str, named: NamedParam, target: Target) -> Record:
    """One file: the tensor whole, in the shape of its parameter, or a counter."""
    archive = Archive(path.read_bytes(), str(path), Budget())
    value = archive.value()
    tensor = value.get("param") if isinstance(value, dict) else value
    shape = () if role == "step" else named.spec.shape
    if not isinstance(tensor, Tensor) or tensor.numel != (1 if role == "step" else named.spec.numel):
        given = tensor.shape if isinstance(tensor, Tensor) else type(tensor).__name__
        raise bad(f"{path}: what it holds", str(given), f"a tensor of {named.spec.numel} elements", FORM)
    return whole(target.op, 0, role, named.fqn, tensor.dtype, shape, archive.data(tensor), WRITTEN)


def names_in(groups: Iterable[Iterable[NamedParam]]) -> dict[str, NamedParam]:
    """The parameters of param groups by name."""
    return {named.fqn: named for group in groups for named in group}
