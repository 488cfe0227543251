"""What DTensor works out from shapes alone, remembered from one rank to the next.

For every operator that a rank meets for the first time, DTensor asks torch's fake tensors which shape, strides and
dtype its result has: half of the processor time of a rank that shards, steps and saves. A cache of DTensor's own that
keeps the answers keeps the mesh of who asked as well, so that no other rank may have it (`shardproof.world.host`).
The answers alone depend on the operator, on shapes, strides and dtypes of whole tensors and on plain arguments, and
on no mesh, rank or value. They are what is remembered here: rank 0 of a job writes down what was new to it, the
server reads it, and ranks that are forked later ask nobody.

What a library does is not changed by it, but one function of torch is not run again. So there are *cold* ranks, which
ask torch for everything and compare what it says with what is remembered: those in which a failure has to come again,
and those of a tenth of the scenarios, another tenth each day. An answer that is not the remembered one ends the rank
with an error of ours. With `SHARDPROOF_COLD=1` in the environment nothing is remembered.
"""

from __future__ import annotations

import marshal
import os
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

from shardproof.errors import HarnessError

COLD = "SHARDPROOF_COLD"
MOST = 100_000  # answers that are remembered; a nightly of torch-fsdp2 comes to some thousands
MOST_BYTES = 16 << 20  # of a file of answers

Plain = Any
"""None, a bool, an int, a str, or a tuple of such."""


ONE_IN = 10


def drawn(scenario_id: str, today: date | None = None) -> bool:
    """Whether the ranks of a scenario are cold today: one scenario in ten is, and each of them one day in ten."""
    day = (today or date.today()).toordinal()
    return (int(scenario_id[:8], 16) + day) % ONE_IN == 0


class _UnknownError(Exception):
    """Something that a key cannot hold: the answer may depend on more than can be compared."""


remembered: dict[Plain, Plain] = {}


@dataclass
class _State:
    """What is this process' own. installed: torch may be asked by way of this module. cold: see above. new: what torch
    was asked here. wrong: operators of which torch says something else than what is remembered."""

    installed: bool = False
    cold: bool = False
    new: dict[Plain, Plain] = field(default_factory=dict)
    wrong: set[str] = field(default_factory=set)

    def hear(self, key: Plain, answer: Plain) -> None:
        """Take down what torch said."""
        if remembered.setdefault(key, answer) != answer:
            self.wrong.add(key[0])
        self.new[key] = answer


_state = _State()


def install() -> None:
    """Let DTensor look into `remembered` before torch is asked, in this process and in all that are forked from it."""
    if _state.installed or os.environ.get(COLD) or "torch.distributed.tensor" not in sys.modules:
        return
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    own = getattr(ShardingPropagator, "_propagate_tensor_meta_non_cached", None)
    if own is None:  # another torch, which may be organised in another way
        return
    _state.installed = True

    def asked_first(self: Any, op_schema: Any) -> Any:
        try:
            key = _key(op_schema)
        except _UnknownError:
            return own(self, op_schema)
        if key in remembered and not _state.cold:
            return _result(remembered[key])
        answer = own(self, op_schema)
        with suppress(_UnknownError):
            _state.hear(key, _plain_result(answer))
        return answer

    ShardingPropagator._propagate_tensor_meta_non_cached = asked_first  # type: ignore[method-assign]


def begin(*, cold: bool) -> None:
    """Begin a rank.

    Args:
        cold: whether it asks torch for everything, as a user's process does, and compares.
    """
    _state.cold = cold
    _state.new.clear()


def end(path: Path | None) -> None:
    """End a rank.

    Args:
        path: where it writes down what was new to it, if it does. A disk that is full costs the next rank some time.

    Raises:
        HarnessError: something was remembered that torch does not say.
    """
    if _state.wrong:
        raise HarnessError(f"what was remembered of {', '.join(sorted(_state.wrong))} is not what torch says now")
    if path and _state.new:
        with suppress(OSError):
            path.write_bytes(marshal.dumps(list(_state.new.items())))


def read(path: Path) -> None:
    """Remember the answers that a rank of this server wrote down; nothing of the file is executed."""
    with suppress(OSError, ValueError, EOFError, TypeError):  # of a rank that was killed while it wrote
        if path.stat().st_size <= MOST_BYTES and len(remembered) < MOST:
            remembered.update(marshal.loads(path.read_bytes()))


def _key(op_schema: Any) -> Plain:
    """All that an answer depends on.

    Raises:
        _UnknownError: something is traced, or an argument is no plain value.
    """
    import torch
    from torch._guards import detect_fake_mode

    if detect_fake_mode() is not None:
        raise _UnknownError
    around = (
        str(torch.get_default_dtype()), torch.is_inference_mode_enabled(),
        *(f"{kind} {torch.get_autocast_dtype(kind)}" for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)),
    )  # fmt: skip
    named = tuple((name, _plain(value)) for name, value in op_schema.kwargs_schema.items())
    return str(op_schema.op), around, tuple(map(_plain, op_schema.args_schema)), named


def _plain(value: Any) -> Plain:
    """An argument as a plain value, with its type: 1, 1.0 and True are equal, and do not give the same dtype."""
    import torch
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

    if value is None or type(value) in (bool, int, str):
        return type(value).__name__, value
    if type(value) is float:
        return "float", value.hex()
    if isinstance(value, (torch.dtype, torch.layout, torch.device, torch.memory_format)):
        return "torch", str(value)
    if isinstance(value, DTensorSpec):
        return "tensor", value.mesh.device_type, _plain_meta(value.tensor_meta)
    if type(value) in (list, tuple):
        return type(value).__name__, tuple(map(_plain, value))
    raise _UnknownError


def _plain_meta(meta: Any) -> Plain:
    if meta is None or any(type(size) is not int for size in (*meta.shape, *meta.stride)):  # a size may be a symbol
        raise _UnknownError
    return tuple(meta.shape), tuple(meta.stride), str(meta.dtype)


def _plain_result(answer: Any) -> Plain:
    from torch.distributed.tensor._dtensor_spec import TensorMeta

    if answer is None:
        return ()
    if isinstance(answer, TensorMeta):
        return "one", _plain_meta(answer)
    if type(answer) in (list, tuple):
        return type(answer).__name__, tuple(None if one is None else _plain_meta(one) for one in answer)
    raise _UnknownError


def _result(plain: Plain) -> Any:
    if not plain:
        return None
    kind, metas = plain
    if kind == "one":
        return _meta(metas)
    made = (None if one is None else _meta(one) for one in metas)
    return list(made) if kind == "list" else tuple(made)


def _meta(plain: Plain) -> Any:
    import torch
    from torch.distributed.tensor._dtensor_spec import TensorMeta

    shape, stride, dtype = plain
    return TensorMeta(torch.Size(shape), stride, getattr(torch, dtype.removeprefix("torch.")))
