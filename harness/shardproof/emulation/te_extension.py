"""TransformerEngine's compiled extension, `transformer_engine_torch`, as far as its Python layer needs it on a CPU.

`library()` imports the unmodified Python layer, over the real extension or over this module (`te_choice`). Emulated are
the enums, the multi-tensor kernels of the optimizers (`kernels`), casts to fp8 (`te_quantize`), and what constructing
layers asks for. Every other kernel is there by name
and refuses to be called, so that no result can rest on arithmetic that nobody wrote. While the package is imported,
triton, onnx and onnxscript (over 1 GB) are there by name too where they are not installed: it decorates kernels of its
own with the first, and declares operators for exports with the others.

Sources: `transformer_engine/pytorch/csrc/extensions/pybind.cpp`, `transformer_engine/common/util/pybind_helper.h`.
"""

from __future__ import annotations

import enum
import importlib
import importlib.metadata
import importlib.util
import os
import sys
import types
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any, NoReturn

import torch

from shardproof.emulation import kernels, names, te_choice, te_multi_tensor, te_quantize
from shardproof.emulation.te_multi_tensor import NAME, Lists, launched
from shardproof.emulation.used_symbols import touch
from shardproof.ownership import refused

_ENUMS: dict[str, tuple[str, ...]] = {
    "CommOverlapAlgo": ("BULK_OVERLAP_AG", "BULK_OVERLAP_RS", "SPLIT_PIPELINED_AG_P2P", "SPLIT_PIPELINED_RS",
                        "SPLIT_PIPELINED_RS_P2P", "ATOMIC_GEMM_RS", "ATOMIC_GEMM_AG_P2P", "ATOMIC_GEMM_RS_P2P",
                        "EXTERNAL_BULK_OVERLAP_AG"),
    "CommOverlapType": ("RS", "AG"),
    "FP8BwdTensors": ("GRAD_OUTPUT1", "GRAD_INPUT1", "GRAD_OUTPUT2", "GRAD_INPUT2", "GRAD_OUTPUT3", "GRAD_INPUT3"),
    "FP8FwdTensors": ("GEMM1_INPUT", "GEMM1_WEIGHT", "GEMM1_OUTPUT", "GEMM2_INPUT", "GEMM2_WEIGHT", "GEMM2_OUTPUT",
                      "GEMM3_INPUT", "GEMM3_WEIGHT", "GEMM3_OUTPUT"),
    "Float8BlockScaleTensorFormat": ("GEMM_READY", "COMPACT", "INVALID"),
    "NVTEQBHistogramMode": ("TWO_KERNEL", "FUSED_ATOMIC"),
    "NVTERoutingMapFormat": ("BYTEMAP", "BITMAP_U8"),
    "NVTEScalingMode": ("NVTE_DELAYED_TENSOR_SCALING", "NVTE_MXFP8_1D_SCALING", "NVTE_BLOCK_SCALING_1D",
                        "NVTE_BLOCK_SCALING_2D", "NVTE_NVFP4_1D_SCALING", "NVTE_INVALID_SCALING"),
    "NVTE_Bias_Type": ("NVTE_NO_BIAS", "NVTE_PRE_SCALE_BIAS", "NVTE_POST_SCALE_BIAS", "NVTE_ALIBI"),
    "NVTE_Fused_Attn_Backend": ("NVTE_F16_arbitrary_seqlen", "NVTE_FP8", "NVTE_No_Backend"),
    "NVTE_Mask_Type": ("NVTE_NO_MASK", "NVTE_PADDING_MASK", "NVTE_CAUSAL_MASK", "NVTE_PADDING_CAUSAL_MASK",
                       "NVTE_CAUSAL_BOTTOM_RIGHT_MASK", "NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK"),
    "NVTE_QKV_Format": ("NVTE_SBHD", "NVTE_BSHD", "NVTE_THD", "NVTE_BSHD_2SBHD", "NVTE_SBHD_2BSHD", "NVTE_THD_2BSHD",
                        "NVTE_THD_2SBHD", "NVTE_BHSD", "NVTE_QKV_Format_NOT_SET"),
    "NVTE_QKV_Layout": (
        "NVTE_SB3HD", "NVTE_SBH3D", "NVTE_SBHD_SB2HD", "NVTE_SBHD_SBH2D", "NVTE_SBHD_SBHD_SBHD", "NVTE_BS3HD",
        "NVTE_BSH3D", "NVTE_BSHD_BS2HD", "NVTE_BSHD_BSH2D", "NVTE_BSHD_BSHD_BSHD", "NVTE_T3HD", "NVTE_TH3D",
        "NVTE_THD_T2HD", "NVTE_THD_TH2D", "NVTE_THD_THD_THD", "NVTE_SBHD_BSHD_BSHD", "NVTE_BSHD_SBHD_SBHD",
        "NVTE_THD_BSHD_BSHD", "NVTE_THD_SBHD_SBHD", "NVTE_Paged_KV_BSHD_BSHD_BSHD", "NVTE_Paged_KV_BSHD_SBHD_SBHD",
        "NVTE_Paged_KV_SBHD_BSHD_BSHD", "NVTE_Paged_KV_SBHD_SBHD_SBHD", "NVTE_Paged_KV_THD_BSHD_BSHD",
        "NVTE_Paged_KV_THD_SBHD_SBHD", "NVTE_BHSD_BHSD_BHSD", "NVTE_QKV_Layout_NOT_SET"),
    "NVTE_Softmax_Type": ("NVTE_VANILLA_SOFTMAX", "NVTE_OFF_BY_ONE_SOFTMAX", "NVTE_LEARNABLE_SOFTMAX"),
}  # fmt: skip

