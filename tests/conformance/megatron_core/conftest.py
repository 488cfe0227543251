"""Warm servers of Megatron-Core that the tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from harness.scenario import Scenario
from harness.systems.megatron_core import SYSTEM
from harness.world.server import ForkServer
from tests.conformance.megatron_core import RELEASE
from tests.conformance.sessions import Servers, server_of


@pytest.fixture(scope="package")
def servers() -> Iterator[Servers]:
    """A warm server for each variant, which also knows the repaired systems of the plugin beside this file."""
    running: dict[str, ForkServer] = {}
    with ExitStack() as stack:

        def server(scenario: Scenario) -> ForkServer:
            name = SYSTEM.variant(scenario)
            if name not in running:
                plugins = ["tests.conformance.megatron_core.repaired"]
                running[name] = stack.enter_context(server_of(SYSTEM, RELEASE, variant=name, plugins=plugins))
            return running[name]

        yield server
