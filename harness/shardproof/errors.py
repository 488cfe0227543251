"""The errors a user can cause, each naming what was given, what is allowed and the correct form."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Self

NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""What the kernel says where there is no more room: on the disk, for this user, for this process (RLIMIT_FSIZE)."""
DISK_FAILED = (*NO_SPACE, errno.EIO)
"""What it says of a write that failed for no fault of whoever asked for it. A terminal that is gone says EIO, too."""
UNWRITTEN = (*DISK_FAILED, errno.EPIPE)
"""The same of an output; a pipe says EPIPE, when its reader has gone."""
MOST_GIVEN = 300
"""Characters of what was given that an error repeats; of something longer, the beginning."""
MOST_OF_A_LINE = 4000


A_TRAINER = "`shardproof trainer my_trainer.py` tests a training script of any stack (docs/trainer.md)"
A_COMMAND = (
    "`shardproof trainer --command 'python train.py --out {folder} --max-steps {until}'` tests a script as it is, by "
    "the checkpoints that it leaves"
)
ANY_OPTIMIZER = "`shardproof optimizer IMPORT.PATH` tries any torch.optim.Optimizer"
TWO_CHECKPOINTS = "`shardproof diff A B` compares two checkpoints of any stack"
OWN_CHECKPOINTS = "`shardproof resilience my_trainer.py` tries the checkpoints of a training script of any stack"
"""Other ways in, for who is refused because no system has what he has: see `UsageError.led_to`."""


class UsageError(Exception):
    """Bad input from the user: exit status 2, nothing lost."""

    @classmethod
    def of(
        cls, what: str, given: object, allowed: Iterable[object] | str, form: str, further: Iterable[str] = ()
    ) -> UsageError:
        """Build the three-part message: given, allowed, correct form.

        Args:
            what: the thing that is wrong, e.g. ``"axis 'dtype'"``.
            given: the value received.
            allowed: the values that would do, or a description of them.
            form: one correct example, as the user would write it.
            further: names that would do as well, of which there are too many to list.
        """
        listed = [] if isinstance(allowed, str) else [str(a) for a in allowed]
        choices = allowed if isinstance(allowed, str) else ", ".join(listed)
        meant = _meant(given, list(dict.fromkeys([*listed, *further]))) if isinstance(given, str) else ""
        return cls(f"{what}: given {_shortened_repr(given)}{meant}; allowed: {choices}; for example: {form}")

    def led_to(self, *ways: str) -> Self:
        """The error with other ways in as its last line. Whoever only mistyped a name needs none."""
        if _MEANT in str(self):
            return self
        return type(self)(f"{self}\ninstead: {'; '.join(ways)}")

    def with_example(self, form: str) -> Self:
        """The error with another correct example, for the command that is running."""
        said, example, rest = str(self).partition("; for example: ")
        return type(self)(f"{said}{example}{form}{''.join(rest.partition(chr(10))[1:])}") if example else self


_MEANT = " (did you mean "


def _meant(given: str, names: Sequence[str]) -> str:
    """The question whether one of two names was meant that are called much the same; empty where there is none."""
    from difflib import get_close_matches  # which takes time to import, and is seldom needed

    shortened = given[:LONGEST_NAME]
    swapped = {f"{shortened[:at]}{shortened[at : at + 2][::-1]}{shortened[at + 2 :]}" for at in range(len(shortened))}
    # Two swapped letters of a short name, as in bf61, leave less in common than another name has, as in fp64 and fp16.
    begun = [name for name in names if len(shortened) > 3 and name.startswith(shortened)][:3]
    near = [name for name in names if name in swapped] or begun
    near = near or get_close_matches(shortened, names, n=2, cutoff=0.78)
    return f"{_MEANT}{' or '.join(near[:3])}?)" if near and given not in near else ""


LONGEST_NAME = 100
"""Characters of what was given that are compared with names."""


def printable(text: str, most: int = MOST_OF_A_LINE) -> str:
    """A text for a terminal: characters that it would obey, or could not show, are escaped, and lines without end cut.

    Names of files and arguments come from anywhere; line breaks are ours.

    Args:
        most: characters of a line that are kept.
    """
    return "\n".join(_line(line, most) for line in text.split("\n"))


def _line(text: str, most: int) -> str:
    if len(text) > most:
        text = f"{text[:most]}… ({len(text)} characters)"
    return unlike_a_broken_node("".join(c if c.isprintable() or c == "\t" else _escaped(c) for c in text))


