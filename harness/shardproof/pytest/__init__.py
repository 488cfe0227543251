"""A pytest plugin: scenarios as test items, and a decorator for a framework's own tests.

    pytest --shardproof nightly -n auto

Every scenario of the plan becomes an item, such as `shardproof::torch-fsdp2/dense-bf16-1x2x1-resume-1a2b3c4d5e6f`. Its
setup observes and judges the scenario, so that a failure of the harness is pytest's *error* and never a failure; its
call asserts. New failures fail with all that differs as the message, known ones are expected failures, and what a
system refuses is skipped. Without paths on the command line nothing else is collected.

    from shardproof.pytest import scenarios

    @scenarios(system="megatron-core@path:.", program="resume", mesh=["1x2x1", "1x4x1"])
    def test_a_resumed_run_goes_on_as_if_nothing_had_happened(): ...

A trainer (`shardproof.trainer`) has a decorator too, which makes an item of each of its cells:

    from shardproof.pytest import trainer

    @trainer("my_trainer.py", set={"mesh": "2"})
    def test_my_trainer_resumes(): ...

This module is loaded in every pytest process of an environment that has shardproof. So it imports nothing but pytest,
and does nothing but add options, until a scenario is asked for; `shardproof.pytest.items` has all the rest.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, overload

import pytest

if TYPE_CHECKING:
    from shardproof.pytest.items import Examination

Test = TypeVar("Test", bound=Callable[..., object])

Values = str | int | Sequence[str | int]
"""One value of an axis, or several."""

MARK = "shardproof"

TRAINER_MARK = "shardproof_trainer"
"""The marker of tests that `trainer` decorates."""

ARMS_TEST = "test_arms"
"""The method that a decorated trainer class has as its test."""

Value = str | int | float | bool | None
"""A value of a trainer's axis."""

Cells = Mapping[str, Value | Sequence[Value]]
"""Axis of a trainer → one of its values, or several."""


def scenarios(*names: str, system: str = "", known: bool = True, **axes: Values) -> Callable[[Test], Test]:
    """Run a test once for each of these scenarios; every combination of the values of its axes is one.

    The fixture `shardproof` holds the outcome of the scenario, which a test may look at. If it does not, the test
    passes or fails with the scenario.

    Args:
        names: spaces or scenario files, of which the axes given here are changed. Without any, one scenario that has
            its system's defaults.
        system: `NAME[@VERSION]`; the folder of `path:DIR` is meant from pytest's rootdir.
        known: whether known issues are expected failures; otherwise they fail as others do.
        axes: axis → value or values, as in a scenario file.
    """

    def decorated(test: Test) -> Test:
        marked: Test = getattr(pytest.mark, MARK)(*names, system=system, known=known, **axes)(test)
        used: Test = pytest.mark.usefixtures(MARK)(marked)
        return used

    return decorated


@overload
def trainer(file: type[Any], /) -> type[Any]: ...


@overload
def trainer(
    file: str = "", /, *, set: Cells | None = None, strength: int | None = None, program: str = "arms",
    version: str = "", known: bool = True,
) -> Callable[[Test], Test]: ...  # fmt: skip


def trainer(
    file: Any = "", /, *, set: Cells | None = None, strength: int | None = None, program: str = "arms",  # noqa: A002 (as `--set`)
    version: str = "", known: bool = True,
) -> Any:  # fmt: skip
    """Run a test once for each cell of a trainer, or make a test of a trainer's class.

        @trainer("my_trainer.py", set={"mesh": ["2"]})
        def test_mine(result): ...

        @trainer
        class TestMine(Trainer): ...

    The argument `result` of such a test is the cell's `shardproof.result.Result`; the fixture `shardproof` is there as
    with `scenarios`. A test that looks at neither passes or fails with the cell.

    Args:
        file: `FILE.py` or `FILE.py:CLASS`; a relative one is meant from the folder of the test's own file. Nothing on a
            class of a trainer, since its own file is the trainer's.
        set: axis → value or values, where not all of its cells are wanted: what `shardproof trainer --set` takes.
        strength: take few cells that have every combination of so many axes; all of them without it.
        program: steps before and after the save, and which arms: `arms 1 1 resumed`.
        version: another release of the first package that the trainer requires.
        known: whether known issues are expected failures; otherwise they fail as others do.
    """
    named = file if isinstance(file, str) else ""
    mark = getattr(pytest.mark, TRAINER_MARK)(
        named, set=dict(set or {}), strength=strength, program=program, version=version, known=known
    )

    def decorated(test: Any) -> Any:
        if inspect.isclass(test) and not named:
            return _with_test(test, mark)
        return pytest.mark.usefixtures(MARK)(mark(test))

    return decorated if isinstance(file, str) else decorated(file)


def _with_test(trainer_class: type[Any], mark: pytest.MarkDecorator) -> type[Any]:
    """A trainer's class with a test method, which pytest runs for each of its cells. A class that has a method of that
    name keeps its own, to say more about the result.

    Raises:
        TypeError: the class has an `__init__`. pytest would leave such a class out, and nobody would notice.
    """
    if trainer_class.__init__ is not object.__init__:
        raise TypeError(
            f"{trainer_class.__name__} has an __init__, and pytest collects no such class: use build or fit"
        )

    def test_arms(self: object) -> None:
        """Passes or fails with the cell."""

    own = vars(trainer_class).get(ARMS_TEST, test_arms)
    setattr(trainer_class, ARMS_TEST, pytest.mark.usefixtures(MARK)(mark(own)))
    return trainer_class