_DTYPES = {"kByte": 0, "kInt32": 2, "kFloat32": 4, "kFloat16": 5, "kBFloat16": 6, "kFloat8E4M3": 7, "kFloat8E5M2": 8,
           "kFloat4E2M1": 10}  # fmt: skip

_NAMED = ("triton", "triton.language", "triton.language.core", "triton.language.standard", "triton.runtime",
          "triton.runtime.driver", "onnx", "onnx.defs", "onnxscript")  # fmt: skip


class FP8TensorMeta:
    """Scale, inverse scale and amax history of a group of tensors, as the extension's class of that name holds them."""

    def __init__(self) -> None:
        self.scale = torch.empty(0)
        self.scale_inv = torch.empty(0)
        self.amax_history = torch.empty(0)


class _Absent:
    """Base of the extension's classes that only exist here as names."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError(f"{type(self).__name__} of {NAME} is not emulated: it needs a GPU")


@torch.no_grad()
def multi_tensor_adam(chunk: int, noop: torch.Tensor, lists: Lists, lr: float, beta1: float, beta2: float, eps: float,
                      step: int, mode: int, bias_correction: int, weight_decay: float) -> None:  # fmt: skip
    """One Adam step. lists: gradients, parameters, first and second moments, and masters where there are any."""
    touch(f"{NAME}.multi_tensor_adam")
    scalars = _scalars(lr, beta1, beta2, eps, int(step), mode, bias_correction, weight_decay)
    for grad, param, *state in launched(chunk, lists):
        # fp32 moments are not copied, so that the kernel steps them in place
        moments = state[0].float(), state[1].float()
        stepped = state[2] if len(state) == 3 else param
        new = kernels.adam(scalars, grad, stepped, *moments)
        _store(state, moments)
        stepped.copy_(new)
        param.copy_(new)


@torch.no_grad()
def multi_tensor_adam_capturable(
    chunk: int, noop: torch.Tensor, lists: Lists, lr: torch.Tensor, beta1: float, beta2: float, eps: float,
    step: torch.Tensor, mode: int, bias_correction: int, weight_decay: float, inv_scale: torch.Tensor,
) -> None:  # fmt: skip
    """As `multi_tensor_adam`, of gradients that are multiplied by inv_scale first, in place; nothing if noop is set."""
    touch(f"{NAME}.multi_tensor_adam_capturable")
    if int(noop) == 1:
        return
    for grad in lists[0]:
        grad.mul_(inv_scale)
    multi_tensor_adam(chunk, noop, lists, float(lr), beta1, beta2, eps, int(step), mode, bias_correction, weight_decay)


@torch.no_grad()
def multi_tensor_adam_param_remainder(
    chunk: int, noop: torch.Tensor, lists: Lists, lr: float, beta1: float, beta2: float, eps: float, step: int,
    mode: int, bias_correction: int, weight_decay: float,
) -> None:  # fmt: skip
    """As `multi_tensor_adam`, of bf16 parameters whose masters' lower 16 bits are the last list (int16)."""
    touch(f"{NAME}.multi_tensor_adam_param_remainder")
    scalars = _scalars(lr, beta1, beta2, eps, int(step), mode, bias_correction, weight_decay)
    for grad, param, first, second, remainder in launched(chunk, lists):
        moments = first.float(), second.float()
        master = kernels.adam(scalars, grad, kernels.join_remainder(param, remainder), *moments)
        high, low = kernels.split_remainder(master)
        _store([first, second], moments)
        param.copy_(high)
        remainder.copy_(low)


