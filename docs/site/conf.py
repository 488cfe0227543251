"""How Sphinx builds the documentation site: `make docs`, or `python -m sphinx -W --keep-going -c docs/site docs OUT`.

The pages are plain Markdown, as a forge shows it, and hold nothing that only Sphinx understands. What Sphinx needs
beyond that is added here, while a page is read: the navigation, and names for the anchors of findings. A page in a
folder, such as docs/findings/deepspeed.md, belongs below the page of the folder's name, docs/findings.md. With `-W` a
broken link, a broken anchor, an absent image and a page outside of the navigation each end the build.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
NAVIGATION: dict[str, list[str]] = tomllib.loads((HERE / "navigation.toml").read_text("utf-8"))["navigation"]
"""Heading of the sidebar → pages below `docs/`, without `.md`."""

project = "shardproof"
author = "the authors of shardproof"
root_doc = "index"
exclude_patterns = ["site", "ci"]
extensions = ["myst_parser"]
myst_heading_anchors = 4  # as a forge makes them

html_theme = "alabaster"
html_static_path = ["static"]
templates_path = ["templates"]
html_title = "shardproof"
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
pygments_style = "default"
html_sidebars = {"**": ["about.html", "searchfield.html", "pages.html"]}
html_theme_options = {
    "description": "Bitwise correctness testing and fault injection for sharded training state",
    "fixed_sidebar": True,
    "page_width": "1180px",
    "sidebar_width": "250px",
    "show_powered_by": False,
    "sidebar_collapse": True,
}

linkcheck_timeout = 20
linkcheck_retries = 2
linkcheck_workers = 2
linkcheck_anchors = False
linkcheck_allow_unauthorized = True

_ANCHOR = re.compile(r'^<a id="([^"]+)"></a>\n', re.MULTILINE)


def _toctree(options: str, pages: list[str]) -> str:
    """One part of the navigation, as MyST writes it; no reader of the page sees it."""
    listed = "\n".join(pages)
    return f"\n\n```{{toctree}}\n:hidden:\n{options}\n\n{listed}\n```\n"


def _read(app: Any, name: str, source: list[str]) -> None:
    """Add to a page's Markdown what only Sphinx needs."""
    source[0] = _ANCHOR.sub(r"(\1)=\n", source[0])
    if name == root_doc:
        source[0] += "".join(_toctree(f":caption: {heading}", pages) for heading, pages in NAVIGATION.items())
    elif any(Path(app.srcdir, name).glob("*.md")):
        source[0] += _toctree(":glob:", [f"{name}/*"])


def _written(_app: object, _name: str, _template: str, context: dict[str, Any], _doctree: object) -> None:
    """Let a keyboard scroll what is wider than the page."""
    body = context.get("body", "").replace("<pre>", '<pre tabindex="0">')
    context["body"] = body.replace('<table class="docutils', '<table tabindex="0" class="docutils')


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("source-read", _read)
    app.connect("html-page-context", _written)
