"""Names in the pickles of TransformerEngine's checkpoints: fp8 tensors with one scale (Float8Tensor.__reduce_ex__)."""

from __future__ import annotations

from shardproof.readers.symbolic import Name, Node
from shardproof.readers.values import TORCH_DTYPE, Quantised, Tensor
from shardproof.readers.vocabulary import Decode, Vocabulary

FLOAT8_DTYPES = (Name("transformer_engine.pytorch.constants", "DType"), Name("transformer_engine_torch", "DType"))
E4M3 = 7
"""Number of fp8e4m3 in the extension's enumeration."""


def float8(args: tuple[object, ...], decode: Decode) -> Quantised | None:
    """The tensor that a call of `_make_float8_tensor_in_reduce_ex` describes; None where it is none in fp8e4m3 with
    one fp32 scale."""
    match args:
        case (data, Node(function=kind, args=(number,)), scale, Name(module="torch", name=name), *_):
            stored, inverse = decode(data), decode(scale)
            if not isinstance(stored, Tensor) or not isinstance(inverse, Tensor):
                return None
            of_bytes = stored.dtype == "uint8" and inverse.dtype == "fp32" and inverse.numel == 1
            if of_bytes and kind in FLOAT8_DTYPES and number == E4M3 and name in TORCH_DTYPE:
                return Quantised(stored, inverse, TORCH_DTYPE[name])
    return None


VOCABULARY = Vocabulary(
    tensors={Name("transformer_engine.pytorch.tensor.float8_tensor", "_make_float8_tensor_in_reduce_ex"): float8}
)
