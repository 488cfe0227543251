"""The evidence that an entry of `issues.toml` must give before it may call itself a finding: whether the defect is
public already, which users meet it, and what harm it does.

Three questions are asked of every defect that we write down. Has somebody told of it before us? Who meets it? What
does he have in the end? An entry that leaves one of them open is worth little, since its reader must answer it
himself; so it is bad input. The keys:

    harm = "Updates are 4 times too large on 4 ranks."     # one plain sentence about the effect
    reach = "documented flag"                              # one of REACHES: how far from the defaults
    trigger = "Gradient accumulation under ZeRO-2."        # how a run comes to meet it
    upstream = "https://github.com/…/issues/6660"          # where it is public, or the change that repairs it
    also = ["https://github.com/…/pull/6773"]              # optional: other places that tell of the same defect
    searched = { on = "2026-11-22", queries = ["…", "…"] } # in place of upstream: what was searched, and when
    related = ["https://github.com/…/pull/8225"]           # optional: near it, and not the same defect
    doubtful = "The library says that it is not supported."  # optional: why it is not counted as found
    ready = true                                          # optional: judged as its maintainer would; it can be sent

A query is the text that was given to a search of public issue and pull-request threads, or a `git log` that ran over
all branches and pull requests of the library's repository. Another face of a defect (`cause`) may leave out `upstream`
and `searched`: those of its cause hold.

*Verifies*: that the answers are there, and have the right form.
*Does not verify*: that they are true. A search proves that we have looked, not that nobody has told.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import date

from shardproof.tables import Table

REACHES = {
    "default": "the library's own defaults, or those of its training script",
    "documented flag": "a documented option, argument or kind of model that people ask for",
    "API only": "calls of the library's functions that no training script makes",
    "the training script refuses it": "the library's training script refuses it, its functions do not",
    "needs another cure first": "another defect ends every run before",
    "no release": "nothing that was released",
}
"""How far from the defaults a run must go to meet a defect, and what that means."""

ON_A_RELEASE = ("default", "documented flag", "API only")
"""The reaches that count as found on a release."""

NOVELTY_KEYS = ("harm", "reach", "trigger", "upstream", "also", "searched", "related", "doubtful", "ready")

WORDS = 4
"""What has fewer words is no sentence about an effect."""

QUERIES = 2
"""One search is none: a symptom and a function have different words."""


@dataclass(frozen=True)
class Novelty:
    """How a defect stands.

    * harm: what a user has in the end, in one sentence.
    * reach: one of REACHES. trigger: how a run comes to meet it.
    * upstream: where it is public; empty if nothing was found, or if its cause says it.
    * also, related: further addresses, of the same defect and of near ones.
    * searched: the day of the search, ISO 8601; empty where it is public. queries: what was searched.
    * doubtful: why it does not count as found; empty where it does.
    * ready: whether it was judged as its maintainer would, and can be sent (`shardproof.export.ready`).
    """

    harm: str
    reach: str
    trigger: str
    upstream: str = ""
    also: tuple[str, ...] = ()
    related: tuple[str, ...] = ()
    searched: str = ""
    queries: tuple[str, ...] = ()
    doubtful: str = ""
    ready: bool = False

    @property
    def on_a_release(self) -> bool:
        """Whether the entry counts as a finding: a published release shows the defect, and the entry records no
        doubt."""
        return self.reach in ON_A_RELEASE and not self.doubtful


def thread_of(address: str) -> str:
    """What names an issue or pull request, however its address ends, such as `NVIDIA/Megatron-LM#6773`; another address
    as it is. GitHub numbers both kinds in one row, and leads from `issues/12` to `pull/12`."""
    found = _THREAD.match(address)
    return f"{found['repository']}#{found['number']}" if found else address


_THREAD = re.compile(r"https://github\.com/(?P<repository>[^/]+/[^/]+)/(issues|pull)/(?P<number>\d+)")


def sentences_about(address: str, detail: str) -> str:
    """The sentences of an entry's detail that name an issue or pull request by its number."""
    number = re.compile(rf"(?<![\d.]){address.rpartition('/')[2]}(?![\d`]|\.\d)")
    return " ".join(sentence for sentence in re.split(r"(?<=\.) (?=[A-Z])", detail) if number.search(sentence))


def novelty_of(entry: Table) -> Novelty:
    """What an entry says of the keys above.

    Raises:
        UsageError: an answer is missing, or has another form.
    """
    entry.only(tuple(entry.content), needed=("harm", "reach", "trigger"))
    if entry.text("reach") not in REACHES:
        raise entry.wrong("reach", entry.text("reach"), REACHES, 'reach = "documented flag"')
    for key in ("harm", "trigger"):
        _sentence(entry, key)
    for key in ("upstream", "also", "related"):
        _addresses(entry, key)
    _one_answer(entry)
    searched, queries = _search(entry)
    return Novelty(
        harm=_plain(entry.text("harm")), reach=entry.text("reach"), trigger=_plain(entry.text("trigger")),
        upstream=entry.text("upstream"), also=entry.texts("also"), related=entry.texts("related"),
        searched=searched, queries=queries, doubtful=_plain(entry.text("doubtful")),
        ready=entry.flag("ready", absent=False),
    )  # fmt: skip


def _plain(text: str) -> str:
    return " ".join(text.split())


def _sentence(entry: Table, key: str) -> None:
    text = _plain(entry.text(key))
    if not text.endswith(".") or len(text.split()) < WORDS:
        raise entry.wrong(
            key,
            text,
            f"a sentence of {WORDS} words or more, with its full stop",
            f'{key} = "Gradients are doubled on every rank."',
        )
    if key == "harm" and text.lower().startswith("the same"):
        raise entry.wrong(
            key, text, "what happens, without another entry to look it up in", f'{key} = "Gradients are doubled."'
        )


def _addresses(entry: Table, key: str) -> None:
    given = [entry.text(key)] if key == "upstream" else entry.texts(key)
    for address in given:
        if (address or key != "upstream") and not address.startswith("https://"):
            form = '"https://…"' if key == "upstream" else '["https://…"]'
            raise entry.wrong(key, address, "an https address", f"{key} = {form}")


def _one_answer(entry: Table) -> None:
    """Public, searched, or another's face: exactly one of the first two, or neither and a cause."""
    answers = [key for key in ("upstream", "searched") if key in entry and (key != "upstream" or entry.text(key))]
    form = 'searched = { on = "2026-11-22", queries = ["…", "…"] }'
    if len(answers) > 1 or (not answers and "cause" not in entry):
        raise entry.wrong("upstream", entry.text("upstream"), "an https address, or searched in its place", form)


def _search(entry: Table) -> tuple[str, tuple[str, ...]]:
    if "searched" not in entry:
        return "", ()
    table = entry.table("searched").only(("on", "queries"), needed=("on", "queries"))
    if not _is_day(table.text("on")):
        raise table.wrong("on", table.text("on"), "a day, ISO 8601", 'on = "2026-11-22"')
    queries = table.texts("queries", empty=False)
    if len({query.strip() for query in queries if query.strip()}) < QUERIES:
        raise table.wrong("queries", list(queries), f"{QUERIES} different searches or more", 'queries = ["…", "…"]')
    return table.text("on"), queries


def _is_day(text: str) -> bool:
    try:
        return str(date.fromisoformat(text)) == text
    except ValueError:
        return False
