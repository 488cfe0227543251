"""Docstrings say what they are about, by name: none is a riddle of pronouns.

"Whether it is one of those that it was to strike" can be read by its author only. "Whether the rank reached the
collective that the fault was planted in" can be read by everybody, because each noun is named.

*Verifies*: of every docstring of a module, class or function, the share of words that only point at something. Text of
`LONG` words and more has room to name what it points at, and is left alone.
*Does not verify*: that a docstring is right, nor that its nouns are those of the field.
"""

from __future__ import annotations

import ast
import re

import pytest

from tests.architecture.test_architecture import HARNESS, modules, tree

LONG = 26
"""Words; a docstring from here on is not measured."""

MOST = 0.27
"""The share of a docstring's words that may be pronouns."""

PRONOUNS = frozenset(
    re.findall(
        r"\w+",
        "it its that this those these them they which what who whom whose one ones other others none each some any "
        "such there he his nobody somebody nothing anything everything both all itself themselves",
    )
)
"""Words that only point at something. `None` is a value, and counts as a noun."""

WORD = re.compile(r"[\w'-]+")
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def is_riddle(text: str) -> bool:
    """Whether a docstring is short, and too many of its words only point at something."""
    words = [word if word == "None" else word.lower() for word in WORD.findall(text)]
    return len(words) < LONG and sum(word in PRONOUNS for word in words) > MOST * len(words)


@pytest.mark.parametrize(
    "riddle",
    [
        "Whether the event was there that it was to strike.",
        "The draft of a case that is one of these; None for any other.",
        "All cases among which one of that label would be.",
        "What is sure, these steps, and those that they need.",
    ],
)
def test_a_riddle_is_found(riddle: str) -> None:
    assert is_riddle(riddle)


@pytest.mark.parametrize(
    "clear",
    [
        "Whether the rank reached the collective that the fault was planted in.",
        "The shard of a parameter that a rank owns, as a flat interval.",
        "",
    ],
)
def test_a_plain_sentence_is_none(clear: str) -> None:
    assert not is_riddle(clear)


@pytest.mark.parametrize("name", ["Case", "Found", "Outcome", "Request", "Trial", "Verdict"])
def test_a_class_name_has_one_meaning(name: str) -> None:
    """Names that once meant two to four things each."""
    found = [module for module in modules() for node in tree(module).body if getattr(node, "name", "") == name]
    assert len(found) <= 1, f"{name} is defined in {', '.join(found)}: say in each name what it is"


@pytest.mark.parametrize("name", sorted(modules()))
def test_no_docstring_is_a_riddle(name: str) -> None:
    riddles = []
    for node in ast.walk(tree(name)):
        text = ast.get_docstring(node) or "" if isinstance(node, DOCUMENTED) else ""
        if is_riddle(text):
            riddles.append(f"{modules()[name].relative_to(HARNESS)}:{getattr(node, 'lineno', 1)}: {text!r}")
    assert not riddles, "name what these speak of, in whole sentences:\n" + "\n".join(riddles)
