"""The documentation site: it builds, all its links hold, and its pages are whole by themselves.

*Verifies*: links between pages, anchors, images, that every page is in the navigation and that the build would end if
one of these were not so; that no page loads anything from elsewhere; addresses of other sites, nightly, with a network.
*Does not verify*: how a page looks, and what it says (tests/golden/test_docs.py looks at commands, paths and code).
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(path.relative_to(ROOT / "docs").with_suffix("").as_posix() for path in ROOT.glob("docs/**/*.md"))
FOLDERS = sorted({page.partition("/")[0] for page in PAGES if "/" in page})
_LOADED = re.compile(r"<(?:script|img|link|iframe)[^>]*\b(?:src|href)=\"((?:https?:)?//[^\"]*)\"")


def sphinx(source: Path, settings: Path, out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Build the pages of one folder as `make docs` does."""
    if importlib.util.find_spec("myst_parser") is None:
        pytest.skip("myst-parser is not installed (pip install -e '.[docs]')")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", *options]
    command += ["-c", str(settings), "-d", str(out / "read"), str(source), str(out / "site")]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def built(out: Path) -> Path:
    """The site as it is now, below a folder."""
    told = sphinx(ROOT / "docs", ROOT / "docs/site", out)
    assert (told.returncode, told.stderr) == (0, "")
    return out / "site"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("built"))


def test_every_page_is_on_the_site(site: Path) -> None:
    assert [name for name in PAGES if not (site / f"{name}.html").is_file()] == []


def test_a_page_loads_nothing_from_elsewhere(site: Path) -> None:
    loaded = {page.name: _LOADED.findall(page.read_text("utf-8")) for page in site.rglob("*.html")}
    assert {name: found for name, found in loaded.items() if found} == {}


def test_the_start_page_leads_to_every_page(site: Path) -> None:
    """At once, or through the index of its folder: `findings` leads to `findings/deepspeed`."""
    linked = {page for start in ("index", *FOLDERS) for page in _linked(site / f"{start}.html")}
    assert set(PAGES) - {"index"} - linked == set()


def _linked(page: Path) -> list[str]:
    return re.findall(r'class="reference internal" href="([\w/-]+)\.html', page.read_text("utf-8"))


@pytest.mark.nightly
def test_what_does_not_hold_ends_the_build(tmp_path: Path) -> None:
    settings, source = tmp_path / "settings", tmp_path / "source"
    for folder in ("static", "templates"):
        shutil.copytree(ROOT / "docs/site" / folder, settings / folder)
    (settings / "conf.py").write_bytes((ROOT / "docs/site/conf.py").read_bytes())
    (settings / "navigation.toml").write_text('[navigation]\n"Start" = ["named", "gone"]\n')
    source.mkdir()
    (source / "index.md").write_text("# Start\n\n[a](named.md) and [b](named.md#a-finding)\n")
    (source / "named.md").write_text(
        '# Named\n\n<a id="a-finding"></a>\n## A finding\n\n'
        "[a](no-such-page.md) [b](index.md#no-such-heading) ![c](no-such-image.png) [d](../no-such-file.patch)\n"
    )
    (source / "forgotten.md").write_text("# In no navigation\n")
    told = sphinx(source, settings, tmp_path / "out")
    assert told.returncode == 1, told.stderr
    for said in (
        "nonexisting document 'gone'",
        "forgotten.md: WARNING: document isn't included in any toctree",
        "'no-such-page.md'",
        "'no-such-heading'",
        "no-such-image.png",
        "'../no-such-file.patch'",
    ):
        assert said in told.stderr, told.stderr
    assert told.stderr.count("WARNING") == 6, told.stderr


@pytest.mark.nightly
def test_addresses_of_other_sites_answer(tmp_path: Path) -> None:
    try:
        socket.create_connection(("github.com", 443), timeout=10).close()
    except OSError as error:
        pytest.skip(f"no network that reaches github.com: {error}")
    told = sphinx(ROOT / "docs", ROOT / "docs/site", tmp_path, "-b", "linkcheck")
    broken = [line for line in told.stderr.splitlines() if "broken" in line]
    assert broken == [], "\n".join(broken)
