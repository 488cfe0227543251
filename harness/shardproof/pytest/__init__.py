"""A pytest plugin: scenarios as test items, and a decorator for a framework's own tests.

    pytest --shardproof nightly -n auto

Every scenario of the plan becomes an item, such as `shardproof::torch-fsdp2/dense-bf16-1x2x1-resume-1a2b3c4d5e6f`. Its
setup observes and judges the scenario, so that a failure of the harness is pytest's *error* and never a failure; its
call asserts. New failures fail with all that differs as the message, known ones are expected failures, and what a
system refuses is skipped. Without paths on the command line nothing else is collected.

    from shardproof.pytest import scenarios

    @scenarios(system="megatron-core@path:.", program="resume", mesh=["1x2x1", "1x4x1"])
    def test_a_resumed_run_goes_on_as_if_nothing_had_happened(): ...

This module is loaded in every pytest process of an environment that has shardproof. So it imports nothing but pytest,
and does nothing but add options, until a scenario is asked for; `shardproof.pytest.items` has all the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

import pytest

if TYPE_CHECKING:
    from shardproof.pytest.items import Examination

Test = TypeVar("Test", bound=Callable[..., object])

Values = str | int | Sequence[str | int]
"""One value of an axis, or several."""

MARK = "shardproof"


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


@pytest.fixture
def shardproof(request: pytest.FixtureRequest) -> Examination:
    """The scenario of a test that `scenarios` decorates, run and judged: see `shardproof.pytest.items.Examination`."""
    from shardproof.pytest.items import examination

    mark = request.node.get_closest_marker(MARK)
    if mark is None or not hasattr(request, "param"):
        pytest.fail("the fixture `shardproof` is for tests that shardproof.pytest.scenarios decorates", False)
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
    group.addoption("--shardproof-sample", default=None, metavar="N", help="N scenarios of each walk.")
    group.addoption("--shardproof-shard", default=None, metavar="I/N", help="The I-th of N parts, by scenario id.")
    group.addoption("--shardproof-deadline-s", default="30", metavar="S", help="Seconds a session may take [30].")
    group.addoption("--shardproof-out", default=None, metavar="DIR", help="Write results and reports there.")
    group.addoption(
        "--shardproof-plugin", action="append", default=[], metavar="MODULE", help="Import this module first."
    )


def pytest_configure(config: pytest.Config) -> None:
    """Have scenarios collected, if any are asked for."""
    config.addinivalue_line("markers", f"{MARK}: a scenario of shardproof's (set by shardproof.pytest.scenarios)")
    if config.getoption("shardproof"):
        from shardproof.pytest.session import collect

        collect(config)
    if config.getoption("shardproof_out"):
        from shardproof.pytest.session import keep

        keep(config)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrise a decorated test so that pytest runs it once per scenario named in the decorator."""
    if MARK not in metafunc.fixturenames:
        return
    mark = metafunc.definition.get_closest_marker(MARK)
    if mark is not None:
        metafunc.parametrize(MARK, list(_parameters(metafunc.config, mark)), indirect=True)


def _parameters(config: pytest.Config, mark: pytest.Mark) -> Iterator[object]:
    from shardproof.pytest.items import readable_id, register, stated, system_mark

    register(config)
    axes = {axis: values for axis, values in mark.kwargs.items() if axis not in ("system", "known")}
    for scenario in stated(config, mark.args, mark.kwargs["system"], axes):
        yield pytest.param(scenario, id=readable_id(scenario), marks=system_mark(config, scenario.system))
