"""Real or emulated: the one place that chooses, for a process that runs a library of GPUs.

On `cpu` the device, apex and TransformerEngine's optimizers are emulated. On `cuda` the device is real, and so are the
optimizers of TransformerEngine, else of apex, where they are installed: Megatron-Core's own order of preference. Where
neither is, the emulated classes step on the GPU with torch's kernels. What is emulated says so itself when it is used
(`used_symbols`), so that a result never depends on this choice being remembered.

*Does not verify* anything; no real optimizer of apex or TransformerEngine has been run through here yet.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec

import torch

from shardproof.emulation import apex
from shardproof.emulation.machine import Kind

OptimizerClass = Callable[..., torch.optim.Optimizer]

TE_OPTIMIZERS, APEX_OPTIMIZERS = "transformer_engine.pytorch.optimizers", "apex.optimizers"


@contextmanager
def on(device: str, kind: Kind = Kind()) -> Iterator[None]:  # noqa: B008  (frozen)
    """Inside, the library finds its GPU: the real one on `cuda`, otherwise an emulated one of this kind, with
    checkpoint managers forked."""
    if device == "cuda":
        yield
        return
    from shardproof.emulation import cuda, spawn

    with cuda.emulated(kind=kind), spawn.forked():
        yield


def fused_optimizers(device: str, *, precision_aware: bool) -> tuple[OptimizerClass, OptimizerClass]:
    """FusedAdam and FusedSGD as the library finds them on `device`: the twin steps with the same classes.

    Args:
        precision_aware: those of TransformerEngine are needed, apex's will not do.
    """
    source = real_source(device, precision_aware=precision_aware)
    if source is None:
        return apex.FusedAdam, apex.FusedSGD
    module = import_module(source)
    return module.FusedAdam, module.FusedSGD


def real_source(device: str, *, precision_aware: bool) -> str | None:
    """The module of the real fused optimizers that a process on `device` uses; None where they are emulated."""
    if device != "cuda":
        return None
    if _installed("transformer_engine"):
        return TE_OPTIMIZERS
    return APEX_OPTIMIZERS if _installed("apex") and not precision_aware else None


def provide(device: str, variant: str) -> bool:
    """Put beside the library what its variant (`plain`, `apex`, `te`) wants it to find; tells whether TransformerEngine
    is a stub.

    plain: neither apex nor TransformerEngine can be imported, whether they are installed or not.
    """
    if variant == "plain":
        for name in ("apex", "amp_C", "transformer_engine"):
            if device == "cuda":
                sys.modules[name] = None  # type: ignore[assignment]  # Python's own way to say: not here
        return False
    aware = variant == "te"
    if real_source(device, precision_aware=aware) is not None:
        return False
    apex.install(te_optimizers=aware)
    return aware


def _installed(package: str) -> bool:
    """Whether a package can be imported that is not a stub of ours."""
    loaded = sys.modules.get(package)
    if loaded is not None:
        return not (loaded.__doc__ or "").startswith("Emulated by shardproof")
    return package not in sys.modules and find_spec(package) is not None
