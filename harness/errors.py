"""The errors a user can cause, each naming what was given, what is allowed and the correct form."""

from __future__ import annotations

from collections.abc import Iterable


class UsageError(Exception):
    """Bad input from the user: exit status 2, nothing lost."""

    @classmethod
    def of(cls, what: str, given: object, allowed: Iterable[object] | str, form: str) -> UsageError:
        """Build the three-part message: given, allowed, correct form.

        Args:
            what: the thing that is wrong, e.g. ``"axis 'dtype'"``.
            given: the value received.
            allowed: the values that would do, or a description of them.
            form: one correct example, as the user would write it.
        """
        choices = allowed if isinstance(allowed, str) else ", ".join(str(a) for a in allowed)
        return cls(f"{what}: given {given!r}; allowed: {choices}; for example: {form}")


class HarnessError(Exception):
    """shardproof itself failed: the verdict is `unknown`, the exit status 3."""


class ServerLostError(HarnessError):
    """A process of ours was killed or ended: a server, a supervisor, a worker. It says nothing about what ran in it,
    and is tried a second time."""
