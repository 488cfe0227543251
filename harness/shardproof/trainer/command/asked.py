"""A command with places such as `{folder}`: the words of one run, and the errors of a command that lacks a place."""

from __future__ import annotations

import hashlib
import re
import shlex
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from shardproof.errors import UsageError

FORM = "shardproof trainer --command 'torchrun --nproc-per-node {world} train.py --out {folder} --max-steps {until}'"
PLACES = ("folder", "until", "world", "resume")
REQUIRED = ("folder", "until")
IN_RESUME = ("folder", "checkpoint")
"""What may stand in the text of `--resume`: the folder, and the newest checkpoint in it."""
WORLDS = (2, 1)
MOST_RANKS = 64
_PLACE = re.compile(r"\{([A-Za-z_]\w*)\}")


@dataclass(frozen=True)
class AskedCommand:
    """What is asked for.

    Attributes:
        text: the command, with places such as `{folder}`. cut, whole: how many steps the two lengths of a run have.
        worlds: numbers of ranks: the one that is trained on, then those that resume too; none without `{world}`.
        resume: what stands for `{resume}` in runs that resume.
    """

    text: str
    cut: int
    whole: int
    worlds: tuple[int, ...]
    resume: str

    @property
    def name(self) -> str:
        """The name of the command's script, else its first word."""
        words = shlex.split(self.text)
        return Path(next((word for word in words if word.endswith(".py")), words[0])).stem

    @property
    def key(self) -> str:
        """A digest by which a run that was cut off is told from another one."""
        return hashlib.sha256(repr(self).encode("utf-8", "backslashreplace")).hexdigest()[:16]

    def words(self, folder: Path, until: int, world: int | None, checkpoint: Path | None) -> list[str]:
        """The command of one run.

        Args:
            checkpoint: of a run that resumes the newest checkpoint in its folder, or the folder; else None.
        """
        values = {"folder": str(folder), "until": str(until), "world": str(world)}
        added: list[str] = []
        if checkpoint is not None:
            of_resume = {**values, "checkpoint": str(checkpoint)}
            added = [_filled(word, of_resume) for word in shlex.split(self.resume)]
        words: list[str] = []
        for word in shlex.split(self.text):
            words += added if word == "{resume}" else [_filled(word, values)]
        return words


def _filled(word: str, values: Mapping[str, str]) -> str:
    return _PLACE.sub(lambda found: values[found[1]], word)


def asked_command(text: str, steps: str, world: str, resume: str) -> AskedCommand:
    """What the options ask for; `world` and `resume` may be empty.

    Raises:
        UsageError: a place is missing or unknown, the program is not there, or an option does not go with the command.
    """
    places = _words("--command", text, PLACES)
    for place in REQUIRED:
        if place not in places:
            what = f"--command: {{{place}}} in it"
            raise UsageError.of(what, text, f"once or more: {_MEANS[place]}", FORM)
    program = shlex.split(text)[0]
    if not _PLACE.search(program) and shutil.which(program) is None:
        raise UsageError.of("--command: program", program, "one that is on the PATH, or the path of one", FORM)
    if resume:
        _words("--resume", resume, IN_RESUME)
    if bool(resume) != ("resume" in places):
        allowed = "both or neither: `{resume}` as a word of --command, and --resume with what stands there"
        form = "--command 'python train.py {resume} …' --resume '--resume-from {checkpoint}'"
        raise UsageError.of("{resume} and --resume", resume or text, allowed, form)
    if world and "world" not in places:
        raise UsageError.of("--world", world, "with a command that has {world} in it", FORM)
    cut, whole = _numbers("--steps", steps, "2,4", 1_000_000_000)[:2]
    if cut >= whole or steps.count(",") != 1:
        raise UsageError.of("--steps", steps, "two numbers, the smaller one first", "--steps 2,4")
    worlds = _numbers("--world", world, "2,1", MOST_RANKS) if world else WORLDS
    return AskedCommand(text, cut, whole, tuple(dict.fromkeys(worlds)) if "world" in places else (), resume)


_MEANS = {
    "folder": "the folder into which the script writes its checkpoints stands there",
    "until": "the number of steps after which the script ends stands there",
}


def _words(option: str, text: str, places: tuple[str, ...]) -> set[str]:
    """The places in a text.

    Raises:
        UsageError: one of them is unknown, or the text is no shell words.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UsageError.of(option, text, f"words as in a shell ({error})", FORM) from None
    if not words:
        raise UsageError.of(option, text, "a command", FORM)
    found = {place for word in words for place in _PLACE.findall(word)}
    for place in sorted(found.difference(places)):
        raise UsageError.of(f"{option}: place", f"{{{place}}}", ", ".join(f"{{{one}}}" for one in places), FORM)
    if any("{resume}" in word and word != "{resume}" for word in words):
        raise UsageError.of(f"{option}: {{resume}}", text, "a word of its own", FORM)
    return found


def _numbers(option: str, text: str, form: str, most: int) -> tuple[int, ...]:
    parts = text.split(",")
    if len(parts) < 1 + form.count(",") * (option == "--steps") or not all(
        part.isascii() and part.isdecimal() and len(part) <= 10 and 1 <= int(part) <= most for part in parts
    ):
        raise UsageError.of(option, text, f"whole numbers from 1 to {most} with commas", f"{option} {form}")
    return tuple(map(int, parts))
