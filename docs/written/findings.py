"""`docs/findings.md` and one page a system below `docs/findings/`: what runs have found in real libraries.

    python -m docs.written.findings

The pages are written from every system's `issues.toml`, as `harness/shardproof/issues/findings.py` reads it. A defect
that several entries show stands once, on the page of the system whose code it is; the other entries follow it as its
faces, and the page of another system that shows it links there. A test compares the committed pages with what this
module writes.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from operator import attrgetter

from shardproof.errors import UsageError
from shardproof.issues.cures import cures_of, home_of
from shardproof.issues.findings import SEVERITIES, Finding, Part, Section, section_of
from shardproof.issues.on_main import BRANCHES
from shardproof.issues.upstream_evidence import ON_A_RELEASE, REACHES
from shardproof.protocol.registry import all_systems, system_named

from docs.written.pages import write

HEAD = """\
<!-- Written by `python -m docs.written.findings` from scenarios/*/issues.toml: change those. -->
# Findings

What has shardproof found in real, unmodified libraries? Every finding is kept as a regression, a scenario of a few
lines that one command runs, and that ends with status 1 as long as the defect is there:

```console
$ shardproof run regressions/torch-fsdp2-164929
$ shardproof replay ID --times 20              # the id it prints, again and again in fresh processes
```

This page counts them. Each system has a page of its own, with what every defect does to a run, how a run comes to meet
it, where it is in the library, and what is known of it upstream: the names in the second table lead there.

The words of the tables:

* *Silent* means that nothing was raised and some of the state was wrong.
* *Public* links to where somebody told of it, or to the change that repairs it; *ours* means that the searches that
  the entry records found neither.
* *Reach* says how far from the defaults a run must go to meet it. Only what a release shows, and nothing speaks
  against, is counted as found.
* *Since* is the first release that is known to have it, by a run of ours or, where it says so, by its source.
* A *cure* is a patch of a few lines that takes the defect away: `shardproof sweep SCENARIO --versions 0.16.1
  --versions 0.16.1+cured:ID` runs a scenario without and with it ([Cures](cures.md)).

What was seen on an emulated device ([Emulation](emulation.md)) waits for a GPU to confirm it ([GPUs](gpu.md)).

What trainers of other stacks have shown (Lightning, transformers, Accelerate, FSDP1) is told [with
them](trainer.md#trainers-that-are-shipped), and what a crash leaves on a disk in
[Resilience](resilience.md#findings). Neither is counted here.
"""

PAGE = """\
<!-- Written by `python -m docs.written.findings` from scenarios/{system}/issues.toml: change that. -->
# Findings in {system}
"""

BY_REACH = ("reach", "what it means", "causes", "public", "ours", "silent", "ours and silent")
BY_SYSTEM = ("system", "causes", "public", "ours", *SEVERITIES, "fixed upstream")
EACH = ("finding", "what a user gets", "severity", "reach", "public", "since", "fixed")

TAIL = """\
## What did not fail

Every clean cell of the walks: parameters, gradients as the optimizer saw them, moments, steps, hyperparameters,
buffers, schedule and scaler are bit-equal to the unsharded twin on all meshes up to 8 ranks, through save, reshard and
load, sharded and full.
"""


def render(sections: Sequence[Section]) -> dict[str, str]:
    """The pages in Markdown, by their paths below `docs/`.

    Raises:
        UsageError: a finding names a cause that is no finding.
    """
    homes = {finding.id: finding.system for section in sections for finding in section.findings}
    for finding in (finding for section in sections for finding in section.findings):
        for other in (*filter(None, [finding.cause]), *finding.behind):
            if other not in homes:
                raise UsageError.of(f"{finding.id}: cause or behind", other, "the id of a finding", 'cause = "…"')
    told = [section for section in sections if section.findings]
    pages = {"findings.md": _text([HEAD, *_overview(told), TAIL])}
    return pages | {f"findings/{section.system}.md": _text(_section(section, homes)) for section in told}


def _text(lines: Iterator[str] | Sequence[str]) -> str:
    return "\n".join(lines).rstrip() + "\n"


def _overview(sections: Sequence[Section]) -> Iterator[str]:
    causes = {section.system: [f for f in section.findings if not f.cause] for section in sections}
    every = [finding for found in causes.values() for finding in found]
    found = [finding for finding in every if finding.novelty.on_a_release]
    ours = [finding for finding in found if not finding.novelty.upstream]
    told = f"{len(found) - len(ours)} public, {len(ours)} ours, {_silent(found)} silent"
    yield f"## {len(found)} causes found on releases: {told}"
    yield ""
    emulated, repaired = sum(f.emulated for f in ours), sum(bool(f.fixed) for f in ours)
    yield from _wrapped(
        f"Of the {len(ours)} that are ours, {emulated} were seen on a device that is emulated, and wait for a GPU; "
        f"{repaired} were repaired upstream in a later release, so that somebody knew of them, whatever a search found."
    )
    yield ""
    yield "One row is one defect, however many scenarios show it; what another system's code causes is listed there."
    yield ""
    yield from _table(BY_REACH, list(_by_reach(every)))
    yield ""
    yield from _table(BY_SYSTEM, [_counts(each) for each in causes.items() if each[1]])
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
    return (f"[{system}](findings/{system}.md)", *map(_number, numbers))


def _row(finding: Finding) -> tuple[str, ...]:
    novelty = finding.novelty
    public = f"[yes]({novelty.upstream})" if novelty.upstream else "no"
    link = f"[`{finding.name}`](#{finding.id})"
    reach = f"{novelty.reach}, doubtful" if novelty.doubtful else novelty.reach
    severity = ", ".join(finding.severity)
    return (link, novelty.harm, severity, reach, public, finding.since, finding.fixed or "no")


def _section(section: Section, homes: Mapping[str, str]) -> Iterator[str]:
    """The page of a system. homes: the system of each finding, by which a link to another page is made."""
    faces = [finding for finding in section.findings if finding.cause]
    own = [finding for finding in section.findings if not finding.cause]
    yield PAGE.format(system=section.system)
    yield from ([section.about, ""] if section.about else [])
    if own:
        yield from (*_table(EACH, [_row(finding) for finding in own]), "")
    for part in section.parts:
        if part.title or part.findings:
            yield from (f"## {part.title or 'Each finding'}", "", *([part.text, ""] if part.text else []))
        yield from _releases(part)
        for finding in part.findings:
            if not finding.cause:
                yield from _story(finding, [face for face in faces if face.cause == finding.id])
        for cause, group in groupby((f for f in part.findings if _foreign(f)), attrgetter("cause")):
            yield from _seen_here(f"{homes[cause]}.md#{cause}", tuple(group))


def _foreign(finding: Finding) -> bool:
    """Whether the code at fault is another system's."""
    return bool(finding.cause) and not finding.cause.startswith(f"{finding.system}-")


def _story(finding: Finding, faces: Sequence[Finding]) -> Iterator[str]:
    yield f'<a id="{finding.id}"></a>'
    yield f"### `{finding.name}` ({', '.join(finding.severity)})"
    yield ""
    yield from _told(finding, faces)


def _facts(finding: Finding) -> Iterator[str]:
    novelty = finding.novelty
    yield f"**Reached by** ({novelty.reach}): {novelty.trigger}"
    if novelty.doubtful:
        yield f"**Doubtful**: {novelty.doubtful}"
    yield f"**Where**: `{finding.library_line}`"
    yield f"**Since** {finding.since}" + (f"; **fixed** in {finding.fixed}" if finding.fixed else "")
    yield from _public(finding)
    if finding.on_main:
        run = any(name.startswith(BRANCHES) for name in finding.releases)
        yield f"**Main**: {finding.on_main.sentence(run=run)}"
    if finding.behind:
        yield f"**Behind** {_names(finding.behind)}: no run reaches it before that is repaired"
    if finding.regressions:
        yield f"**Shown by** {_names(finding.scenarios)}"
    if finding.cure:
        home = home_of(system_named(finding.system), finding.cure).name
        own = next(cure for cure in cures_of(system_named(home)) if cure.id == finding.cure)
        kind = f", a {own.kind}: it {own.instead}" if own.instead else ""
        yield f"**Cure**: [`{finding.cure}`](../../scenarios/{home}/cures/{finding.cure}.patch){kind}"


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


def _seen_here(link: str, faces: Sequence[Finding]) -> Iterator[str]:
    """What the code of another system does here. link: to the finding on that system's page."""
    first = faces[0]
    yield f'<a id="{first.id}"></a>'
    yield f"### `{first.name}` ({', '.join(first.severity)}), which is [`{first.cause}`]({link})"
    yield ""
    yield from _told(first, faces[1:])


def _told(finding: Finding, faces: Sequence[Finding]) -> Iterator[str]:
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


def main() -> None:
    """Write the pages."""
    write(render([section_of(system) for system in all_systems()]))


if __name__ == "__main__":
    main()
