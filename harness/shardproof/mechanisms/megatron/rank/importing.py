"""Importing Megatron-Core where triton is not installed.

From 0.18 on one module of the library imports triton whether its kernels are wanted or not
(megatron/core/transformer/moe/paged_stash.py), and `import megatron.core` reaches it. Triton is a package of 1 GB, and
no kernel of it runs here. So where that import fails, it is done once more with triton there by name
(`shardproof.emulation.names`): what has been imported by then has found that triton is missing, and does without; what
comes after it may decorate its kernels, which refuse to be launched.

*Verifies* nothing by itself.
"""

from __future__ import annotations

from importlib import import_module

from shardproof.emulation import names


def library() -> None:
    """Import `megatron.core`.

    Raises:
        ImportError: something else than triton is missing.
    """
    imported("megatron.core")


def imported(module: str) -> None:
    """Import a module that may reach triton.

    Raises:
        ImportError: something else than triton is missing.
    """
    try:
        import_module(module)
    except ModuleNotFoundError as error:
        if error.name not in names.TRITON:
            raise
        with names.importable(names.TRITON):
            import_module(module)
