"""Empty stand-ins for packages that a library imports but does not need here, such as `triton` and `onnx`.

A library decorates kernels of its own with `@triton.jit` while it is imported, on machines that never call one. Here
that import works, and a kernel that is called after all refuses.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from typing import Any, NoReturn

from torch.utils._triton import has_triton_package

TRITON = (
    "triton", "triton.language", "triton.language.core", "triton.language.standard", "triton.runtime",
    "triton.runtime.driver",
)  # fmt: skip


class Kernel:
    """A function that was decorated as a kernel. It has its name, and cannot be launched."""

    def __init__(self, function: types.FunctionType, decorator: str) -> None:
        self.fn, self.__name__, self.__doc__ = function, function.__name__, function.__doc__
        self.decorator = decorator

    def _refuse(self) -> NoReturn:
        raise NotImplementedError(f"{self.__name__} is compiled by {self.decorator}, which is only here by name")

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        self._refuse()

    def __getitem__(self, grid: Any) -> NoReturn:
        self._refuse()


class Name(types.ModuleType):
    """A package that is not here, and everything in it: a decorator makes a `Kernel`, a value is none."""

    def __init__(self, name: str) -> None:
        super().__init__(name, f"Emulated by shardproof: {__name__}.")
        self.__path__: list[str] = []
        self.__spec__ = ModuleSpec(name, None, is_package=True)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__version__":
            raise AttributeError(name)
        return "0" if name == "__version__" else Name(f"{self.__name__}.{name}")

    def __call__(self, *args: Any, **_: Any) -> Any:
        decorates = len(args) == 1 and isinstance(args[0], types.FunctionType | Kernel)
        if not decorates:
            return self
        return args[0] if isinstance(args[0], Kernel) else Kernel(args[0], self.__name__)


def refusing(name: str, **parts: tuple[str, ...]) -> None:
    """Make a package importable until the process ends, with those functions in each of its parts, which refuse to be
    called. For example `refusing("grouped_gemm", ops=("gmm",))`. One that is installed stays."""
    if _installed(name):
        return
    package = types.ModuleType(name, f"Emulated by shardproof: {__name__}.")
    package.__spec__ = ModuleSpec(name, None)
    for part, functions in parts.items():
        setattr(package, part, types.SimpleNamespace(**{one: _refused(f"{name}.{part}.{one}") for one in functions}))
    sys.modules[name] = package


def _refused(name: str) -> Callable[..., NoReturn]:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(f"{name} is not emulated: it needs a GPU")

    return refuse


@contextmanager
def importable(names: Iterable[str]) -> Iterator[None]:
    """Inside, those of the packages that are not installed can be imported, and mean nothing."""
    missing = [name for name in names if name not in sys.modules and not _installed(name.partition(".")[0])]
    has_triton_package()  # torch remembers the answer, which has to be the true one
    added = {name: Name(name) for name in missing}
    sys.modules.update(added)
    try:
        yield
    finally:
        for name in added:
            sys.modules.pop(name, None)


@contextmanager
def untuned() -> Iterator[None]:
    """Inside, `triton.autotune` leaves a kernel as it is, where triton is installed: what it checks while a library is
    imported concerns a launch, and nothing is launched on a CPU."""
    if not _installed("triton"):
        yield
        return
    triton: Any = importlib.import_module("triton")
    autotune, triton.autotune = triton.autotune, lambda *_, **__: lambda kernel: kernel
    try:
        yield
    finally:
        triton.autotune = autotune


def _installed(package: str) -> bool:
    loaded = sys.modules.get(package)
    return not isinstance(loaded, Name) if loaded is not None else importlib.util.find_spec(package) is not None
