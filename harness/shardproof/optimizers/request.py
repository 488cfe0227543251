"""The optimizer that a command line asks about: its import path and its constructor's arguments. No torch."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass

from shardproof.errors import UsageError

FORM = "shardproof optimizer torch.optim.AdamW"
ARGUMENT_FORM = "--arg betas=(0.9,0.95)"

_WORDS = {"true": True, "false": False, "none": None}


@dataclass(frozen=True)
class Asked:
    """An optimizer's class, how it is constructed, and on which ranks it is tried.

    * path: `module.Class`, as an import statement would name it.
    * arguments: `(name, text)` of what the constructor gets besides parameters and learning rate.
    * ranks: the mesh that shards, as `--mesh` says it.
    """

    path: str
    arguments: tuple[tuple[str, str], ...] = ()
    ranks: str = "1x2x1"

    @property
    def module(self) -> str:
        return self.path.rpartition(".")[0]

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]

    @property
    def text(self) -> str:
        """The value of the trainer's axis, such as `torch.optim.SGD(momentum=0.9)`."""
        given = ",".join(f"{name}={written(text)}" for name, text in self.arguments)
        return f"{self.path}({given})" if given else self.path

    @property
    def mesh(self) -> str:
        """The ranks as the trainer writes them: `2` for 1x2x1, `2x4` for 2x4x1."""
        replicas, sharding, _ = self.ranks.split("x")
        return sharding if replicas == "1" else f"{replicas}x{sharding}"


def asked(path: str, arguments: Sequence[str] = (), ranks: str = Asked.ranks) -> Asked:
    """What a command line asks about.

    Args:
        path: `module.Class`. arguments: each `name=value`. ranks: of `--mesh`; two of them or more shard.

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
        if re.search(r"[\s+]", written(value)):
            raise UsageError.of("--arg", text, "a value without blanks and without +", ARGUMENT_FORM)
        found[name] = value
    sizes = re.fullmatch(r"([1-8])x([2-8])x1", ranks)
    if sizes is None or int(sizes[1]) * int(sizes[2]) > 8:
        allowed = "dp_replicate x dp_shard x 1, with dp_shard from 2 to 8, of 8 ranks at most"
        raise UsageError.of("--mesh", ranks, allowed, "--mesh 1x2x1")
    return Asked(path, tuple(found.items()), ranks)


def written(text: str) -> str:
    """An argument as the trainer reads it: a Python literal, for which `true`, `false` and `none` stand too, or a name
    of torch such as `torch.bfloat16`; any other text as a literal of it."""
    if text.startswith("torch."):
        return text
    if text in _WORDS:
        return repr(_WORDS[text])
    try:
        value, short = ast.literal_eval(text), "".join(text.split())
        return short if ast.literal_eval(short) == value else text
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return repr(text)
