"""The kernels of torch.optim whose result for an element depends on the element's position in the tensor.

A scenario that steps with one of them has no single right answer: the result of an element depends on where
it lies in its shard, so that any two meshes disagree. The space excludes them, with the reason given here.
Measured on torch 2.13 (CPU, `ATEN_CPU_CAPABILITY=default`, one thread) over every optimizer kind, implementation
and dtype of `scenario`; `tests/properties/test_kernels.py` repeats the measurement. Pure data: no imports.

These are kernels of the CPU. Of CUDA's none is known to depend on the position, and no machine has been asked yet:
tests/gpu/test_gpu_kernels.py asks where there is a GPU.
"""

from __future__ import annotations

_FUSED_HALF_SGD = (
    "torch's fused CPU SGD never writes back the parameters of whole vector blocks in half precision and reads "
    "the momentum buffer as if it were fp32 (past its end); only the last numel % 16 elements of a tensor are updated"
)

POSITION_DEPENDENT: dict[tuple[str, str, str], str] = {
    ("sgd", "fused", "bf16"): _FUSED_HALF_SGD,
    ("sgd", "fused", "fp16"): _FUSED_HALF_SGD,
}
"""(optimizer kind, implementation, dtype of the stepped tensor) → why its result depends on the position."""
