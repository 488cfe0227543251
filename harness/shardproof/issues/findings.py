"""`docs/findings.md`: what runs have found in real libraries, written from every system's `issues.toml`.

    python -m shardproof.issues.findings > docs/findings.md

An entry of `issues.toml` is written for two readers. `harness/shardproof/issues/known_issues.py` reads how a failure is
recognised; this module reads the rest, which tells a person what the defect does to a run, how a run comes to meet it,
where it is and since when. One file serves both, so that a finding cannot be documented and forgotten, or matched and
never explained; a test compares the committed page with what this module writes.

Several entries can be faces of one defect: the same line of a library fails a save on one mesh and a load on another.
Such an entry names the first one as its `cause`, and the page counts the cause once, under the system whose code it
is: `automodel-164929` is torch's, seen through Automodel.

What an entry says of its novelty, reach and harm: harness/shardproof/issues/upstream_evidence.py. The keys that only
this module reads (all of them optional):

    fixed = "0.5.0, by pull request 2419"              # absent: still there in the newest release that was tried
    severity = ["silent", "crash"]                     # absent: what the patterns of its evidence say
    cause = "torch-fsdp2-164929"                       # the entry of which this is another face
    behind = ["megatron-core-6212"]                    # what hides it until that is repaired; it has no `match` then
    releases = ["0.4.0: mismatch", "0.5.0: pass"]      # what its regression gave on which release
    part = "the title of a [[part]] of the file"       # the part of the page to which it belongs
    detail = "what else is known of it"

`about` at the head of the file opens the system's section, and each `[[part]]` (`title`, `text`) follows it.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter

from shardproof.errors import UsageError
from shardproof.issues.cures import cure_of, home_of
from shardproof.issues.known_issues import ISSUE_KEYS, document_of
from shardproof.issues.upstream_evidence import ON_A_RELEASE, REACHES, Novelty, novelty_of
from shardproof.protocol.registry import all_systems, system_named
from shardproof.protocol.system import System
from shardproof.tables import Table

SEVERITIES = ("silent", "crash", "hang", "warning")

HEAD = """\
<!-- Written by `python -m shardproof.issues.findings` from scenarios/*/issues.toml: change those. -->
# Findings

What has shardproof found in real, unmodified libraries? Every finding is kept as a regression, a scenario of a few
lines that one command runs, and that ends with status 1 as long as the defect is there:

```console
$ shardproof run regressions/torch-fsdp2-164929
$ shardproof replay ID --times 20              # the id it prints, again and again in fresh processes
```

*Silent* means that nothing was raised and some of the state was wrong. *Public* links to where somebody told of it, or
to the change that repairs it; *ours* means that the searches that the entry records found neither. *Reach* says how far
from the defaults a run must go to meet it, and only what a release shows, and nothing speaks against, is counted as
found. A *cure* is a patch of a few lines that takes the defect away: `shardproof sweep SCENARIO --versions 0.16.1
--versions 0.16.1+cured:ID` runs a scenario without and with it. *Since* is the first release that is known to have it.
What was seen on an emulated device (`docs/emulation.md`) waits for a GPU to confirm it (`docs/gpu.md`).
"""

BY_REACH = ("reach", "what it means", "causes", "public", "ours", "silent", "ours and silent")
BY_SYSTEM = ("system", "causes", "public", "ours", *SEVERITIES, "fixed upstream")
EACH = ("system", "finding", "what a user gets", "severity", "reach", "public", "since", "fixed")

TAIL = """\
## What did not fail

Every clean cell of the walks: parameters, gradients as the optimizer saw them, moments, steps, hyperparameters,
buffers, schedule and scaler are bit-equal to the unsharded twin on all meshes up to 8 ranks, through save, reshard and
load, sharded and full.
"""


@dataclass(frozen=True)
class Finding:
    """One entry of a system's `issues.toml`, as a reader wants it.

    regressions: the names of the scenarios that show it, without the system's. The other fields are the module's keys.
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

    @property
    def silent(self) -> bool:
        """Whether it raises nothing, at least in one scenario."""
        return "silent" in self.severity

    @property
    def name(self) -> str:
        """The id without the system's name, as the folder of regressions has it."""
        return self.id.removeprefix(f"{self.system}-")


@dataclass(frozen=True)
class Part:
    """A stretch of a system's section, with the findings that belong to it. title: empty for the first one."""

    title: str
    text: str
    findings: tuple[Finding, ...]


@dataclass(frozen=True)
class Section:
    """All that one system's file says."""

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


def render(sections: Sequence[Section]) -> str:
    """The page, in Markdown.

    Raises:
        UsageError: a finding names a cause that is no finding.
    """
    ids = {finding.id for section in sections for finding in section.findings}
    for finding in (finding for section in sections for finding in section.findings):
        for other in (*filter(None, [finding.cause]), *finding.behind):
            if other not in ids:
                raise UsageError.of(f"{finding.id}: cause or behind", other, "the id of a finding", 'cause = "…"')
    told = [section for section in sections if section.findings]
    return "\n".join([HEAD, *_overview(told), *(line for s in told for line in _section(s)), TAIL]).rstrip() + "\n"


def main() -> None:
    """Print the page."""
    sys.stdout.write(render([section_of(system) for system in all_systems()]))


def _finding(system: System, entry: Table, ids: Sequence[str]) -> Finding:
    entry.only(ISSUE_KEYS)
    severity = entry.texts("severity") or _severity(entry.table("match").texts("evidence"))
    for word in severity:
        if word not in SEVERITIES:
            raise entry.wrong("severity", word, SEVERITIES, 'severity = ["silent"]')
    texts = ("id", "what", "library_line", "since", "fixed", "cause", "part", "detail")
    return Finding(
        system=system.name,
        severity=severity,
        novelty=novelty_of(entry),
        regressions=_regressions(system, entry.text("id"), ids),
        behind=entry.texts("behind"),
        cure=cure_of(system, entry.text("scenario")),
        releases=dict(_release(entry, line) for line in entry.texts("releases")),
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
    own = (name for name in names if f"{system.name}-{name}".startswith(issue))
    return tuple(name for name in own if max(_beginnings(f"{system.name}-{name}", ids), key=len) == issue)


def _beginnings(name: str, ids: Sequence[str]) -> Iterator[str]:
    return (known for known in ids if name.startswith(known))


def _release(entry: Table, line: str) -> tuple[str, str]:
    release, colon, said = line.partition(": ")
    if not colon:
        raise entry.wrong("releases", line, "a release and what was seen on it", 'releases = ["0.4.0: mismatch"]')
    return release, said


def _overview(sections: Sequence[Section]) -> Iterator[str]:
    causes = {section.system: [f for f in section.findings if not f.cause] for section in sections}
    every = [finding for found in causes.values() for finding in found]
    found = [finding for finding in every if finding.novelty.on_a_release]
    ours = [finding for finding in found if not finding.novelty.upstream]
    told = f"{len(found) - len(ours)} public, {len(ours)} ours, {_silent(found)} silent"
    yield f"## {len(found)} causes found on releases: {told}"
    yield ""
    yield "One row is one defect, however many scenarios show it; what another system's code causes is listed there."
    yield ""
    yield from _table(BY_REACH, list(_by_reach(every)))
    yield ""
    yield from _table(BY_SYSTEM, [_counts(each) for each in causes.items() if each[1]])
    yield ""
    yield from _table(EACH, [_row(finding) for finding in every])
    yield ""


def _by_reach(every: Sequence[Finding]) -> Iterator[tuple[str, ...]]:
    """The counts of each reach, then of what counts as found, then of the rest."""
    kinds = {reach: [f for f in every if f.novelty.reach == reach and not f.novelty.doubtful] for reach in REACHES}
    doubtful = [finding for finding in every if finding.novelty.doubtful]
    for reach in ON_A_RELEASE:
        yield _numbers(reach, REACHES[reach], kinds[reach])
    yield _numbers("**found on a release**", "", [f for f in every if f.novelty.on_a_release])
    for reach in REACHES:
        if reach not in ON_A_RELEASE:
            yield _numbers(reach, REACHES[reach], kinds[reach])
    yield _numbers("doubtful", "the entry says what speaks against it", doubtful)
    yield _numbers("**distinct causes**", "", every)


def _numbers(title: str, meaning: str, found: Sequence[Finding]) -> tuple[str, ...]:
    ours = [finding for finding in found if not finding.novelty.upstream]
    numbers = (len(found), len(found) - len(ours), len(ours), _silent(found), _silent(ours))
    return (title, meaning, *map(_number, numbers))


def _silent(found: Sequence[Finding]) -> int:
    return sum(finding.silent for finding in found)


def _number(number: int) -> str:
    return str(number) if number else ""


def _counts(of_system: tuple[str, Sequence[Finding]]) -> tuple[str, ...]:
    """The numbers of a system's causes; one that is silent here and loud there counts in both columns."""
    system, found = of_system
    public = sum(bool(finding.novelty.upstream) for finding in found)
    loudness = [sum(severity in finding.severity for finding in found) for severity in SEVERITIES]
    numbers = [len(found), public, len(found) - public, *loudness, sum(bool(f.fixed) for f in found)]
    return (system, *map(_number, numbers))


def _row(finding: Finding) -> tuple[str, ...]:
    novelty = finding.novelty
    public = f"[yes]({novelty.upstream})" if novelty.upstream else "no"
    link = f"[`{finding.name}`](#{finding.id})"
    reach = f"{novelty.reach}, doubtful" if novelty.doubtful else novelty.reach
    return (
        finding.system, link, novelty.harm, ", ".join(finding.severity), reach, public, finding.since,
        finding.fixed or "no",
    )  # fmt: skip


def _section(section: Section) -> Iterator[str]:
    faces = [finding for finding in section.findings if finding.cause]
    yield f"## {section.system}"
    yield ""
    yield from ([section.about, ""] if section.about else [])
    for part in section.parts:
        yield from [f"### {section.system}: {part.title}", "", part.text, ""] if part.title else []
        yield from _releases(part)
        for finding in part.findings:
            if not finding.cause:
                yield from _story(finding, [face for face in faces if face.cause == finding.id])
        for cause, group in groupby((f for f in part.findings if _foreign(f)), attrgetter("cause")):
            yield from _seen_here(cause, tuple(group))


def _foreign(finding: Finding) -> bool:
    """Whether the code at fault is another system's."""
    return bool(finding.cause) and not finding.cause.startswith(f"{finding.system}-")


def _story(finding: Finding, faces: Sequence[Finding]) -> Iterator[str]:
    yield f'<a id="{finding.id}"></a>'
    yield f"#### `{finding.name}` ({', '.join(finding.severity)})"
    yield ""
    yield from _render_finding(finding, faces)


def _facts(finding: Finding) -> Iterator[str]:
    novelty = finding.novelty
    yield f"**Reached by** ({novelty.reach}): {novelty.trigger}"
    if novelty.doubtful:
        yield f"**Doubtful**: {novelty.doubtful}"
    yield f"**Where**: `{finding.library_line}`"
    yield f"**Since** {finding.since}" + (f"; **fixed** in {finding.fixed}" if finding.fixed else "")
    yield from _public(finding)
    if finding.behind:
        yield f"**Behind** {_names(finding.behind)}: no run reaches it before that is repaired"
    if finding.regressions:
        yield f"**Shown by** {_names(f'regressions/{finding.system}-{name}' for name in finding.regressions)}"
    if finding.cure:
        home = home_of(system_named(finding.system), finding.cure).name
        yield f"**Cure**: [`{finding.cure}`](../scenarios/{home}/cures/{finding.cure}.patch)"


def _public(finding: Finding) -> Iterator[str]:
    """Where it is public, or how it was searched for; another face leaves that to its cause."""
    novelty = finding.novelty
    if novelty.upstream:
        yield f"**Upstream**: {_links((novelty.upstream, *novelty.also))}"
    elif novelty.searched:
        yield f"**Upstream**: none found on {novelty.searched} by {_names(novelty.queries)}"
    if novelty.related:
        yield f"**Related**: {_links(novelty.related)}"


def _links(addresses: Sequence[str]) -> str:
    return ", ".join(f"<{address}>" for address in addresses)


def _where_else(cause: Finding, face: Finding) -> str:
    where = f" At `{face.library_line}`." if face.library_line != cause.library_line else ""
    own = [name for name in face.regressions if name not in cause.regressions]
    return where + (f" Shown by {_names(f'regressions/{face.system}-{name}' for name in own)}." if own else "")


def _seen_here(cause: str, faces: Sequence[Finding]) -> Iterator[str]:
    first = faces[0]
    yield f'<a id="{first.id}"></a>'
    yield f"#### `{first.name}` ({', '.join(first.severity)}), which is [`{cause}`](#{cause})"
    yield ""
    yield from _render_finding(first, faces[1:])


def _render_finding(finding: Finding, faces: Sequence[Finding]) -> Iterator[str]:
    """A finding's text, its facts, its other faces, and what else is known of each."""
    yield from _wrapped(f"**{finding.novelty.harm}** {finding.what}")
    yield ""
    for fact in _facts(finding):
        yield from _wrapped(f"* {fact}", "  ")
    for face in faces:
        also = f"* **Also** `{face.name}` ({', '.join(face.severity)}): {face.what}"
        yield from _wrapped(also + _where_else(finding, face), "  ")
    yield ""
    for said in filter(None, (finding.detail, *(f"`{face.name}`: {face.detail}" for face in faces if face.detail))):
        yield from [*_wrapped(said), ""]


def _wrapped(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(text, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _releases(part: Part) -> Iterator[str]:
    """What the regressions of a part gave on which releases; a cell of which nothing is known says so."""
    seen = [finding for finding in part.findings if finding.releases]
    if not seen:
        return
    columns = tuple(dict.fromkeys(release for finding in seen for release in finding.releases))
    rows = [(f"`{f.name}`", *(f.releases.get(column, "not tried") for column in columns)) for f in seen]
    yield "Releases:"
    yield ""
    yield from _table(("regression", *columns), rows)
    yield ""


def _names(names: Iterator[str] | Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(titles)} |"
    yield f"|{'---|' * len(titles)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"


if __name__ == "__main__":
    main()