@torch.no_grad()
def multi_tensor_adam_fp8(
    chunk: int, noop: torch.Tensor, lists: Lists, lr: float, beta1: float, beta2: float, eps: float, step: int,
    mode: int, bias_correction: int, weight_decay: float, fp8_dtype: Any,
) -> None:  # fmt: skip
    """As `multi_tensor_adam`, of FP8 parameters (bytes) with masters; behind the masters the lists of their scales,
    largest magnitudes and inverse scales.

    Raises:
        RuntimeError: moments or masters that are not fp32.
    """
    touch(f"{NAME}.multi_tensor_adam_fp8")
    scalars = _scalars(lr, beta1, beta2, eps, int(step), mode, bias_correction, weight_decay)
    meta = {param.data_ptr(): own for param, *own in zip(lists[1], *lists[5:], strict=True)}
    for words, tensors in zip(("First moment", "Second moment", "Master param"), lists[2:5], strict=True):
        for number, tensor in enumerate(tensors):  # multi_tensor_adam_fp8_cuda checks the same
            if tensor.dtype is not torch.float32:
                has = str(tensor.dtype).removeprefix("torch.")
                raise refused(RuntimeError(f"{words} tensor {number} has dtype={has}, but expected dtype=Float32"))
    for grad, param, first, second, master in launched(chunk, lists[:5]):
        master.copy_(kernels.adam(scalars, grad, master, first, second))
        te_quantize.store(master, param, meta[param.data_ptr()], fp8_dtype)


def _store(stored: list[torch.Tensor], moments: Iterable[torch.Tensor]) -> None:
    for old, new in zip(stored, moments, strict=False):
        if old is not new:
            old.copy_(new)


def _scalars(lr: float, beta1: float, beta2: float, eps: float, step: int, mode: int, bias_correction: int,
             weight_decay: float) -> kernels.AdamScalars:  # fmt: skip
    return kernels.AdamScalars.from_hyperparameters(
        float(lr), (beta1, beta2), eps, weight_decay, step, decoupled=bool(mode), bias_correction=bool(bias_correction)
    )


_FUNCTIONS: tuple[Callable[..., Any], ...] = (
    multi_tensor_adam, multi_tensor_adam_capturable, multi_tensor_adam_fp8, multi_tensor_adam_param_remainder,
    *te_multi_tensor.FUNCTIONS, te_quantize.create_empty_quantized_tensor, te_quantize.dequantize,
    te_quantize.fp8_transpose, te_quantize.fused_amax_and_scale_update_after_reduction, te_quantize.quantize,
)  # fmt: skip

_CONSTANTS: dict[str, int] = {"get_cublasLt_version": 130000, "get_cudnn_version": 91800, "get_num_cublas_streams": 4}
"""Versions and counts that the Python layer asks for while it is imported or layers are built."""


