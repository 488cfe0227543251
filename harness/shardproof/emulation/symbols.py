"""The symbols of `torch.cuda` and around it that are replaced while the device is emulated.

There is one device, always initialised; `machine` knows its ordinal. Streams and events do nothing: every operation
has ended when it returns, so what depends on their order is not exercised. Memory figures are 0.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed

from shardproof.emulation import collectives, machine, memory
from shardproof.emulation.functions import device_side
from shardproof.emulation.generator import GENERATOR
from shardproof.emulation.used_symbols import touch
from shardproof.ownership import hand_on

_barrier = torch.distributed.barrier
_make_wrapper: Any = torch.Tensor._make_wrapper_subclass
_enter_autocast: Any = torch.autocast.__enter__


class Event:
    """An event that has already happened."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        touch("torch.cuda.Event")

    def record(self, stream: Any = None) -> None:
        """Nothing to record: operations end when they return."""

    def wait(self, stream: Any = None) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        return True

    def elapsed_time(self, end_event: Event) -> float:
        return 0.0


class Stream:
    """A queue that is always empty."""

    cuda_stream = 0
    priority = 0

    def __init__(self, device: Any = None, priority: int = 0, **others: Any) -> None:
        touch("torch.cuda.Stream")
        device_side(device)

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", machine.current)

    @property
    def device_index(self) -> int:
        return machine.current

    def wait_event(self, event: Event) -> None:
        """Nothing to wait for."""

    def wait_stream(self, stream: Stream) -> None:
        """Nothing to wait for."""

    def record_event(self, event: Event | None = None) -> Event:
        return event or Event()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exception: object) -> None:
        """Does nothing: an emulated stream runs every kernel at once, so there is no previous stream to return to."""


class StreamContext:
    """`with torch.cuda.stream(s)`."""

    def __init__(self, stream: Any) -> None:
        touch("torch.cuda.stream")

    def __enter__(self) -> None:
        """Does nothing: an emulated device has no queue of kernels, so there is no current stream to switch."""

    def __exit__(self, *exception: object) -> None:
        """Nothing to switch back."""


_DEFAULT_STREAM = object.__new__(Stream)