@pytest.fixture
def shardproof(request: pytest.FixtureRequest) -> Examination:
    """The scenario of a test that `scenarios` or `trainer` decorates, run and judged: see
    `shardproof.pytest.items.Examination`."""
    from shardproof.pytest.items import examination

    mark = _mark_of(request.node)
    if mark is None or not hasattr(request, "param"):
        told = "the fixture `shardproof` is for tests that scenarios or trainer of shardproof.pytest decorates"
        pytest.fail(told, False)
    return examination(request.node, request.param, mark.kwargs["known"])


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options of this plugin. Their values are text: xdist sends them to its workers."""
    group = parser.getgroup("shardproof", "bitwise tests of sharded training state")
    group.addoption(
        "--shardproof", action="append", default=[], metavar="NAME",
        help="Collect the scenarios of a space, such as nightly, or of a scenario file; repeatable.",
    )  # fmt: skip
    group.addoption(
        "--shardproof-system", action="append", default=[], metavar="NAME[@VERSION]", help="Only this; repeatable."
    )
    group.addoption(
        "--shardproof-clone", action="append", default=[], metavar="NAME=DIR",
        help="Repository of a system or package, bare or not, for NAME@git:REV; repeatable.",
    )  # fmt: skip
    group.addoption(
        "--shardproof-set", action="append", default=[], metavar="AXIS=V[,V]...", help="Override an axis; repeatable."
    )
    group.addoption("--shardproof-sample", default=None, metavar="N", help="N scenarios in all.")
    group.addoption("--shardproof-shard", default=None, metavar="I/N", help="The I-th of N parts, by scenario id.")
    group.addoption("--shardproof-deadline-s", default="30", metavar="S", help="Seconds a session may take [30].")
    group.addoption("--shardproof-out", default=None, metavar="DIR", help="Write results and reports there.")
    group.addoption(
        "--shardproof-plugin", action="append", default=[], metavar="MODULE", help="Import this module first."
    )


def pytest_configure(config: pytest.Config) -> None:
    """Have scenarios collected, if any are asked for."""
    config.addinivalue_line("markers", f"{MARK}: a scenario of shardproof's (set by shardproof.pytest.scenarios)")
    config.addinivalue_line("markers", f"{TRAINER_MARK}: cells of a trainer (set by shardproof.pytest.trainer)")
    if config.getoption("shardproof"):
        from shardproof.pytest.session import collect

        collect(config)
    if config.getoption("shardproof_out"):
        from shardproof.pytest.session import keep

        keep(config)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrise a decorated test so that pytest runs it once per scenario named in the decorator.

    Raises:
        pytest.Collector.CollectError: what the decorator asks for is not there. pytest prints its text alone, without a
            traceback through this plugin.
    """
    if MARK not in metafunc.fixturenames:
        return
    mark = _mark_of(metafunc.definition)
    if mark is None:
        return
    try:
        if mark.name == TRAINER_MARK:
            from shardproof.pytest.trainers import parametrize

            parametrize(metafunc, mark)
        else:
            metafunc.parametrize(MARK, list(_parameters(metafunc.config, mark)), indirect=True)
    except pytest.UsageError as error:
        raise pytest.Collector.CollectError(f"{_place_of(metafunc)}: {error}") from None


def _place_of(metafunc: pytest.Metafunc) -> str:
    """Where a decorated test or class stands, as `test_mine.py:12`."""
    decorated = metafunc.cls if metafunc.cls and metafunc.function.__name__ == ARMS_TEST else metafunc.function
    return f"{metafunc.definition.path.name}:{inspect.getsourcelines(decorated)[1]}"


def pytest_pycollect_makeitem(collector: pytest.Collector, name: str, obj: object) -> pytest.Collector | None:
    """Collect a trainer's class that is decorated in a test file, whatever its name."""
    if not inspect.isclass(obj) or not isinstance(collector, pytest.Module):
        return None
    marks = getattr(vars(obj).get(ARMS_TEST), "pytestmark", ())
    if obj.__module__ != collector.obj.__name__ or TRAINER_MARK not in [mark.name for mark in marks]:
        return None
    found: pytest.Class = pytest.Class.from_parent(collector, name=name)
    return found


def _mark_of(node: pytest.Item) -> pytest.Mark | None:
    """The marker that `scenarios` or `trainer` set on a test; where both did, the one that is nearer to the test."""
    return next((mark for mark in node.iter_markers() if mark.name in (MARK, TRAINER_MARK)), None)


def _parameters(config: pytest.Config, mark: pytest.Mark) -> Iterator[object]:
    from shardproof.pytest.items import readable_id, register, stated, system_mark

    register(config)
    axes = {axis: values for axis, values in mark.kwargs.items() if axis not in ("system", "known")}
    for scenario in stated(config, mark.args, mark.kwargs["system"], axes):
        yield pytest.param(scenario, id=readable_id(scenario), marks=system_mark(config, scenario.system))
