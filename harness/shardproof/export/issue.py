"""The text of an issue in Markdown, beside a script: what goes wrong in the library's words, and where it seems to lie.

The parts of the text are written here. Below which headings they stand, upstream's own template says
(`shardproof.export.form`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from shardproof.errors import UsageError
from shardproof.export.body import name_of, subject, what_works
from shardproof.export.case import TRAINED, TYPED, FailureCase
from shardproof.export.description import FailureDescription, describe_unknown
from shardproof.export.form import Form, form_of
from shardproof.export.newest import Newest, not_asked, was_run_on_main
from shardproof.export.script import SCRIPT, Draft
from shardproof.export.software import Software
from shardproof.issues.known_issues import bound_of
from shardproof.issues.upstream_evidence import sentences_about, thread_of
from shardproof.protocol.registry import system_named
from shardproof.result import Result
from shardproof.wording.lines import difference_lines
from shardproof.wording.titles import title

SEEN = 6
"""How many differences the text of an issue shows."""

MESSAGE = 4000
"""Characters of an error that it quotes."""


@dataclass(frozen=True)
class Written:
    """A script as it can be written. description: what is known of the failure."""

    case: FailureCase
    draft: Draft
    description: FailureDescription
    script: str


def render_issue(
    made: Written,
    observed: str,
    software: Software,
    newest: Newest,
    passes: str = "",
    with_cure: str = "With this change the script ends with status 0:",
) -> str:
    """The text.

    Args:
        observed: what the script printed. software: what it ran with. newest: what was asked of newer releases.
        passes: the release on which the script was run and passes; empty for none. with_cure: what comes of the script
            with the cure, as the sentence above its diff.
    """
    case, draft, told = made.case, made.draft, made.description
    form = _form(case.result)
    steps = [
        f"`python {SCRIPT}` shows it, with status 1."
        + "".join(f" Without a GPU it needs `{name}` beside it." for name in draft.shims)
        + (f" It needs {' and '.join(f'`{name}`' for name in draft.beside)} beside it." if draft.beside else ""),
        _code(made.script),
        *(_folded(name, text) for name, text in draft.beside.items()),
    ]
    passed = f"The script passes on {software.library} {passes}." if passes else ""
    parts = _parts(case.result, told, newest, with_cure) | {
        "steps": _text(*steps),
        "observed": _code(_of_ranks(observed.strip()), "text"),
        "expected": _promise(case, draft, told, software),
        "versions": software.text(),
        "emulated": _emulated(draft, case.result, told, form),
    }
    parts["newest"] = _text(passed, parts["newest"])
    return _text(_gone(told), f"# {told.heading(form.prefix)}", form.fill(parts)) + "\n"


def render_draft(result: Result, told: FailureDescription | None, calls: str) -> str:
    """The text before a script was run: what is known, the calls, and what our own run saw.

    Args:
        told: what is known of the defect; None where nothing is. calls: the library's; empty where there is no script.
    """
    known = told or describe_unknown(result, title(result))
    form = _form(result)
    seen = [line for d in result.differences[:SEEN] for line in difference_lines(d)]
    if result.error is not None:
        seen = [f"{result.error.type}: {result.error.message[:MESSAGE]}".strip(), result.error.traceback[-MESSAGE:]]
    hidden = len(result.differences) - SEEN
    parts = _parts(
        result, known, not_asked(result, known.releases, known.on_main), "With this change it does not happen:"
    ) | {
        "steps": _code(calls) if calls else "",
        "observed": _text(
            _code("\n".join(seen), "text") if seen else result.signature,
            f"and {hidden} more differences" if hidden > 0 and result.error is None else "",
        ),
        "versions": "\n".join(f"* {line}" for line in _releases(result)),
        "emulated": f"Not the real thing: {', '.join(result.emulated)}." if result.emulated else "",
    }
    last = f"`shardproof export {result.id}` writes this with a script that shows it." if calls else ""
    return _text(_gone(known), f"# {known.heading(form.prefix)}", form.fill(parts), last) + "\n"


def _gone(told: FailureDescription) -> str:
    """What a text begins with where its entry says that the defect is repaired: a tracker would close it at once."""
    fixed = told.finding and (told.finding.fixed or (told.cause.fixed if told.cause else ""))
    return f"Repaired in {fixed}: not to be filed." if fixed else ""


def _form(result: Result) -> Form:
    """The form of the system's issues; the plain one for a system of a plugin that is not there now."""
    try:
        system = system_named(result.system)
    except UsageError:
        return Form()
    return form_of(system)


def _parts(result: Result, told: FailureDescription, newest: Newest, with_cure: str) -> dict[str, str]:
    """The parts that need no script."""
    form = _form(result)
    heading = told.heading(form.prefix)
    harm = "" if heading.endswith(told.harm.rstrip(".")) else told.harm
    return {
        "bug": _text(told.what or told.title, harm, _when(told), _doubt(told)),
        "regression": _regression(told),
        "newest": _text(newest.text, _on_main(told, result), _since(told)),
        "where": _text(*_cure(told, with_cure, form.patches)),
        "public": _public(told),
    }


