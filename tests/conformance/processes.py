"""What processes there are below another one, and what they hold: for tests that nothing is left behind."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


def descendants(pid: int) -> dict[int, list[str]]:
    """Process id → command line, of everything below a process; empty for one that has ended."""
    found: dict[int, list[str]] = {}
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (task / "children").read_text().split()):
                found |= {child: Path(f"/proc/{child}/cmdline").read_text().split("\0"), **descendants(child)}
    return found


def descriptors(pid: int) -> int:
    """How many files a process has open."""
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def holders(folder: Path) -> list[str]:
    """Links of any process, to an open file or a working directory, that lead into the folder."""
    found = []
    for link in [*Path("/proc").glob("[0-9]*/fd/*"), *Path("/proc").glob("[0-9]*/cwd")]:
        with suppress(OSError):
            if link.readlink().is_relative_to(folder):
                found.append(f"{link} -> {link.readlink()}")
    return found
