"""What an entry of a system's `issues.toml` says to a reader: one `Finding` an entry, in the order of the file.

An entry of `issues.toml` is written for two readers. `harness/shardproof/issues/known_issues.py` reads how a failure is
recognised; this module reads the rest, which tells a person what the defect does to a run, how a run comes to meet it,
where it is and since when. One file serves both, so that a finding cannot be documented and forgotten, or matched and
never explained. The product itself uses findings where it writes an upstream issue
(`harness/shardproof/export/issue.py`) and where it looks whether a commit repairs what is known
(`harness/shardproof/heads/`). The pages of the documentation are written from them by `docs/written/findings.py`.

Several entries can be faces of one defect: the same line of a library fails a save on one mesh and a load on another.
Such an entry names the first one as its `cause`, and the cause is counted once, under the system whose code it
is: `automodel-164929` is torch's, seen through Automodel.

What an entry says of its novelty, reach and harm: harness/shardproof/issues/upstream_evidence.py. The keys that only
this module reads (all of them optional):

    fixed = "0.5.0, by pull request 2419"              # absent: still there in the newest release that was tried
    severity = ["silent", "crash"]                     # absent: what the patterns of its evidence say
    cause = "torch-fsdp2-164929"                       # the entry of which this is another face
    behind = ["megatron-core-6212"]                    # what hides it until that is repaired; it has no `match` then
    releases = ["0.4.0: mismatch", "0.5.0: pass"]      # what its regression gave on which release
    unscripted = ["164929: of their own load"]         # what `shardproof export` writes no script of, and why
    part = "the title of a [[part]] of the file"       # the part of the system's page to which it belongs
    detail = "what else is known of it"
    title = "ZeRO-3 steps an unused parameter"         # of an issue: which call fails, and when; `ready` asks for one
    promise = "deepspeed/__init__.py, initialize"      # where the library promises what it does not do
    expected = "A step divides by the scale once."     # in an issue: what should come instead, in a sentence
    emulation = "It matters in part: …"                # in an issue: whether it matters what stood in for a GPU
    script_needs = ["block.proj"]                      # parameters that the failure needs; a script has no others
    on_main = { commit = "d98e8a64dd", … }             # of the main branch, as read: shardproof.issues.on_main

`about` at the head of the file opens the system's page, and each `[[part]]` (`title`, `text`) follows it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from shardproof.issues.cures import cure_of
from shardproof.issues.known_issues import ISSUE_KEYS, document_of
from shardproof.issues.on_main import OnMain, on_main_of
from shardproof.issues.upstream_evidence import Novelty, novelty_of
from shardproof.protocol.system import System
from shardproof.tables import Table

TITLE_CHARACTERS = 90
"""The longest title of an issue: what a list of issues shows of one on a line."""

SEVERITIES = ("silent", "crash", "hang", "warning")


@dataclass(frozen=True)
class Finding:
    """One entry of a system's `issues.toml`, as a reader wants it.

    regressions: the names of the scenarios that show it, without the system's. emulated: it was seen on a device that
    is emulated, and no GPU has confirmed it. confirmed: the run on a GPU that did. The other fields are the module's
    keys.
    """

    id: str
    system: str
    what: str
    library_line: str
    since: str
    severity: tuple[str, ...]
    regressions: tuple[str, ...]
    novelty: Novelty
    fixed: str
    cause: str
    part: str
    detail: str
    behind: tuple[str, ...]
    cure: str
    releases: Mapping[str, str]
    emulated: bool = False
    unscripted: Mapping[str, str] = field(default_factory=dict)
    title: str = ""
    promise: str = ""
    expected: str = ""
    emulation: str = ""
    confirmed: str = ""
    script_needs: tuple[str, ...] = ()
    on_main: OnMain | None = None

    @property
    def silent(self) -> bool:
        """Whether training continues without an exception in at least one scenario of the finding."""
        return "silent" in self.severity

    @property
    def name(self) -> str:
        """The id without the system's name, as the folder of regressions has it."""
        return self.id.removeprefix(f"{_stem(self.system)}-")

    @property
    def scenarios(self) -> tuple[str, ...]:
        """The scenarios that show it, as the command line names them; that of the entry is the first."""
        return tuple(f"regressions/{self.system}-{name}" for name in self.regressions)


@dataclass(frozen=True)
class Part:
    """A stretch of a system's section, with the findings that belong to it. title: empty for the first one."""

    title: str
    text: str
    findings: tuple[Finding, ...]


