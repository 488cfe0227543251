"""Overlays: folders with one release of a library under test, which come first on the path of the ranks.

    <cache>/overlays/<name>-<version>-<digest>/site-packages    releases and what stands beside them, by pip
    <cache>/overlays/<name>-commit-<commit>/site-packages       the library's tree of a commit, with what it links to
    <cache>/overlays/<name>-path-<digest>/site-packages         a link to a working tree, nothing else of it

A folder appears complete or not at all, under a lock; it carries the digests of its files, so that a damaged one is
seen and built again. Filled, it needs no network. Before it is used for the first time with an interpreter, the library
is imported in it, and must come from it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from filelock import FileLock, Timeout

from shardproof.errors import CANNOT_IMPORT, NotImportableError, UsageError
from shardproof.folders import CACHE_VARIABLE, cache_root
from shardproof.protocol.features import Feature, found_in, with_features
from shardproof.protocol.releases import Package
from shardproof.versions import TREE_VERSION
from shardproof.world.commands import OverlayError, said
from shardproof.world.interpreter import Interpreter
from shardproof.world.server import DETERMINISM
from shardproof.world.trees import linked_parts, text_in, version_of, write_out

LOCK_S = 900.0
INSTALL_S = 900.0
IMPORT_S = 120.0  # of processor time
OTHER_TORCH = "; upstream does not say that it works with this torch, and `--torch VERSION` gives it another one"
SITE = "site-packages"  # the name where libraries are installed, since reports name a library's files from there on
_MANIFEST = "overlay.json"
TOOK = "took_s"  # the seconds that it took to fill a folder
_OURS = Path(__file__).resolve().parents[2]  # what holds the package `shardproof`

_IMPORT = """
import importlib, json, sys
if sys.argv[2]:
    place, _, importer = sys.argv[2].partition(":")
    getattr(importlib.import_module(place), importer)()