def _constant(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value


def _get_rng_state(device: Any = "cuda") -> torch.Tensor:
    device_side(device)
    return GENERATOR.get_state()


def _set_rng_state(new_state: torch.Tensor, device: Any = "cuda") -> None:
    device_side(device)
    GENERATOR.set_state(new_state)


def _manual_seed(seed: int) -> None:
    GENERATOR.manual_seed(int(seed))


def _set_device(device: Any) -> None:
    index = device if isinstance(device, int) else torch.device(device).index
    machine.move_to(machine.current if index is None else index)


def _current_device(*args: Any) -> int:
    return machine.current


def _lazy_call(callback: Callable[[], Any], **kwargs: Any) -> None:
    callback()


@contextmanager
def _range(message: str, *args: Any, **kwargs: Any) -> Any:
    yield


def _barrier_without_devices(*args: Any, device_ids: Any = None, **kwargs: Any) -> Any:
    return hand_on(_barrier, *args, **kwargs)


def _properties(device: Any = None) -> types.SimpleNamespace:
    device_side(device)
    major, minor = machine.kind.capability
    return types.SimpleNamespace(
        name="emulated", major=major, minor=minor, multi_processor_count=1, total_memory=machine.kind.memory_bytes,
        warp_size=32,
    )  # fmt: skip


def _recorded(symbol: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        touch(symbol)
        return hand_on(function, *args, **kwargs)

    call.__name__ = symbol.rpartition(".")[2]
    return call


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "is_available": _constant(True),
    "is_initialized": _constant(True),
    "is_bf16_supported": _constant(True),
    "is_current_stream_capturing": _constant(False),
    "init": _constant(None),
    "_lazy_init": _constant(None),
    "_lazy_call": _lazy_call,
    "_exchange_device": _current_device,
    "_maybe_exchange_device": _current_device,
    "current_device": _current_device,
    "device_count": lambda: machine.devices,
    "set_device": _set_device,
    "synchronize": _constant(None),
    "_sleep": _constant(None),
    "empty_cache": _constant(None),
    "ipc_collect": _constant(None),
    "current_stream": _constant(_DEFAULT_STREAM),
    "default_stream": _constant(_DEFAULT_STREAM),
    "set_stream": _constant(None),
    "get_device_capability": lambda *args, **kwargs: machine.kind.capability,
    "get_device_name": _constant("emulated"),
    "get_device_properties": _properties,
    "get_rng_state": _get_rng_state,
    "set_rng_state": _set_rng_state,
    "get_rng_state_all": lambda: [_get_rng_state() for _ in range(machine.devices)],
    "set_rng_state_all": lambda states: _set_rng_state(states[machine.current]),
    "manual_seed": _manual_seed,
    "manual_seed_all": _manual_seed,
    "seed": lambda: _manual_seed(torch.seed()),
    "initial_seed": lambda: GENERATOR.initial_seed(),
    "memory_allocated": _constant(0),
    "max_memory_allocated": _constant(0),
    "memory_reserved": _constant(0),
    "max_memory_reserved": _constant(0),
    "reset_peak_memory_stats": _constant(None),
    "memory_stats": lambda *args, **kwargs: {},
    "mem_get_info": lambda *args, **kwargs: (machine.kind.memory_bytes,) * 2,
}
_IN_MEMORY = (
    "memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved", "reset_peak_memory_stats",
    "memory_stats", "mem_get_info", "empty_cache",
)  # fmt: skip
_IN_RANDOM = (
    "get_rng_state",
    "set_rng_state",
    "get_rng_state_all",
    "set_rng_state_all",
    "manual_seed",
    "manual_seed_all",
    "seed",
    "initial_seed",
)


CUDA = "13.0"
"""The version of CUDA that torch says it was built for. No emulated answer depends on it."""


def _autocast(self: Any) -> Any:
    """Stands for entering `torch.autocast`. Which functions cast, and to what, C++ decides by the real device of their
    inputs, so that the block would silently cast nothing.

    Raises NotImplementedError for a block of the device that casts.
    """
    if self.device == "cuda" and self._enabled:
        raise NotImplementedError(
            "torch.autocast('cuda') is not emulated: C++ looks at the real device, the CPU, and would cast nothing"
        )
    return hand_on(_enter_autocast, self)


def _wrapper(cls: Any, *args: Any, **named: Any) -> torch.Tensor:
    """Stands for `Tensor._make_wrapper_subclass`. A wrapper of a device that C++ lacks would end the process as soon as
    autograd looks for the device's streams."""
    device = named.get("device")
    side = device_side(device) if device is not None else None
    if side is not memory.Side.DEVICE:
        return cast(torch.Tensor, hand_on(_make_wrapper, cls, *args, **named))
    touch("device=cuda in Tensor._make_wrapper_subclass")
    made: torch.Tensor = hand_on(_make_wrapper, cls, *args, **(named | {"device": torch.device("cpu")}))
    memory.put_wrapper(made, side)
    return made


def _no_accelerator(check_available: bool = False) -> None:
    return None


def replacements() -> list[tuple[Any, str, Any]]:
    """(owner, attribute, stand-in) of every symbol that is replaced."""
    cuda: Any = torch.cuda
    recorded = {name: _recorded(f"torch.cuda.{name}", function) for name, function in _FUNCTIONS.items()}
    found: list[tuple[Any, str, Any]] = [(cuda, name, function) for name, function in recorded.items()]
    found += [(cuda.random, name, recorded[name]) for name in _IN_RANDOM]
    found += [(cuda.memory, name, recorded[name]) for name in _IN_MEMORY]
    found += [(cuda, "Stream", Stream), (cuda, "Event", Event), (cuda, "stream", StreamContext)]
    found += [(cuda, "StreamContext", StreamContext), (cuda, "default_generators", (GENERATOR,) * machine.devices)]
    for name, function in (("range_push", _constant(0)), ("range_pop", _constant(0)), ("mark", _constant(None))):
        found.append((cuda.nvtx, name, _recorded(f"torch.cuda.nvtx.{name}", function)))
    found.append((cuda.nvtx, "range", _recorded("torch.cuda.nvtx.range", _range)))
    found.append((torch._C, "_cuda_getDevice", _recorded("torch._C._cuda_getDevice", _current_device)))
    found.append((torch.Tensor, "record_stream", _recorded("Tensor.record_stream", _constant(None))))
    # A CUDA build of torch has an accelerator, a CPU build has none. The emulated device is no accelerator in either:
    # whoever asks torch.accelerator (torch.optim does, whether a graph is being captured) goes on to ask C++.
    found.append((torch.accelerator, "current_accelerator", _no_accelerator))
    found += [(torch.version, "cuda", CUDA), (torch.autocast, "__enter__", _autocast)]
    found.append((torch.Tensor, "_make_wrapper_subclass", staticmethod(_wrapper)))
    barrier = _recorded("torch.distributed.barrier(device_ids)", _barrier_without_devices)
    found += [(torch.distributed, "barrier", barrier), (torch.distributed.distributed_c10d, "barrier", barrier)]
    found += [(torch.distributed, name, function) for name, function in collectives.REPLACEMENTS.items()]
    return found