RETRIED = (
    ("The server socket ", "has failed to listen on any local network address."),
    ("Some NCCL ", "operations have failed or timed out."),
    ("Watchdog ", "caught collective operation timeout"),
    ("uncorrectable ", "ECC error encountered"),
    ("illegal ", "memory access"),
    ("illegal ", "instruction"),
    ("torch.distributed.", "DistNetworkError"),
    ("Segmentation ", "fault"),
    ("Segfault ", "encountered"),
    ("found ", "NaN in"),
    ("For debugging ", "consider passing CUDA_LAUNCH_BLOCKING=1"),
    ("double ", "free or corruption"),
    ("free(): ", "corrupted unsorted chunks"),
    ("malloc(): ", "unaligned tcache chunk detected"),
    ("Fatal ", "glibc error"),
    ("invalid ", "pointer"),
    ("Call to ", "CUDA function failed."),
    ("unspecified ", "launch failure"),
    ("Connection ", "reset by peer"),
    ("Connection ", "broken"),
    ("zmq.error.ZMQError: ", "Address already in use"),
    ("We couldn't ", "connect to 'https://huggingface.co'"),
    ("Unpack ", "failed: incomplete input"),
    ("The read ", "operation timed out"),
    ("Read ", "timed out"),
    ("Timeout", "Error"),
    ("Temporary ", "failure in name resolution"),
    ("Disk ", "quota exceeded"),
    ("basic_ios::clear: ", "iostream error"),
    ("The following ", "metrics failed"),
    ("removal of ", "container"),
    ("is already ", "in progress"),
    ("Error ", "deleting container"),
)
"""Words in a log, in two parts, by which a launcher takes a node for broken and runs the job again.

Source: `is_flaky_failure` in tests/test_utils/python_scripts of Megatron-LM, launch_jet_workload.py and
launch_nemo_run_workload.py, as of August 2026.
"""


def unlike_a_broken_node(text: str) -> str:
    """A text for a log, in which what a library said reads as it did and no launcher finds what it retries for.

    A rank that dies makes the others say that a connection was lost. Quoted as it stands, that sentence would make a
    launcher run a finding again, on another node, until it is taken for noise. A no-break space keeps the parts apart.
    """
    found, apart = _retried()
    return found.sub(lambda match: apart[match[0]], text)


@cache
def _retried() -> tuple[re.Pattern[str], dict[str, str]]:
    apart = {left + right: f"{left.rstrip()}\N{NO-BREAK SPACE}{right}" for left, right in RETRIED}
    return re.compile("|".join(map(re.escape, apart))), apart


def _escaped(character: str) -> str:
    return ascii(character)[1:-1]


def _shortened_repr(given: object) -> str:
    """What was given, as code, as far as an error repeats it."""
    try:
        text = repr(given)
    except (ValueError, RecursionError):  # a number of thousands of digits; tables in tables without end
        return f"a {type(given).__name__} too large to print"
    return text if len(text) <= MOST_GIVEN else f"{text[:MOST_GIVEN]}… ({len(text)} characters)"


class HarnessError(Exception):
    """shardproof itself failed: the verdict is `unknown`, the exit status 3."""


class MisfitError(HarnessError):
    """A reader, driver, contract or cure of ours does not fit the library as it is installed.

    The first line of its text is the reason in one line, the same for every scenario that meets it, and names the one
    thing that changed: "`get_optimizer() got an unexpected keyword argument 'lr'`, where our … calls it". A reader of
    a run counts scenarios by that line.
    """


class NotImportableError(HarnessError):
    """A library, or a user's own file, cannot be imported on this machine: nothing of ours failed, and nothing is said
    about the library's state. The first line of its text is a sentence that says which one, and why."""


CANNOT_IMPORT = "cannot be imported"
"""Stands in the first line of every `NotImportableError`, from which a stored result is known to be of that kind."""


def sentence_of(error: NotImportableError, library: str) -> str:
    """The text of an error, which a server begins without the name of what it could not import."""
    text = str(error)
    return f"{library} {text}" if text.startswith(CANNOT_IMPORT) else text


class ServerLostError(HarnessError):
    """A process of ours was killed or ended: a server, a supervisor, a worker. It says nothing about what ran in it,
    and is tried a second time."""