OF_A_RANK = re.compile(r"rank (\d+): (.*)")


def _of_ranks(observed: str) -> str:
    """What a script printed, with a line that several ranks printed once: `ranks 0, 1, 3: …`."""
    ranks: dict[str, list[int]] = {}
    for line in observed.splitlines():
        said = OF_A_RANK.fullmatch(line)
        ranks.setdefault(said[2] if said else line, []).extend([int(said[1])] if said else [])
    return "\n".join(f"{_named(sorted(own))}{said}" for said, own in ranks.items())


def _named(ranks: list[int]) -> str:
    numbers = ", ".join(map(str, ranks))
    return f"rank{'s' if len(ranks) > 1 else ''} {numbers}: " if ranks else ""


def _text(*paragraphs: str) -> str:
    return "\n\n".join(text for text in paragraphs if text)


TAKES = {
    "default": "the defaults are enough",
}
"""What it takes to meet a defect, by the word that its entry has for it; for other words there is nothing to say."""


def _when(told: FailureDescription) -> str:
    """How a run comes to meet the defect, in a line."""
    if told.finding is None:
        return ""
    novelty = told.finding.novelty
    more = f" ({TAKES[novelty.reach]})" if novelty.reach in TAKES else ""
    return f"When it comes: {novelty.trigger.rstrip('.')}{more}."


def _doubt(told: FailureDescription) -> str:
    return (
        f"What speaks against it: {told.finding.novelty.doubtful}"
        if told.finding and told.finding.novelty.doubtful
        else ""
    )


def _on_main(told: FailureDescription, result: Result) -> str:
    """What was read of the main branch, if anything was."""
    seen = result.version.partition("+")[0]
    return told.on_main.sentence(seen, run=was_run_on_main(told.releases)) if told.on_main else ""


def _since(told: FailureDescription) -> str:
    """The first release with the defect, and what the same run gave on each release or commit that was tried."""
    if not told.finding:
        return ""
    tried = "; ".join(f"{name}: {OF_OURS.sub('', came)}" for name, came in told.releases.items())
    return _first(told.finding.since) + (
        f" The same run on the releases and commits that were tried: {tried}." if tried else ""
    )


OPEN = re.compile(r"(\S+)( or earlier|, older not tried)")
"""What an entry says of a first release that is only the oldest anybody looked at."""


def _first(since: str) -> str:
    """What is known of the first release with a defect, as a sentence."""
    bound, known = bound_of(since), OPEN.fullmatch(since)
    if known:
        return f"It stands in {known[1]} already; earlier releases were not looked at."
    if bound and bound.read:
        oldest = "that one" if bound.read == str(bound.version) else str(bound.version)
        return (
            f"By its source, {bound.read} is the first release in which the lines stand; the oldest on which a run "
            f"showed it is {oldest}."
        )
    if bound and bound.exact:
        return f"The first release that has it is {since}."
    return f"First release that is known to have it: {since}."


OF_OURS = re.compile(r" \(`[^)]*\)")
"""What names another entry of ours, and says nothing to a reader upstream."""


def _regression(told: FailureDescription) -> str:
    """The answer to a template's question whether an earlier release did without it."""
    bound = bound_of(told.finding.since) if told.finding else None
    if bound is None:
        return "Not sure"
    return f"Yes: {bound.version} is the first release that has it." if bound.exact else "Not sure"


def _public(told: FailureDescription) -> str:
    """The address of an upstream issue about the defect, or the day of the search that found none, and every related
    one with what the entry says of it: a maintainer who finds the nearest report by himself takes it for the same. One
    that is named as public already, which a cause may say and its face not know, is left out."""
    if told.finding is None or told.cause is None:
        return ""
    novelties = (told.finding.novelty, told.cause.novelty)
    searched = next((novelty.searched for novelty in novelties if novelty.searched), "")
    near = next((one for one in (told.finding, told.cause) if one.novelty.related), told.finding)
    found = f"Nothing of it was found in issues and pull requests on {searched}." if searched else ""
    public = {thread_of(address) for novelty in novelties for address in (novelty.upstream, *novelty.also)}
    others = (address for address in near.novelty.related if thread_of(address) not in public)
    said: dict[str, list[str]] = {}
    for address in others:
        said.setdefault(sentences_about(address, near.detail), []).append(address)
    return _text(
        f"Public already: {told.upstream}" if told.upstream else found,
        *(f"Near it, and not the same: {' and '.join(addresses)}. {why}".rstrip() for why, addresses in said.items()),
    )


def _promise(case: FailureCase, draft: Draft, told: FailureDescription, software: Software) -> str:
    """What was to happen instead, and where the library says so, if the entry knows that. Without an entry's own
    sentence, what the script compares."""
    own = told.finding.promise if told.finding else ""
    said = told.finding.expected if told.finding else ""
    return _text(said or _compared(case, draft), _place(own, case.result.version, software.versions.get("torch", "")))