module = importlib.import_module(sys.argv[1])
print(json.dumps([getattr(module, "__version__", ""), module.__file__ or list(module.__path__)[0]]))
"""


Contents = Callable[[Path], dict[str, str]]
"""What a folder holds: relative path → what would be another text if the file were damaged."""


class ImportFailedError(OverlayError, NotImportableError):
    """An installed library raised when it was imported."""


@dataclass(frozen=True)
class Overlay:
    """A folder, or several, that come first on the path of ranks.

    * version: the release that really runs, with `+git.…` or `+path.…` where it is none.
    * paths: what comes first on `sys.path`.
    * outside: with what upstream never supported it.
    * live: whether it is somebody's working tree, which may change.
    * walked: whether it is the newest release of `releases.toml`, which a whole walk runs on every night. Something of
      ours may not fit an older one, a tree or a commit.
    * offers: the names of the features that a tree's source shows (`shardproof.protocol.features`); None for a release,
      which is asked by its number.
    """

    version: str
    paths: tuple[Path, ...]
    outside: tuple[str, ...] = ()
    live: bool = False
    walked: bool = True
    offers: tuple[str, ...] | None = None

    @property
    def asked(self) -> str:
        """The version that its limits are asked about: a release's number, or what a tree calls itself with the
        features that were found in it."""
        release = self.version.partition("+")[0]
        return release if self.offers is None else with_features(release, self.offers)

    @property
    def environment(self) -> dict[str, str]:
        """The environment of an overlay's processes. What lies in the current folder must not come before the
        release, and a tree is told its version."""
        tree = {} if self.offers is None else {TREE_VERSION: self.version.partition("+")[0]}
        return {"PYTHONSAFEPATH": "1", **({"PYTHONDONTWRITEBYTECODE": "1"} if self.live else {}), **tree}


def cache_folder() -> Path:
    """Where overlays are kept."""
    return cache_root() / "overlays"


def clone_variable(name: str) -> str:
    """The environment variable that names the clone of a package, such as SHARDPROOF_CLONE_MEGATRON_CORE."""
    return "SHARDPROOF_CLONE_" + name.upper().replace("-", "_")


def build(package: Package, version: str, python: Interpreter, features: Sequence[Feature] = ()) -> Overlay:
    """The overlay of a version of a package for an interpreter, from the cache or new.

    Args:
        version: as in `shardproof.protocol.releases`: a release, `path:DIR`, `git:REV`, or empty for the newest.
        features: what a
            tree's source is asked for.

    Raises:
        UsageError: no version, no such folder, clone or commit. OverlayError: it cannot be installed or imported.
    """
    kind, colon, where = version.partition(":")
    if colon and kind == "path":
        return _of_tree(package, Path(where).expanduser(), python, features)
    if colon and kind == "git":
        return _of_commit(package, where, python, features)
    release = package.release(version)
    paths = (install((f"{package.name}=={release.version}",), python), *_beside(release.beside, python))
    found = _imported(package, release.version, paths, python)
    return Overlay(found, paths, release.outside(python.installed), walked=release.version == package.newest.version)


def is_cached(package: Package, version: str, python: Interpreter) -> bool:
    """Whether a release is installed already, so that it needs no network."""
    return all(is_installed(requirements, python) for requirements in wanted(package, version))


def wanted(package: Package, version: str) -> tuple[tuple[str, ...], ...]:
    """The requirement lists of a release, one a folder: the release itself, and the packages beside the library."""
    release = package.release(version)
    return ((f"{package.name}=={release.version}",), *([release.beside] if release.beside else []))


def is_imported(package: Package, version: str, python: Interpreter) -> bool:
    """Whether an installed release has been imported with this interpreter; False where nobody has tried it yet."""
    paths = [cache_folder() / key_of(requirements, python) / SITE for requirements in wanted(package, version)]
    return _note_of(paths, python).is_file()


def is_installed(requirements: Sequence[str], python: Interpreter) -> bool:
    """Whether the folder for a requirement list is there."""
    return (cache_folder() / key_of(requirements, python) / _MANIFEST).is_file()


def install(
    requirements: Sequence[str],
    python: Interpreter,
    complete: Callable[[Path], None] = lambda site: None,
    contents: Contents | None = None,
) -> Path:
    """The folder that holds exactly these requirements, without their dependencies, for an interpreter.

    Args:
        complete: what is done with the folder after pip. contents: what is compared to see damage; every file's digest
            without one.

    Raises:
        OverlayError: pip failed.
    """

    def fill(site: Path) -> None:
        options = ["--no-deps", "--quiet", "--no-input", "--disable-pip-version-check", "--no-warn-script-location"]
        command = [python.path, "-m", "pip", "install", *options, "--target", str(site), *requirements]
        print(f"installing {', '.join(requirements)}", file=sys.stderr, flush=True)
        what = f"{', '.join(requirements)} cannot be installed for {python.path} (Python {python.python})"
        said(command, INSTALL_S, what, dict(os.environ))
        complete(site)

    return _filled(key_of(requirements, python), fill, contents)


def commit_of(package: Package, revision: str) -> str:
    """The full commit id of a revision of the package's clone.

    Raises:
        UsageError: no clone was named, or it has no such commit.
    """
    try:
        return git(package, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}").strip()
    except subprocess.CalledProcessError:
        clone = os.environ[clone_variable(package.name)]
        form = f"{package.name}@git:HEAD"
        raise UsageError.of(f"revision of {package.name}", revision, f"a commit of the clone {clone}", form) from None


def git(package: Package, *arguments: str) -> str:
    """What git says about the package's clone.

    Raises:
        UsageError: no clone was named, or it is none. CalledProcessError: git refuses.
    """
    return _git(package, *arguments).decode(errors="replace")


def _of_tree(package: Package, folder: Path, python: Interpreter, features: Sequence[Feature]) -> Overlay:
    folder = folder.resolve()
    tree = next((t for root in package.roots if (t := folder / root / package.tree).is_dir()), None)
    if tree is None:
        where = f"a folder with {' or '.join(str(PurePosixPath(root) / package.tree) for root in package.roots)}"
        raise UsageError.of(f"working tree of {package.name}", str(folder), where, f"{package.name}@path:/src/clone")

    def link(site: Path) -> None:
        target = site / package.tree
        target.parent.mkdir(parents=True, exist_ok=True)
        target.symlink_to(tree, target_is_directory=True)

    own = version_of(tree, text_in(folder, package.version_file))
    close = package.closest(own)
    paths = (_filled(f"{package.name}-path-{_digest(str(tree))}", link), *_beside(close.beside, python))
    parts = [tree, *linked_parts(tree, folder)]
    state = _digest(*(f"{name} {digest}" for part in parts for name, digest in _contents(part).items()))[:7]
    called = _imported(package, "", paths, python, lasting=False)
    outside, offers = close.outside(python.installed), found_in(tree, features)
    return Overlay(_local(own or called, f"path.{state}"), paths, outside, live=True, walked=False, offers=offers)


def _of_commit(package: Package, revision: str, python: Interpreter, features: Sequence[Feature]) -> Overlay:
    commit = commit_of(package, revision)
    root = next((root for root in package.roots if holds(package, commit, _in_repository(root, package.tree))), None)
    if root is None:
        trees = [_in_repository(root, package.tree) for root in package.roots]
        raise OverlayError(f"commit {commit[:12]} of {package.name} has no tree {' or '.join(trees)}")

    def export(site: Path) -> None:
        def archive(paths: Sequence[str]) -> bytes:
            return _git(package, "archive", "--format=tar", commit, "--", *paths)

        with tempfile.TemporaryDirectory(dir=site.parent) as scratch:
            write_out(
                _in_repository(root, package.tree),
                site / package.tree,
                Path(scratch),
                archive,
                lambda path: bool(_kind(package, commit, path)),
            )

    site = _filled(f"{package.name}-commit-{commit[:16]}", export)
    tree = site / package.tree
    own = version_of(tree, _text_of(package, commit, package.version_file))
    close = package.closest(own)
    paths = (site, *_beside(close.beside, python))
    called = _imported(package, "", paths, python)
    outside, offers = close.outside(python.installed), found_in(tree, features)
    return Overlay(_local(own or called, f"git.{commit[:7]}"), paths, outside, walked=False, offers=offers)


def _text_of(package: Package, commit: str, name: str) -> str:
    """The text of a file of a commit, without blanks around it; empty where there is none."""
    try:
        return git(package, "show", f"{commit}:{name}").strip() if name else ""
    except subprocess.CalledProcessError:
        return ""


def _in_repository(root: str, tree: str) -> str:
    return str(PurePosixPath(root) / tree)


def holds(package: Package, commit: str, tree: str) -> bool:
    """Whether a commit has a folder of that path."""
    return _kind(package, commit, tree) == "tree"


def _kind(package: Package, commit: str, path: str) -> str:
    """What a path of a commit is, `tree` or `blob`; empty where it is not there."""
    try:
        return git(package, "cat-file", "-t", f"{commit}:{path}").strip()
    except subprocess.CalledProcessError:
        return ""


def _git(package: Package, *arguments: str) -> bytes:
    clone = os.environ.get(clone_variable(package.name), "")
    if not clone or not Path(clone).is_dir():
        allowed = f"the folder of a clone, by --clone {package.name}=DIR or {clone_variable(package.name)}"
        raise UsageError.of(f"clone of {package.name}", clone, allowed, f"--clone {package.name}=/src/clone")
    # GIT_DIR would win over -C
    ours = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    done = subprocess.run(["git", "-C", clone, *arguments], capture_output=True, check=False, env=ours)
    if done.returncode and b"not a git repository" in done.stderr:
        raise UsageError.of(f"clone of {package.name}", clone, "a git repository", f"--clone {package.name}=/src/clone")
    done.check_returncode()
    return done.stdout


def _beside(requirements: Sequence[str], python: Interpreter) -> tuple[Path, ...]:
    return (install(requirements, python),) if requirements else ()


def _local(version: str, label: str) -> str:
    """A version with a local label, in the form of PEP 440."""
    return f"{version or '0'}{'.' if '+' in version else '+'}{label}"


def key_of(requirements: Sequence[str], python: Interpreter) -> str:
    """Content address of a requirement list for an interpreter; readable in front."""
    first = requirements[0].replace("==", "-") + ("-and-more" if len(requirements) > 1 else "")
    return f"{first}-{_digest(*sorted(requirements), python.tag, python.platform)}"


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


def _filled(key: str, fill: Callable[[Path], None], contents: Contents | None = None) -> Path:
    """The folder of that key, filled by `fill` if it is not there or damaged; complete or not there at all.

    Args:
        contents: what is compared to see damage; every file's digest without one.
    """
    contents = contents or _contents
    folder = cache_folder() / key
    if not _damage(folder, contents):
        return folder / SITE
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.parent / f"{key}.lock", timeout=LOCK_S):
            if damage := _damage(folder, contents):
                _fill(folder, fill, contents, damage)
    except Timeout:
        raise OverlayError(f"{folder}: another process has been filling it for {LOCK_S:.0f} s") from None
    except OSError as error:
        raise OverlayError(f"the cache {folder.parent} cannot be written: {error}; set {CACHE_VARIABLE}") from error
    return folder / SITE


def _fill(folder: Path, fill: Callable[[Path], None], contents: Contents, damage: str) -> None:
    for leftover in folder.parent.glob(f".{folder.name}.*"):  # left by a process that was killed; we hold the lock
        shutil.rmtree(leftover, ignore_errors=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    started = time.monotonic()
    try:
        (scratch / SITE).mkdir()
        try:
            fill(scratch / SITE)
        except OverlayError as error:
            if folder.exists():
                raise OverlayError(f"{folder} is damaged ({damage}) and cannot be filled again: {error}") from None
            raise
        (scratch / _MANIFEST).write_text(json.dumps(contents(scratch / SITE), indent=0))
        (scratch / TOOK).write_text(f"{time.monotonic() - started:.1f}\n")
        if folder.exists():
            folder.rename(scratch / "damaged")
        scratch.chmod(0o755)
        scratch.rename(folder)
        shutil.rmtree(folder / "damaged", ignore_errors=True)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _damage(folder: Path, contents: Contents) -> str:
    """What is wrong with a cached folder; empty if nothing is."""
    try:
        expected = json.loads((folder / _MANIFEST).read_text())
    except OSError:
        return "not there"
    except ValueError:
        return f"{_MANIFEST} is not readable"
    try:
        found = contents(folder / SITE)
    except OSError as error:
        return str(error)
    wrong = sorted(name for name in {*expected, *found} if expected.get(name) != found.get(name))
    return f"{wrong[0]} is not as installed" if wrong else ""


def sizes(folder: Path) -> dict[str, str]:
    """Relative path → size, of every file but compiled bytecode: for a folder of a gigabyte, whose digests would take
    seconds at each use."""
    return _contents(folder, lambda path: str(path.stat().st_size))


def _digest_of_file(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _contents(folder: Path, of_file: Callable[[Path], str] = _digest_of_file) -> dict[str, str]:
    """Relative path → digest, of every file but compiled bytecode. The digest of a link is that of where it leads."""
    found = {}
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name != "__pycache__")
        for path in (Path(parent) / name for name in [*names, *folders]):
            if path.is_symlink():
                found[str(path.relative_to(folder))] = f"-> {os.readlink(path)}"
            elif path.is_file():
                found[str(path.relative_to(folder))] = of_file(path)
    return dict(sorted(found.items()))


def _imported(
    package: Package, expected: str, paths: Sequence[Path], python: Interpreter, *, lasting: bool = True
) -> str:
    """The version that the library gives itself when it is imported from `paths`; empty if it has none.

    Args:
        expected: the release it must be. lasting: whether that it was imported is noted, and not tried again.

    Raises:
        OverlayError: it cannot be imported, is another release, or comes from elsewhere.
    """
    note = _note_of(paths, python)
    if lasting:
        with suppress(OSError):
            if text := note.read_text():
                return text.rstrip("\n")
    what = f"{package.name} {expected} {CANNOT_IMPORT}".replace("  ", " ") + f" with torch {python.release('torch')}"
    environment = {
        **os.environ, **DETERMINISM, "PYTHONDONTWRITEBYTECODE": "" if lasting else "1",
        "PYTHONPATH": os.pathsep.join(map(str, (*paths, *(_of_importers() if package.importer else [])))),
    }  # fmt: skip
    command = [python.path, "-c", _IMPORT, package.imports, package.importer]
    print(f"importing {package.name} {expected}".rstrip(), file=sys.stderr, flush=True)
    try:
        answer = said(command, IMPORT_S, what, environment, of_cpu=True)
    except OverlayError as error:
        first, *others = str(error).splitlines()
        why = f" {others[-1].strip()}" if others else ""
        outside = package.release(expected).outside(python.installed) if expected else ()
        way_out = next((OTHER_TORCH for pair in outside if pair.startswith("torch ")), "")
        raise ImportFailedError("\n".join([f"{first}{why}{way_out}", *others])) from None
    version, file = json.loads(answer.splitlines()[-1])
    if not Path(file).is_relative_to(paths[0]):
        raise OverlayError(f"{what}: {package.imports} comes from {file}, not from {paths[0]}")
    if expected and version and not is_release(version, expected):
        raise OverlayError(f"{what}: it says that it is {version}")
    if lasting:
        with suppress(OSError):  # where the cache cannot be written, it is tried every time
            _write(note, f"{expected or version}\n")
    return str(expected or version)


def is_release(version: str, asked: str) -> bool:
    """Whether a version is the one that was asked for. A local label, as in 0.11.0+cpu, counts only where one was."""
    return version == asked or version.partition("+")[0] == asked


def _note_of(paths: Sequence[Path], python: Interpreter) -> Path:
    """The file that says that a library was imported from these folders."""
    return paths[0].parent / f"imported-{_digest(python.path, str(python.release('torch')), *map(str, paths))}"


def _of_importers() -> Iterator[str]:
    """Where the modules lie that import a library in its own way: ours, and those of plugins on the user's path."""
    yield str(_OURS)
    yield from filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))


def _write(path: Path, text: str) -> None:
    """Write a file atomically: another process sees the old content or the whole new one."""
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}.", delete=False) as scratch:
        scratch.write(text)
    os.replace(scratch.name, path)
