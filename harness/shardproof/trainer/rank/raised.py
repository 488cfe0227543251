"""Exceptions that a trainer's own lines raise or pass on, and that others of them catch: the step goes on, without what
should have come in between."""

from __future__ import annotations

Place = tuple[str, int, str]

_ENDS_A_LOOP = (StopIteration, StopAsyncIteration, GeneratorExit)
_OF_CONTROL = "torch.utils.checkpoint"
"""The module whose exceptions end a forward that is computed anew, as soon as all that is needed is there."""


class Raised:
    """The statements that have raised since the latest record, and those with which a trainer went on."""

    def __init__(self) -> None:
        self._found = list[list[object]]()
        self._now: object = None

    def met(self, error: tuple[type[BaseException], BaseException, object], place: Place | None) -> None:
        """Keep an exception, the first time that one of the trainer's statements meets it."""
        kind, value, _ = error
        of_control = issubclass(kind, _ENDS_A_LOOP) or kind.__module__ == _OF_CONTROL
        if place is None or of_control or value is self._now:
            return
        self._now = value
        self._found.append([place, kind.__name__, None])

    def goes_on(self, place: Place) -> None:
        """Keep the statement that begins next, wherever it stands."""
        if self._found and self._found[-1][2] is None:
            self._found[-1][2] = place

    def taken(self) -> list[list[object]]:
        """Return what was caught since the latest call: what raised, the exception's name, what came next."""
        found, self._found, self._now = self._found, [], None
        return [one for one in found if one[2] is not None]