class _Extension(types.ModuleType):
    """The module object: kernels without an emulation are made when they are looked up."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def refuse(*_: Any, **__: Any) -> NoReturn:
            raise NotImplementedError(f"{NAME}.{name} is not emulated: it needs a GPU")

        refuse.__name__ = refuse.__qualname__ = name
        return refuse


def extension(*, short_attention: bool = False) -> types.ModuleType:
    """The emulated extension as a module object, not yet installed anywhere.

    short_attention: with the attention backend for up to 512 tokens, which 2.16 removed. The Python layer checks that
    it and the extension know the same backends.
    """
    module = _Extension(NAME, f"Emulated by shardproof: {__name__}.")
    module.__spec__ = ModuleSpec(NAME, None)
    contents: dict[str, Any] = {name: _enum(name, enumerate_(words)) for name, words in _ENUMS.items()}
    if short_attention:
        backends = ("NVTE_F16_max512_seqlen", *_ENUMS["NVTE_Fused_Attn_Backend"])
        contents["NVTE_Fused_Attn_Backend"] = _enum("NVTE_Fused_Attn_Backend", enumerate_(backends))
    contents["DType"] = _enum("DType", _DTYPES.items())
    contents["FP8TensorMeta"] = FP8TensorMeta
    for name in ("CommOverlap", "CommOverlapHelper", "CommOverlapP2P", "CommOverlapCore", "CommOverlapBase"):
        contents[name] = type(name, (_Absent,), {})
    contents |= {function.__name__: function for function in _FUNCTIONS}
    contents["multi_tensor_adam_capturable_master"] = multi_tensor_adam_capturable
    contents |= {name: _constant(value) for name, value in _CONSTANTS.items()}
    module.__dict__.update(contents)
    return module


def enumerate_(words: Iterable[str]) -> list[tuple[str, int]]:
    """Members in the order of the C++ declaration, from 0."""
    return [(word, number) for number, word in enumerate(words)]


def _enum(name: str, members: Iterable[tuple[str, int]]) -> Any:
    return enum.IntEnum(name, list(members), module=NAME)


def _constant(value: int) -> Callable[[], int]:
    return lambda: value


@cache
def library(device: str = "cpu") -> str:
    """Import TransformerEngine, once a process: `real` or `emulated`, what its extension is.

    Raises what the import raises; UsageError as `te_choice.choice`; RuntimeError where the real one is not installed.
    """
    kind = te_choice.choice(device).kind
    if kind == te_choice.REAL:
        if not _has_real():
            raise RuntimeError(f"{NAME} is not installed, on {device}: pip install 'shardproof[te]'")
        importlib.import_module("transformer_engine.pytorch")
        return kind
    _know_the_version()
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # a switch of upstream's own, under which it loads no shared objects
    folder = _folder()
    attention = (folder / "pytorch/cpp_extensions/fused_attn.py").read_text("utf-8")
    sys.modules[NAME] = extension(short_attention="max512" in attention)
    common = _common(folder / "common")
    common.load_framework_extension = lambda framework: None  # type: ignore[attr-defined]
    with names.importable(_NAMED):
        package = importlib.import_module("transformer_engine")
        package.common = common  # type: ignore[attr-defined]
        importlib.import_module("transformer_engine.pytorch")
    torch.maximum = kernels.maximum  # FusedAdam's scale of a state of zeros depends on it
    return kind


def _has_real() -> bool:
    """Whether the compiled extension lies beside the package, or in this interpreter, to be loaded."""
    folder = _folder()
    places = (folder, folder.parent, folder / "wheel_lib", *map(Path, sys.path))
    return any(any(place.glob(f"{NAME}*.so")) for place in places if place.is_dir())


def _folder() -> Path:
    """Where the package lies, without importing it. ModuleNotFoundError where there is none."""
    spec = importlib.util.find_spec("transformer_engine")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("No module named 'transformer_engine'", name="transformer_engine")
    return Path(next(iter(spec.submodule_search_locations)))


def _common(folder: Path) -> types.ModuleType:
    """Import `transformer_engine.common` before the package that imports it, with a loader of shared objects that
    loads nothing."""
    spec = importlib.util.spec_from_file_location(
        "transformer_engine.common", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module
    spec.loader.exec_module(module)
    return module


_ANY = importlib.metadata.DistributionFinder.Context()


class _Finder(importlib.metadata.DistributionFinder):
    """Answers for a source tree, which has no installed metadata, when it asks for its own version."""

    def find_distributions(
        self, context: importlib.metadata.DistributionFinder.Context = _ANY
    ) -> Iterable[importlib.metadata.Distribution]:
        if (context.name or "").replace("-", "_") == "transformer_engine":
            yield _Tree()

    def find_spec(self, *_: Any) -> None:
        """Finds no modules."""


class _Tree(importlib.metadata.Distribution):
    def read_text(self, filename: str) -> str | None:
        return "Metadata-Version: 2.1\nName: transformer_engine\nVersion: 0\n" if filename == "METADATA" else None

    def locate_file(self, path: Any) -> Path:
        return Path(path)


def _know_the_version() -> None:
    with suppress(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("transformer_engine")
        return
    sys.meta_path.append(_Finder())
