"""What torch says of shapes and shardings, kept from one run to the next.

A walk is made so that little in it recurs, so ranks of one run have most of their questions for the first time
(`shardproof.world.shapes`). The same walk asks the same questions the next night, though. So a server writes down what
its ranks were told, as plain data, in a file below the cache folder, and the servers of later runs begin with it.

    <cache>/shapes/<digest>.answers

The digest is of what could change an answer: the release of Python and of torch, the sizes of its compiled libraries,
and the text of the files that work out shapes and shardings, as a cure leaves it. It is the same for an installation
that was made anew, so that a machine of CI that keeps the cache folder has the answers as well. A file of answers is
never believed on its own: the cold ranks of each run compare it with torch, and where one answer is another, the file
is removed.
"""

from __future__ import annotations

import hashlib
import marshal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from shardproof.folders import cache_root
from shardproof.world import cure_import_hook

MOST_BYTES = 64 << 20  # of one file; a nightly of torch-fsdp2 comes to a few MiB
MOST_FILES = 12  # one for each torch and each set of cures that touch what is asked
CHECK = 16  # bytes of a digest before each part of a file, so that a part of which the end is missing is not read

ASKED = (
    "distributed/tensor", "_subclasses", "_refs", "_decomp", "_prims", "_prims_common", "_meta_registrations.py",
    "_ops.py", "_library", "fx/experimental/symbolic_shapes.py",
)  # fmt: skip
"""Below the folder of torch: what works out shapes and shardings."""


class Kept:
    """The file of answers that fits this torch.

    Args:
        path: where it lies; it need not exist.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> dict[Any, Any]:
        """Question → answer, up to the first part that is not whole; nothing of the file is executed."""
        found: dict[Any, Any] = {}
        with suppress(OSError):
            if self._path.stat().st_size <= MOST_BYTES:
                for part in _parts(self._path.read_bytes()):
                    found.update(part)
        return found

    def add(self, answers: Mapping[Any, Any]) -> None:
        """Write answers down; where nothing can be written, as in a home that is read-only, they are not kept."""
        part = marshal.dumps([*answers.items()])
        whole = len(part).to_bytes(8, "little") + _digest_of(part) + part
        with suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if not self._path.exists():
                _make_room(self._path.parent)
            with self._path.open("ab", buffering=0) as file:  # one call of write, since other servers add as well
                if file.tell() + len(whole) <= MOST_BYTES:
                    file.write(whole)

    def forget(self) -> None:
        """Remove the file, of which an answer was found to be wrong."""
        self._path.unlink(missing_ok=True)


def of_this_torch() -> Kept:
    """The file for the torch that is imported, with the cures that are installed in this process."""
    return Kept(cache_root() / "shapes" / f"{_digest()}.answers")


def _digest() -> str:
    import torch

    folder = Path(torch.__file__).parent
    digest = hashlib.sha256(f"{sys.version} {torch.__version__} {torch.version.git_version}".encode())
    for file in sorted(folder.glob("_C*.so")) + sorted(folder.glob("lib/lib[tc]*.so")):
        digest.update(f"{file.name} {file.stat().st_size}".encode())
    ours = [Path(__file__), Path(__file__).with_name("shapes.py")]
    for file in [*ours, *sorted(_asked_files(folder))]:
        digest.update(file.name.encode() + file.read_bytes())
    for module, text in sorted(cure_import_hook.cured().items()):
        if any(module == each or module.startswith(f"{each}.") for each in _ASKED_MODULES):
            digest.update(f"{module} {text}".encode())
    return digest.hexdigest()[:16]


_ASKED_MODULES = tuple(f"torch.{name.removesuffix('.py').replace('/', '.')}" for name in ASKED)


def _asked_files(folder: Path) -> Iterator[Path]:
    for name in ASKED:
        found = folder / name
        yield from found.rglob("*.py") if found.is_dir() else [found] if found.exists() else []


def _parts(data: bytes) -> Iterator[Sequence[tuple[Any, Any]]]:
    place = 0
    while place + 8 + CHECK <= len(data):
        size = int.from_bytes(data[place : place + 8], "little")
        check, part = data[place + 8 : place + 8 + CHECK], data[place + 8 + CHECK : place + 8 + CHECK + size]
        if len(part) != size or _digest_of(part) != check:
            return
        yield marshal.loads(part)
        place += 8 + CHECK + size


def _digest_of(part: bytes) -> bytes:
    return hashlib.blake2b(part, digest_size=CHECK).digest()


def _make_room(folder: Path) -> None:
    """Remove the files that were not written to for longest, so that another one has room."""
    files = sorted(folder.glob("*.answers"), key=lambda file: file.stat().st_mtime)
    for file in files[: max(0, len(files) + 1 - MOST_FILES)]:
        file.unlink(missing_ok=True)
