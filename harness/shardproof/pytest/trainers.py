"""Cells of a trainer as items: what the decorator `trainer` of `shardproof.pytest` comes to when tests are collected.

A decorated test or class names a trainer's file. Its trainer becomes known as a system, each of its cells becomes a
scenario, and from there on all is as with other scenarios: `shardproof.pytest.items` runs them.

*Does not verify*: that a test file can be imported on a rank. A class of a trainer in a test file is imported there
like any trainer's file: without pytest's session, its fixtures and its conftest.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping

import pytest

from shardproof.errors import UsageError
from shardproof.pytest import MARK, Values
from shardproof.pytest.items import Awaited, as_pytest_usage_errors, bench, readable_id, register, system_mark
from shardproof.scenario import Scenario
from shardproof.trainer.arms import program_of
from shardproof.trainer.cells import cells, scenario_of, settings_of
from shardproof.trainer.described import Described, described, text_of

RESULT = "result"
"""The argument of a decorated test that is the result of its cell."""


def parametrize(metafunc: pytest.Metafunc, mark: pytest.Mark) -> None:
    """Have a decorated test run once for each cell.

    Raises:
        pytest.UsageError: there is no such trainer, or it has no such axis, value or program.
    """
    register(metafunc.config)
    with as_pytest_usage_errors():
        found = described(_file_of(metafunc, mark))
        bench(metafunc.config).use_trainer(found)
        scenarios = _scenarios(found, mark)
    takes_result = RESULT in metafunc.fixturenames
    marks = system_mark(metafunc.config, found.system)
    values = [
        pytest.param(*([one, Awaited()] if takes_result else [one]), id=readable_id(one), marks=marks)
        for one in scenarios
    ]  # fmt: skip
    metafunc.parametrize([MARK, RESULT] if takes_result else [MARK], values, indirect=[MARK])


def _file_of(metafunc: pytest.Metafunc, mark: pytest.Mark) -> str:
    """`FILE.py` or `FILE.py:CLASS` of a decorated test: what its decorator names, from the folder of its own file; of a
    method of a trainer's class, that class in the file where it is written."""
    if mark.args[0]:
        return str(metafunc.definition.path.parent / mark.args[0])
    if metafunc.cls is None:
        raise pytest.UsageError(
            f"shardproof: {metafunc.definition.nodeid} names no trainer; "
            'for example: @trainer("my_trainer.py"), or @trainer above a class that derives from Trainer'
        )
    return f"{inspect.getfile(metafunc.cls)}:{metafunc.cls.__name__}"


def _scenarios(found: Described, mark: pytest.Mark) -> list[Scenario]:
    """The scenarios of the cells that a decorator asks for.

    Raises:
        UsageError: an axis, value or program that the trainer does not have, with an example as a decorator has it.
    """
    program, version = mark.kwargs["program"], mark.kwargs["version"]
    program_of(found, program)
    axes = {"program": program, **({"version": version} if version else {})}
    try:
        wanted = settings_of(found, _texts(mark.kwargs["set"]))
        return [scenario_of(found, cell, **axes) for cell in cells(found, wanted, mark.kwargs["strength"])]
    except UsageError as error:
        raise UsageError(re.sub(r"--set (\w+)=(\S+)", r'set={"\1": "\2"}', str(error))) from None


def _texts(settings: Mapping[str, Values]) -> Iterator[str]:
    """The values of a decorator in the form of the command line, `mesh=2,4`."""
    for axis, given in settings.items():
        listed = given if isinstance(given, list | tuple) else [given]
        yield f"{axis}={','.join(map(text_of, listed))}"
