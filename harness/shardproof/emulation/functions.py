"""The torch function mode that gives every torch function its meaning when host and device memory are kept apart.

*Verifies* that an operation does not read host and device tensors together (`copy_` and a few others may), that only a
copy crosses, that results live where their inputs do. *Does not verify* what C++ does by itself (autograd's kernels,
collectives), nor what threads do that were not started under the emulation.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from shardproof.emulation import machine, memory
from shardproof.emulation.generator import on_device_generator
from shardproof.emulation.memory import Side
from shardproof.emulation.used_symbols import touch
from shardproof.ownership import hand_on, refused

Function = Callable[..., Any]
Handler = Callable[[Function, tuple[Any, ...], dict[str, Any]], Any]

_TENSOR: Any = torch.Tensor


def _named(names: str, *owners: Any) -> frozenset[Function]:
    found = (getattr(owner, name, None) for owner in owners for name in names.split())
    return frozenset(function for function in found if function is not None)


_FACTORIES = _named(
    """arange bartlett_window blackman_window empty empty_permuted empty_strided eye frombuffer from_file
    from_numpy full hamming_window hann_window kaiser_window linspace logspace ones rand randint randn randperm
    range scalar_tensor tril_indices triu_indices zeros""",
    torch,
)
_CROSSING = _named("copy_ view_as expand_as reshape_as is_same_size", torch.Tensor) | _named(
    "_foreach_copy_ is_same_size result_type _has_compatible_shallow_copy_type", torch
)
_RANDOM = _named(
    """alpha_dropout bernoulli bernoulli_ binomial cauchy_ dropout dropout1d dropout2d dropout3d exponential_
    feature_alpha_dropout feature_dropout geometric_ gumbel_softmax log_normal_ multinomial native_dropout normal
    normal_ poisson rand rand_like randint randint_like randn randn_like randperm random_ rrelu
    scaled_dot_product_attention uniform_ kaiming_normal_ kaiming_uniform_ orthogonal_ sparse_ trunc_normal_
    xavier_normal_ xavier_uniform_""",
    torch,
    torch.Tensor,
    torch.nn.functional,
    torch.nn.init,
)
# Functions that neither make a tensor nor read values. They are most calls of a run, and no side matters to them.
_INERT = _named(
    """__hash__ __len__ data_ptr dim element_size is_complex is_contiguous is_floating_point is_signed nelement numel
    requires_grad_ retain_grad size storage storage_offset stride untyped_storage""",
    torch.Tensor,
) | frozenset(
    getter.__get__
    for getter in _named("dtype grad_fn is_leaf layout nbytes ndim requires_grad retains_grad shape", torch.Tensor)
)


def device_side(device: Any) -> Side | None:
    """The side that a `device=` argument names; None for None and for devices that are not ours (meta).

    Raises RuntimeError for an ordinal that the one emulated device does not have, as CUDA does.
    """
    if device is None:
        return None
    if isinstance(device, int):
        kind, index = "cuda", device
    else:
        named = torch.device(device)
        kind, index = named.type, named.index
    if kind == "cpu":
        return Side.HOST
    if kind != "cuda":
        return None
    machine.check(index)
    return Side.DEVICE


class _Running(threading.local):
    """The side of the function that is handed on now, if any is."""

    side: Side | None = None


_running = _Running()


def settle(tensor: torch.Tensor) -> None:
    """Put what a function has made, and has not returned yet, where the function runs."""
    if _running.side is not None:
        memory.put(tensor, _running.side)


class TwoMemories(TorchFunctionMode):
    """Keeps host and device apart for the thread that entered it."""

    def __torch_function__(
        self, func: Function, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _INERT:
            return hand_on(func, *args, **kwargs) if kwargs else hand_on(func, *args)
        named = dict(kwargs) if kwargs else {}
        special = _SPECIAL.get(func)
        if special is not None:
            return special(func, args, named)
        return _ordinary(func, args, named)


def in_force() -> bool:
    """Whether the mode is active now: it is off inside the functions that it intercepts."""
    return any(isinstance(mode, TwoMemories) for mode in _get_current_function_mode_stack())  # type: ignore[no-untyped-call]


def _ordinary(func: Function, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    asked = _take_device(func, named)
    side = asked or _side_of_inputs(func, args, named)
    pinned = bool(named.pop("pin_memory", False))
    if pinned and asked is Side.DEVICE:
        raise refused(RuntimeError("Only dense CPU tensors can be pinned"))
    outer, _running.side = _running.side, side
    try:
        if side is Side.DEVICE and func in _RANDOM and named.get("generator") is None:
            with on_device_generator():
                result = hand_on(func, *args, **named)
        else:
            result = hand_on(func, *args, **named)
    finally:
        _running.side = outer
    _put_all(result, side)
    if pinned:
        memory.pin(result)
    return result


def _take_device(func: Function, named: dict[str, Any]) -> Side | None:
    """Replace a `device=` of ours by the CPU, where the values really are."""
    device = named.get("device")
    asked = device_side(device)
    if asked is None:
        return Side.HOST if device is None and func in _FACTORIES else None
    if asked is Side.DEVICE:
        touch(f"device=cuda in {_name(func)}")
        named["device"] = "cpu"
    return asked


def _put_all(result: Any, side: Side) -> Any:
    if isinstance(result, torch.Tensor):
        memory.put(result, side)
    elif isinstance(result, list | tuple):
        for tensor in memory.tensors_in(result):
            memory.put(tensor, side)
    return result


def _side_of_inputs(func: Function, args: tuple[Any, ...], named: Mapping[str, Any]) -> Side:
    """Where an operation runs: on the device as soon as one input is there.

    Raises RuntimeError where a host tensor of one dim or more would be read with it, as CUDA kernels refuse.
    """
    device, host, unknown, first = False, False, False, None
    for tensor in memory.tensors_in((*args, *named.values()) if named else args):
        tag = memory.tag_of(tensor)
        first = first or tag
        if tag is Side.DEVICE:
            device = True
        elif tag is Side.HOST:
            host = host or tensor.dim() > 0
        else:
            unknown = True
    if device and host and func not in _CROSSING:
        raise _two_devices(func)
    if device and host:
        return first or Side.HOST
    if device:
        return Side.DEVICE
    if first is None and unknown:
        return memory.unknown_side()
    return Side.HOST


def _two_devices(func: Function) -> RuntimeError:
    return refused(
        RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! "
            f"(in {_name(func)}, emulated device)"
        )
    )


def _name(func: Function) -> str:
    name = getattr(func, "__name__", repr(func))
    owner = getattr(func, "__objclass__", None) or getattr(func, "__self__", None)
    if name in ("__get__", "__set__"):
        return f"Tensor.{getattr(owner, '__name__', name)}"
    return f"Tensor.{name}" if getattr(torch.Tensor, name, None) is func else f"torch.{name}"


def cross(tensor: torch.Tensor, result: torch.Tensor, side: Side) -> torch.Tensor:
    """`result` on a side, of a tensor that was to be moved there, perhaps with another dtype: a copy wherever it
    would still share memory with `tensor`."""
    if memory.tag_of(tensor) is not side and _aliases(tensor, result):
        result = result.clone()
    memory.put(result, side)
    return result


def _aliases(one: torch.Tensor, other: torch.Tensor) -> bool:
    storage = memory.storage_of(one)
    return storage is not None and storage is memory.storage_of(other)


def _to(func: Function, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    tensor, *rest = args
    side = None
    if "device" in named:
        side = device_side(named["device"])
        named["device"] = "cpu" if side else named["device"]
    elif "other" in named:
        side = memory.tag_of(named["other"])
    elif rest and isinstance(rest[0], torch.Tensor):
        side = memory.tag_of(rest[0])
    elif rest and isinstance(rest[0], str | int | torch.device) and not isinstance(rest[0], bool):
        side = device_side(rest[0])
        rest[0] = "cpu" if side else rest[0]
    return _moved(func, tensor, rest, named, side, "Tensor.to(cuda)")


def _moved(
    func: Function, tensor: torch.Tensor, rest: list[Any], named: dict[str, Any], side: Side | None, symbol: str
) -> Any:
    here = memory.resolve(tensor)
    result = hand_on(func, tensor, *rest, **named)
    if side is None:
        memory.put(result, here)
        return result
    if Side.DEVICE in (side, here):
        touch(symbol)
    return cross(tensor, result, side)


def _as_tensor(func: Function, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """torch.tensor, as_tensor and asarray: of a tensor, on its side unless told; of other data, on the host."""
    side = device_side(named.get("device"))
    if side:
        named["device"] = "cpu"
    symbol = f"device=cuda in {_name(func)}"
    if args and isinstance(args[0], torch.Tensor):
        return _moved(func, args[0], list(args[1:]), named, side, symbol)
    result = hand_on(func, *args, **named)
    if side is Side.DEVICE:
        touch(symbol)
        result = result.clone()  # a NumPy array's memory stays the host's
    memory.put(result, side or Side.HOST)
    return result


def _cuda(func: Function, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    device_side(args[1] if len(args) > 1 else named.get("device"))
    touch("Tensor.cuda")
    return cross(args[0], args[0], Side.DEVICE)


def _cpu(func: Function, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    touch("Tensor.cpu")
    return cross(args[0], hand_on(func, *args, **named), Side.HOST)


def _pin_memory(func: Function, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    touch("Tensor.pin_memory")
    tensor = args[0]
    if memory.resolve(tensor) is Side.DEVICE:
        raise refused(RuntimeError(f"cannot pin '{_type_name(tensor)}' only dense CPU tensors can be pinned"))
    if memory.is_pinned(tensor):
        return tensor
    result = tensor.clone()
    memory.put(result, Side.HOST)
    memory.pin(result)
    return result


def _is_pinned(func: Function, args: tuple[Any, ...], named: dict[str, Any]) -> bool:
    touch("Tensor.is_pinned")
    return memory.is_pinned(args[0])


def _is_cuda(func: Function, args: tuple[Any, ...], named: dict[str, Any]) -> bool:
    touch("Tensor.is_cuda")
    return memory.resolve(args[0]) is Side.DEVICE


def _is_cpu(func: Function, args: tuple[Any, ...], named: dict[str, Any]) -> bool:
    return bool(hand_on(func, *args)) and memory.resolve(args[0]) is Side.HOST


def _device(func: Function, args: tuple[Any, ...], named: dict[str, Any]) -> torch.device:
    real: torch.device = hand_on(func, *args)
    if real.type != "cpu" or memory.resolve(args[0]) is Side.HOST:
        return real
    touch("Tensor.device")
    return torch.device("cuda", machine.current)


def _get_device(func: Function, args: tuple[Any, ...], named: dict[str, Any]) -> int:
    touch("Tensor.get_device")
    return machine.current if memory.resolve(args[0]) is Side.DEVICE else -1


def _type_name(tensor: torch.Tensor) -> str:
    name = tensor.type()
    return name.replace("torch.", "torch.cuda.", 1) if memory.resolve(tensor) is Side.DEVICE else name


def _type(func: Function, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    tensor, *rest = args
    wanted = rest[0] if rest else named.pop("dtype", None)
    if wanted is None:
        touch("Tensor.type")
        return _type_name(tensor)
    if isinstance(wanted, torch.dtype):
        return _moved(func, tensor, [wanted, *rest[1:]], named, None, "Tensor.type")
    name = wanted if isinstance(wanted, str) else f"{wanted.__module__}.{wanted.__name__}"
    side = Side.DEVICE if name.startswith("torch.cuda.") else Side.HOST
    return _moved(func, tensor, [name.replace("torch.cuda.", "torch.", 1), *rest[1:]], named, side, "Tensor.type(cuda)")


def _get_item(func: Function, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """Host indices may index a device tensor; device indices may not index a host tensor."""
    tensor, index = args
    side = memory.tag_of(tensor) or memory.unknown_side()
    if side is Side.HOST and Side.DEVICE in _sides_of_indices(index):
        raise refused(RuntimeError("indices should be either on cpu or on the same device as the indexed tensor (cpu)"))
    return _put_all(hand_on(func, *args), side)


def _set_item(func: Function, args: tuple[Any, ...], named: dict[str, Any]) -> None:
    """Assignment to a slice takes values from either side. An index made of tensors takes them from its own side
    only, except for a single number."""
    tensor, index, value = args
    side = memory.tag_of(tensor)
    indices = _sides_of_indices(index)
    if side is Side.HOST and Side.DEVICE in indices:
        raise refused(RuntimeError("indices should be either on cpu or on the same device as the indexed tensor (cpu)"))
    if indices and isinstance(value, torch.Tensor) and value.dim() and {side, memory.tag_of(value)} == set(Side):
        raise _two_devices(func)
    hand_on(func, *args)


def _sides_of_indices(index: Any) -> set[Side | None]:
    return {memory.tag_of(tensor) for tensor in memory.tensors_in((index,)) if tensor.dim()}


def _set_data(func: Function, args: tuple[Any, ...], named: dict[str, Any]) -> None:
    hand_on(func, *args)


def _get_grad(func: Function, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    grad = hand_on(func, *args)
    if grad is not None:
        memory.put(grad, memory.resolve(args[0]))
    return grad


def _set_grad(func: Function, args: tuple[Any, ...], named: dict[str, Any]) -> None:
    _, grad = args
    sides = {memory.tag_of(value) for value in args if isinstance(value, torch.Tensor)} - {None}
    if grad is not None and len(sides) > 1:
        raise refused(RuntimeError("assigned grad has data located on a different device"))
    hand_on(func, *args)


def _numpy(func: Function, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    if memory.resolve(args[0]) is Side.DEVICE:
        raise refused(
            TypeError(
                "can't convert cuda:0 device type tensor to numpy. "
                "Use Tensor.cpu() to copy the tensor to host memory first."
            )
        )
    return hand_on(func, *args, **named)


def _make_device(func: Function, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """torch.device of an ordinal alone asks C++ which accelerator there is, and a CPU build has none."""
    ordinal = args[0] if args else named.get("device")
    if isinstance(ordinal, int) and not isinstance(ordinal, bool):
        return torch.device("cuda", ordinal)
    return hand_on(func, *args, **named)


def _type_as(func: Function, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    tensor, other = args[0], args[1] if len(args) > 1 else named["other"]
    return _moved(torch.Tensor.to, tensor, [other.dtype], {}, memory.resolve(other), "Tensor.type_as(cuda)")


_SPECIAL: dict[Function, Handler] = {
    torch.device: _make_device,
    torch.Tensor.to: _to,
    torch.Tensor.cuda: _cuda,
    torch.Tensor.cpu: _cpu,
    torch.Tensor.pin_memory: _pin_memory,
    torch.Tensor.is_pinned: _is_pinned,
    torch.Tensor.type: _type,
    torch.Tensor.type_as: _type_as,
    torch.Tensor.get_device: _get_device,
    torch.get_device: _get_device,
    torch.Tensor.numpy: _numpy,
    torch.Tensor.__array__: _numpy,
    torch.tensor: _as_tensor,
    torch.as_tensor: _as_tensor,
    torch.asarray: _as_tensor,
    torch.Tensor.__getitem__: _get_item,
    torch.Tensor.__setitem__: _set_item,
    _TENSOR.data.__set__: _set_data,
    _TENSOR.is_cuda.__get__: _is_cuda,
    _TENSOR.is_cpu.__get__: _is_cpu,
    _TENSOR.device.__get__: _device,
    _TENSOR.grad.__get__: _get_grad,
    _TENSOR.grad.__set__: _set_grad,
}
