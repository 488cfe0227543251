"""Source trees of a library under test: exports a commit to a folder, and reads the version that a tree states.

A repository may keep a part of the library outside of the library's own folder, behind a link: DeepSpeed's
`deepspeed/accelerator` is a link to `../accelerator`. Only the library's folder comes onto the path of ranks, so that
what its links lead to has to come along, as a copy in the link's place. The links of a commit are followed inside of
its repository and never out of it.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import tarfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path, PurePosixPath

from shardproof.versions import is_version


def write_out(
    tree: str, target: Path, scratch: Path, archive: Callable[[Sequence[str]], bytes], there: Callable[[str], bool]
) -> None:
    """Write a folder of a commit to `target`, with what its links lead to, and what links in that lead to, and so on.

    Args:
        tree: the folder's path in the repository. scratch: an empty folder on the same disk. archive: the tar file of
            some paths of the commit. there: whether the commit has a path.
    """
    scratch = scratch.resolve()
    wanted, written = {tree}, set[str]()
    while wanted:
        with tarfile.open(fileobj=io.BytesIO(archive(sorted(wanted)))) as members:
            members.extractall(scratch, filter=_inside)
        written |= wanted
        ends = {str(end.relative_to(scratch)) for part in wanted for end in _ends(scratch / part, scratch)}
        wanted = {end for end in ends if not _below(end, written) and there(end)}
    target.parent.mkdir(parents=True, exist_ok=True)
    _with_linked(scratch / tree, scratch, target)


def _inside(member: tarfile.TarInfo, folder: str) -> tarfile.TarInfo | None:
    """A member of an archive as it is extracted. A link that leads out of the repository is left out."""
    try:
        return tarfile.data_filter(member, folder)
    except (tarfile.AbsoluteLinkError, tarfile.LinkOutsideDestinationError):
        return None


def _links(part: Path) -> list[Path]:
    """The links in a folder, or the one that `part` is."""
    if part.is_symlink():
        return [part]
    names = ((Path(parent) / name) for parent, folders, files in os.walk(part) for name in (*folders, *files))
    return sorted(path for path in names if path.is_symlink())


def _ends(part: Path, repository: Path) -> list[Path]:
    """Where the links of a folder lead, of those that stay inside of the repository. What is there is not asked."""
    ends = (Path(os.path.normpath(link.parent / os.readlink(link))) for link in _links(part))
    return [end for end in ends if end.is_relative_to(repository) and end != repository]


def _below(name: str, folders: Iterable[str]) -> bool:
    return any(PurePosixPath(name).is_relative_to(folder) for folder in folders)


def _with_linked(tree: Path, repository: Path, target: Path) -> None:
    """Move a folder out of its repository, both given without links on their way. A link to what lies elsewhere in the
    repository becomes a copy of what it leads to; one that leads nowhere, or around the folder itself, stays as it
    is."""
    for link in _links(tree):
        end = link.resolve()
        around = end.is_relative_to(tree) or tree.is_relative_to(end)
        if around or not end.is_relative_to(repository) or not end.exists():
            continue
        link.unlink()
        if end.is_dir():
            shutil.copytree(end, link, ignore=_dangling)
        else:
            shutil.copyfile(end, link)
    tree.rename(target)


def _dangling(folder: str, names: Iterable[str]) -> set[str]:
    """Those of a folder's names that lead nowhere."""
    return {name for name in names if not (Path(folder) / name).exists()}


def linked_parts(tree: Path, repository: Path) -> list[Path]:
    """The folders of a working tree that links in the library's own folder lead to, outside of it: they are a part of
    what runs."""
    ends = {link.resolve() for link in _links(tree)}
    return sorted(e for e in ends if e.is_dir() and e.is_relative_to(repository) and not e.is_relative_to(tree))


def version_of(tree: Path, said: str) -> str:
    """The release that a library's source tree says it is, read without running it; empty where it does not say so
    in a way that we know.

    Args:
        tree: the library's folder. said: what the repository's own file says; empty where it has none.
    """
    if is_version(said):
        return said
    info = dict(
        re.findall(r"""^(MAJOR|MINOR|PATCH|PRE_RELEASE) *= *["']?(\w*)""", text_in(tree, "package_info.py"), re.M)
    )
    numbers = [info.get(name, "") for name in ("MAJOR", "MINOR", "PATCH")]
    version = ".".join(numbers) + info.get("PRE_RELEASE", "")
    return version if is_version(version) else ""


def text_in(folder: Path, name: str) -> str:
    """The text of a file of a folder, without blanks around it; empty where there is none."""
    try:
        return (folder / name).read_text("utf-8", "replace").strip() if name else ""
    except OSError:
        return ""
