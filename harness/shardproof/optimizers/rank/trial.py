"""First checks of an optimizer class in a warm worker: it can be imported, is an optimizer, and accepts the given
arguments."""

from __future__ import annotations

import importlib
import inspect
import json
import sys
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Any

import torch

from shardproof.optimizers.request import Asked

_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def serve(payload: bytes) -> bytes:
    """Worker entry. The request is JSON: `path` and `arguments` of an `Asked`. The answer is JSON: `wrong` with
    `what`, `given`, `allowed`, where something is; else what `_about` says."""
    request = json.loads(payload)
    asked = Asked(request["path"], tuple(map(tuple, request["arguments"])))
    cls, wrong = _class(asked)
    wrong = wrong or _arguments(asked, cls)
    return json.dumps({"wrong": wrong} if wrong else _about(asked, cls)).encode()


def _class(asked: Asked) -> tuple[Any, dict[str, Any] | None]:
    try:
        module = importlib.import_module(asked.module)
    except ModuleNotFoundError as error:
        allowed = f"a class of a module that imports here: there is no module {error.name}, so install the package "
        allowed += "that has it beside shardproof with pip, or name an environment that has it with --python"
        return None, _wrong("IMPORT.PATH", asked.path, allowed)
    except Exception as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())
        return None, _wrong("IMPORT.PATH", asked.path, f"a class of a module that imports here ({why})")
    found = getattr(module, asked.name, None)
    if not (inspect.isclass(found) and issubclass(found, torch.optim.Optimizer)):
        here = [n for n, c in vars(module).items() if inspect.isclass(c) and issubclass(c, torch.optim.Optimizer)]
        names = ", ".join(sorted(name for name in here if name != "Optimizer" and not name.startswith("_")))
        kinds = "a subclass of torch.optim.Optimizer" + (f"; those of {asked.module}: {names}" if names else "")
        return None, _wrong("IMPORT.PATH", asked.path, kinds) | {"foreign": inspect.isclass(found)}
    return found, None


def _arguments(asked: Asked, cls: Any) -> dict[str, Any] | None:
    """The reply for wrong constructor arguments: an unknown argument, or a required argument that is absent. None if
    the arguments fit."""
    known, given = parameters_of(cls), dict(asked.arguments)
    named = [name for name, parameter in known.items() if parameter.kind in _NAMED]
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in known.values())
    strange = [name for name in given if name not in named and not takes_any]
    if strange:
        return _wrong("--arg", strange[0], ", ".join(named) or f"nothing: {asked.name} takes no arguments")
    absent = [
        name for name in named if known[name].default is inspect.Parameter.empty and name not in given and name != "lr"
    ]
    if absent:
        text = f"{asked.name}, which needs an argument: --arg {absent[0]}=VALUE"
        return _wrong("--arg", " ".join(f"{n}={v}" for n, v in given.items()) or "none", text)
    return None


def parameters_of(cls: type) -> dict[str, inspect.Parameter]:
    """What a class's constructor takes behind `self` and the parameters."""
    found = list(inspect.signature(cls.__init__).parameters.values())  # type: ignore[misc]
    return {parameter.name: parameter for parameter in found[2:]}


def _about(asked: Asked, cls: Any) -> dict[str, Any]:
    """distribution and version; `home`: the folder whose code is the optimizer's own; `closure`: whether its step
    cannot do without one."""
    top = cls.__module__.partition(".")[0]
    file = Path(inspect.getfile(cls)).resolve()
    root = sys.modules[top].__file__
    home = file.parent if top == "torch" or root is None else Path(root).resolve().parent
    if root is not None and Path(root).name != "__init__.py":
        home = Path(root).resolve()
    names = packages_distributions().get(top, [top])
    closure = inspect.signature(cls.step).parameters.get("closure")
    return {
        "distribution": names[0],
        "version": _version(names[0]),
        "torch": version("torch"),
        "home": str(home),
        "closure": closure is not None and closure.default is inspect.Parameter.empty,
    }


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except ImportError:
        return ""


def _wrong(what: str, given: str, allowed: str) -> dict[str, Any]:
    return {"what": what, "given": given, "allowed": allowed}
