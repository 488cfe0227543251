"""The form of an issue: the headings of the upstream project's own template, and what stands below each.

A project that gives its users a template for bug reports reads those first that follow it. So each system has, beside
its `issues.toml`, the headings of that template as data, `issue_form.toml`:

    schema = 1
    template = "https://github.com/…"        # where upstream keeps the template; absent where it has none
    prefix = "[BUG] "                        # how the template begins a title
    stand_in = "It gives the CPU …"          # what `gpu_on_cpu.py` does, where scripts of the system have one
    patches = "megatron/core/…/src"          # below which upstream keeps the package's files; absent for the root

    [told]                                   # what a script may tell the library first, though no kernel is emulated:
    is_fp16_supported = "The script …"       # a word of such a line → the sentence about it

    [[section]]                              # in the order of the template
    heading = "Steps/Code to reproduce bug"
    holds = ["steps", "observed"]            # of PARTS; each part stands in one section
    [[section]]
    heading = "Docker context"
    text = "No image is needed."             # in place of `holds`, what is the same for every issue

Where an entry of `issues.toml` says where the library promises what it does not do (`promise`), the promise is quoted
by that place: a file of the library and a function or class in it, or an address of its documentation. A reader looks
there himself, and no sentence of ours can misquote it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from shardproof.protocol.system import System
from shardproof.tables import Table, load_toml, text_of

PARTS = {
    "bug": "",
    "steps": "",
    "observed": "Observed behavior",
    "expected": "Expected behavior",
    "regression": "Regression",
    "newest": "Newest release and main",
    "versions": "Versions",
    "emulated": "Emulated",
    "where": "Where it seems to lie",
    "public": "Other reports",
}
"""What an issue has to say → the heading over it where it shares a section of the template with others."""

OPTIONAL = ("regression",)
"""Parts that only some templates ask for."""


@dataclass(frozen=True)
class FormSection:
    """A heading of the template. holds: the parts below it. text: what stands there in every issue."""

    heading: str
    holds: tuple[str, ...] = ()
    text: str = ""


PLAIN = (
    FormSection("Describe the bug", ("bug",)),
    FormSection("Steps/Code to reproduce the bug", ("steps",)),
    FormSection("Expected behavior", ("expected",)),
    FormSection("Observed behavior", ("observed",)),
    FormSection("Newest release and main", ("newest",)),
    FormSection("Versions", ("versions", "emulated")),
    FormSection("Where it seems to lie", ("where",)),
    FormSection("Other reports", ("public",)),
)
"""For an upstream without a template."""


@dataclass(frozen=True)
class Form:
    """How an issue for one upstream project looks; see the module's text."""

    sections: tuple[FormSection, ...] = PLAIN
    prefix: str = ""
    template: str = ""
    stand_in: str = ""
    patches: str = ""
    told: Mapping[str, str] = field(default_factory=dict)

    def fill(self, parts: Mapping[str, str]) -> str:
        """The sections in Markdown. A section of which every part is empty is left out.

        Args:
            parts: of PARTS, the text of each.
        """
        filled = ((section.heading, "\n\n".join(_below(section, parts))) for section in self.sections)
        return "\n\n".join(f"## {heading}\n\n{text}" for heading, text in filled if text)


def _below(section: FormSection, parts: Mapping[str, str]) -> Iterator[str]:
    if section.text:
        yield section.text
    for name in section.holds:
        if text := parts.get(name, ""):
            headed = PARTS[name] if len(section.holds) > 1 and PARTS[name] != section.heading else ""
            yield f"### {headed}\n\n{text}" if headed else text


def form_of(system: System) -> Form:
    """The form of a system's issues; the plain one where it has no file.

    Raises:
        UsageError: an unknown key or part, or a part that stands nowhere or twice.
    """
    file, origin = system.folder.joinpath("issue_form.toml"), f"{system.name}/issue_form.toml"
    if not file.is_file():
        return Form()
    found = Table(load_toml(text_of(file, origin), origin), origin)
    found.only(("schema", "template", "prefix", "stand_in", "patches", "told", "section"))
    sections = tuple(_section(entry) for entry in found.tables("section")) or PLAIN
    held = [part for section in sections for part in section.holds]
    if sorted({*held, *OPTIONAL}) != sorted({*PARTS}) or len(set(held)) != len(held):
        raise found.wrong("section", held, "each part once: " + ", ".join(PARTS), 'holds = ["steps", "observed"]')
    told = found.table("told")
    return Form(
        sections, found.text("prefix"), found.text("template"), " ".join(found.text("stand_in").split()),
        found.text("patches"), {word: told.text(word) for word in told},
    )  # fmt: skip


def _section(entry: Table) -> FormSection:
    entry.only(("heading", "holds", "text"), needed=("heading",))
    holds: Sequence[str] = entry.texts("holds")
    for part in holds:
        if part not in PARTS:
            raise entry.wrong("holds", part, PARTS, 'holds = ["steps", "observed"]')
    return FormSection(entry.text("heading"), tuple(holds), entry.text("text"))