def _compared(case: FailureCase, draft: Draft) -> str:
    """What the last lines of a script compare, and with what."""
    focus, reference = case.focus, case.reference_op
    what = f"The {subject(case)} is" if focus.difference else ""
    if focus.difference is None:
        return f"It was expected that {what_works(focus.op.kind, draft.calls)} without an error."
    if "subject" in draft.calls:
        return "The script observes the value that it prints as expected."
    if case.is_missing:
        return f"The checkpoint holds {focus.role} of {focus.fqn}."
    if "expected" in draft.calls or case.is_shape:
        return f"{what} the one that the script prints as expected."
    if focus.kind == TYPED:
        return f"{what} {focus.expected_dtype}."
    if focus.kind == TRAINED:
        return f"{what} what the same steps give in one process on whole tensors."
    if reference is None:
        return f"{what} the one that the script prints as expected."
    return f"{what} what it was {'before' if reference is focus.op else 'at'} the {name_of(reference.kind)}."


def _place(place: str, version: str, torch: str) -> str:
    """A place where a library promises something: an address, or a file and a name in it.

    Args:
        version: the release of the library under test. torch: that of torch, whose file it may be.
    """
    if not place:
        return ""
    if place.startswith("https://"):
        return f"The library documents it in {place}"
    file, _, name = place.partition(", ")
    if file.startswith("torch/"):
        return f"torch documents it at `{name}` in `{file}` ({torch or version})."
    return f"The library documents it at `{name}` in `{file}` ({version})."


COMPILED = re.compile(r"\.(cu|cuh|cpp|cc|h)\b")


def _emulated(draft: Draft, result: Result, told: FailureDescription, form: Form) -> str:
    """What was not the real thing when the script ran. Whether that matters is said where a GPU or the entry says it,
    or where compiled code is at fault; of Python no more than that it ran as the library has it."""
    if not draft.shims:
        return _told_first(draft, form) if result.device == "cpu" else ""
    names = " and ".join(f"`{name}`" for name in draft.shims)
    confirmed = told.finding.confirmed if told.finding else ""
    seen = f"Seen without a GPU: {names} stood in for it. {form.stand_in}"
    if told.finding and told.finding.emulation:
        return f"{seen} {told.finding.emulation}"
    if confirmed:
        return f"{seen} It does not matter here, since a GPU shows the same: {confirmed}."
    if COMPILED.search(told.line):
        return (
            f"{seen} It matters here: the place where it seems to lie is compiled code, which was not run. No GPU has "
            "shown it yet."
        )
    if not told.line:
        return f"{seen} No GPU has shown the failure yet."
    return (
        f"{seen} The place where it seems to lie is Python, which ran as the library has it. No GPU has shown it yet."
    )


def _told_first(draft: Draft, form: Form) -> str:
    """What a script without an emulated device told the library all the same."""
    lines = "\n".join(draft.calls.values())
    told = [sentence for word, sentence in form.told.items() if word in lines]
    return " ".join(
        ["No kernel was emulated.", *told] if told else ["Nothing was emulated: the library ran as it is, on CPUs."]
    )


def _releases(result: Result) -> Iterator[str]:
    """The releases that took part in a failing run, a line for each: library, torch, and the second release where a
    checkpoint moved between two."""
    yield f"{result.system} {result.version}"
    if result.loaded_by:
        yield f"{result.system} {result.loaded_by}, which loads"
    yield from (f"{name}: {how}" for name, how in result.chosen.items())


def _cure(told: FailureDescription, with_it: str, directory: str) -> list[str]:
    """The place of the defect, and the diff that repairs it.

    Args:
        directory: below which upstream keeps the files of the diff; empty for its root.
    """
    if not told.line:
        return []
    text = [told.line + "."]
    if told.instead:
        text.append(
            f"We know a change after which the script passes. It is not a repair of the cause: it {told.instead}"
        )
    elif told.patch:
        text += [with_it, _code(told.patch, "diff")]
        text += [f"In the repository, `git apply --directory={directory}` takes it."] * bool(directory)
        text += ["The change is one to torch, not to this library."] * _is_torchs(told)
    return text


def _is_torchs(told: FailureDescription) -> bool:
    """Whether a diff changes torch, where the issue is for another library."""
    system = told.finding.system if told.finding else ""
    return "+++ b/torch/" in told.patch and bool(system) and not system_named(system).is_torch


def _folded(name: str, text: str) -> str:
    """A file that a reader opens if he wants to."""
    return f"<details><summary><code>{name}</code></summary>\n\n{_code(text)}\n\n</details>"


def _code(text: str, language: str = "python") -> str:
    whole = text.removesuffix("\n")  # a diff may end in a blank line of its context, which is a line with one space
    return f"```{language}\n{whole}\n```"
