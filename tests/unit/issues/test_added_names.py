"""A cure that reads a name which its library lacks is not applied to a library that nobody has walked.

*Verifies*: bare names, attributes of `self`, imports from the library; that whatever a line can see counts;
that every cure which ships is whole on the release it is for (`tests/conformance/test_cures.py` applies them).
"""

from __future__ import annotations

import textwrap

import pytest
from shardproof.issues import cures
from shardproof.issues.added_names import missing_name

LIBRARY = """
import os
from library.parts import helper as known, FLAG


class Base:
    def inherited(self): ...


class Engine(Base):
    limit: int = 3

    def __init__(self):
        self.parts = []

    def load(self, files, *, strict=True):
        total = 0
        for name in files:
            total += len(name)
        # HERE
        return total


def is_frozen(param):
    return not param.requires_grad
"""
PARTS = "FLAG = True\n\n\ndef helper(x): ...\n"
FILES = {"library/__init__.py": "", "library/parts.py": PARTS, "library/deep/__init__.py": ""}


def gone(new: str) -> str:
    """What a line in the place of HERE lacks."""
    lines = textwrap.indent(textwrap.dedent(new), " " * 8).splitlines()
    text = LIBRARY.replace("        # HERE", "\n".join(lines))
    at = next(n for n, line in enumerate(LIBRARY.splitlines(), 1) if "# HERE" in line)
    return missing_name(text, set(range(at, at + len(lines))), FILES.get)


@pytest.mark.parametrize(
    "new",
    [
        "total = max(total, os.sep, FLAG)",
        "known(is_frozen)",
        "[part for part in self.parts if part.anything]",
        "own = lambda x: x + total\nown(1)",
        "self.inherited(self.limit)",
        "if (count := len(files)) > 1:\n    print(count, name, strict)",
        "from library.parts import helper\nhelper(1)",
        "import math\nmath.pi",
        "from collections import abc\nabc",
        "from library import deep",
        "try:\n    pass\nexcept OSError as error:\n    print(error)",
        "getattr(self, 'fresh', None)\nself.fresh",
    ],
)
def test_what_a_line_can_see_is_there(new: str) -> None:
    assert gone(new) == ""


@pytest.mark.parametrize(
    ("new", "named"),
    [
        ("is_optimized_parameter(total)", "`is_optimized_parameter`"),
        ("total = helper(total)", "`helper`"),  # imported under another name
        ("param.data", "`param`"),  # bound in another function
        ("self.restored()", "`self.restored`"),
        ("from library.parts import other\nother(1)", "`other` in library.parts"),
        ("from library.gone import other\nother(1)", "the module `library.gone`"),
        ("if total", "a file that Python can read"),
    ],
)
def test_what_is_not_there_is_named(new: str, named: str) -> None:
    assert gone(new).startswith(named)


def test_such_a_cure_is_left_out_on_a_head_alone() -> None:
    text = "".join(f"line{n} = {n}\n" for n in range(9))
    parsed = [cures.parse("c", "--- a/library/a.py\n+++ b/library/a.py\n@@ -3 +3 @@\n line2 = 2\n+line3 = helper()\n")]
    source = {"library/a.py": text}.get
    assert cures.apply(parsed, source).applied == ("c",)
    head = cures.apply(parsed, source, unseen=True)
    assert head.applied == ()
    assert head.left == {"c": "it reads `helper`, which library/a.py lacks"}
    text += "def helper(): ...\n"
    assert cures.apply(parsed, {"library/a.py": text}.get, unseen=True).applied == ("c",)
