"""The names of TransformerEngine's layers, for libraries that derive classes from them at import and call none here.

NeMo Megatron-Bridge's LoRA layers do (`megatron.bridge.peft.lora_layers`), so that the package cannot be imported
without them. The classes have no behaviour and cannot be constructed. TransformerEngine itself stays absent.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from typing import Any

from torch import nn

LAYERS = ("Linear", "LayerNormLinear", "GroupedLinear", "TransformerLayer")
OPS = (
    "AddExtraInput", "ConstantScale", "Dropout", "LayerNorm", "Linear", "MakeExtraOutput", "Quantize", "RMSNorm",
    "Sequential",
)  # fmt: skip
SYMBOL = "transformer_engine.pytorch (names of layers only)"
"""What a result calls them."""


class Absent(nn.Module):
    """Base of every stand-in."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise RuntimeError(f"{type(self).__name__} is TransformerEngine's, which is not here: only its name is")


@contextmanager
def importable(version: str) -> Iterator[None]:
    """Inside, `import transformer_engine.pytorch` finds the names, of that version; afterwards it fails again.

    Import before whatever asks whether TransformerEngine is there, and would take the names for the package.

    Raises RuntimeError where the real package is loaded already.
    """
    if "transformer_engine" in sys.modules:
        raise RuntimeError("the real transformer_engine is loaded already; emulate it in a process without it")
    ops = types.SimpleNamespace(**{name: _layer(name) for name in OPS})
    pytorch = _module("transformer_engine.pytorch", ops=ops, **{name: _layer(name) for name in LAYERS})
    package = _module("transformer_engine", pytorch=pytorch, __version__=version)
    modules = {package.__name__: package, pytorch.__name__: pytorch}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in modules:
            del sys.modules[name]


def _layer(name: str) -> type[Absent]:
    return type(name, (Absent,), {})


def _module(name: str, **contents: Any) -> types.ModuleType:
    module = types.ModuleType(name, f"Emulated by shardproof: {__name__}.")
    module.__spec__ = ModuleSpec(name, None)
    module.__dict__.update(contents)
    return module
