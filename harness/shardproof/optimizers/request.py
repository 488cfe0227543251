"""The optimizer that a command line asks about: its import path and its constructor's arguments. No torch."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shardproof.errors import UsageError
from shardproof.scenario import Mesh

FORM = "shardproof optimizer torch.optim.AdamW"
ARGUMENT_FORM = "--arg betas=(0.9,0.95)"
VARIABLE = "SHARDPROOF_OPTIMIZERS"
"""Environment variable of a server: modules to import before its first fork, separated by commas."""

_WORDS = {"true": True, "false": False, "none": None}


@dataclass(frozen=True)
class Asked:
    """An optimizer's class and how it is constructed.

    * path: `module.Class`, as an import statement would name it.
    * arguments: `(name, text)` of what the constructor gets besides parameters and learning rate; `value_of` reads the
      texts.
    """

    path: str
    arguments: tuple[tuple[str, str], ...] = ()

    @property
    def module(self) -> str:
        return self.path.rpartition(".")[0]

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]


def asked(path: str, arguments: Sequence[str] = ()) -> Asked:
    """What a command line asks about.

    Args:
        path: `module.Class`. arguments: each `name=value`.

    Raises:
        UsageError: one of them has another form, or an argument is there twice.
    """
    if not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)+", path):
        raise UsageError.of("IMPORT.PATH", path, "the module and the name of a class, with a dot between", FORM)
    found: dict[str, str] = {}
    for text in arguments:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier() or not value or name in found:
            allowed = "one name=value for each argument of the constructor"
            raise UsageError.of("--arg", text, allowed, ARGUMENT_FORM)
        found[name] = value
    return Asked(path, tuple(found.items()))


def value_of(text: str) -> Any:
    """The value that an argument's text stands for: a Python literal, `true`, `false` or `none`; any other text is
    itself. Names of torch, such as `torch.bfloat16`, are looked up by the rank."""
    if text in _WORDS:
        return _WORDS[text]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text


def require_mesh(text: str) -> Mesh:
    """The mesh of `--mesh`: data-parallel ranks, two or more of them sharding.

    Raises:
        UsageError: another one.
    """
    allowed = "dp_replicate x dp_shard x 1, with dp_shard from 2 to 8, of 8 ranks at most"
    mesh = re.fullmatch(r"([1-8])x([1-8])x([1-8])", text)
    found = Mesh(*map(int, mesh.groups())) if mesh else Mesh()
    if found.tp != 1 or found.dp_shard < 2 or found.world > 8:
        raise UsageError.of("--mesh", text, allowed, "--mesh 1x2x1")
    return found