@dataclass(frozen=True)
class Section:
    """The findings of one system, read from its `issues.toml`, as a section of the page."""

    system: str
    about: str
    parts: tuple[Part, ...]

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The findings of all parts, in the order of the page."""
        return tuple(finding for part in self.parts for finding in part.findings)


def section_of(system: System) -> Section:
    """What the file of a system says.

    Raises:
        UsageError: a value of another type, or the name of something that there is not.
    """
    document = document_of(system)
    entries = document.tables("issue")
    ids = [entry.text("id") for entry in entries]
    findings = [_finding(system, entry, ids) for entry in entries]
    texts = {part.text("title"): part.text("text") for part in document.tables("part")}
    for finding, entry in zip(findings, entries, strict=True):
        if finding.part and finding.part not in texts:
            raise entry.wrong("part", finding.part, texts, "the title of a [[part]]")
    parts = [
        Part(title, text.strip(), tuple(finding for finding in findings if finding.part == title))
        for title, text in {"": "", **texts}.items()
    ]
    return Section(system.name, document.text("about").strip(), tuple(parts))


def _finding(system: System, entry: Table, ids: Sequence[str]) -> Finding:
    entry.only(ISSUE_KEYS)
    severity = entry.texts("severity") or _severity(entry.table("match").texts("evidence"))
    for word in severity:
        if word not in SEVERITIES:
            raise entry.wrong("severity", word, SEVERITIES, 'severity = ["silent"]')
    if len(entry.text("title")) > TITLE_CHARACTERS:
        raise entry.wrong("title", entry.text("title"), f"at most {TITLE_CHARACTERS} characters", 'title = "…"')
    if entry.flag("ready", absent=False) and not entry.text("title"):
        raise entry.wrong("title", "", "the title of the issue, since the entry is ready to be sent", 'title = "…"')
    texts = (
        "id", "what", "library_line", "since", "fixed", "cause", "part", "detail", "title", "promise", "expected",
        "emulation",
    )  # fmt: skip
    return Finding(
        system=system.name,
        severity=severity,
        novelty=novelty_of(entry),
        regressions=_regressions(system, entry.text("id"), ids),
        behind=entry.texts("behind"),
        script_needs=entry.texts("script_needs"),
        cure=cure_of(system, entry.text("scenario")),
        releases=dict(_said(entry, "releases", line) for line in entry.texts("releases")),
        unscripted=dict(_said(entry, "unscripted", line) for line in entry.texts("unscripted")),
        emulated=bool(system.emulated) and not entry.text("confirmed_on_gpu"),
        confirmed=entry.text("confirmed_on_gpu"),
        on_main=on_main_of(entry),
        **{key: " ".join(entry.text(key).split()) for key in texts},
    )


def _severity(evidence: Sequence[str]) -> tuple[str, ...]:
    """What patterns of evidence say: an exception has a colon in it, state has a role and a kind of difference."""
    found = dict.fromkeys(map(_loudness, evidence))
    return tuple(word for word in SEVERITIES if word in found)


def _loudness(pattern: str) -> str:
    if pattern.startswith("deadline"):
        return "hang"
    if pattern.startswith("warning"):
        return "warning"
    return "crash" if ":" in pattern else "silent"


def _regressions(system: System, issue: str, ids: Sequence[str]) -> tuple[str, ...]:
    """The regressions whose names begin with this issue's, and with no longer one's: `2777-swap` belongs to `2777`."""
    folder = system.folder.joinpath("regressions")
    names = sorted(file.name.removesuffix(".toml") for file in folder.iterdir()) if folder.is_dir() else []
    own = (name for name in names if f"{_stem(system.name)}-{name}".startswith(issue))
    return tuple(name for name in own if max(_beginnings(f"{_stem(system.name)}-{name}", ids), key=len) == issue)


def _stem(system: str) -> str:
    """What ids of entries begin with: the system's name, of a trainer `FILE:CLASS` that of its file."""
    return system.partition(":")[0]


def _beginnings(name: str, ids: Sequence[str]) -> Iterator[str]:
    return (known for known in ids if name.startswith(known))


def _said(entry: Table, key: str, line: str) -> tuple[str, str]:
    """A line of a list as what it is about and what is said of it."""
    about, colon, said = line.partition(": ")
    if not colon:
        raise entry.wrong(key, line, "a name, a colon and what is said of it", f'{key} = ["0.4.0: mismatch"]')
    return about, said
