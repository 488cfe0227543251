"""That tests of one group stay in one process.

*Verifies*: with `--dist loadgroup`, as CI runs, that the id of a test ends with its group, where the
scheduler reads it. *Does not verify*: anything in a run without `-n`.
"""

from __future__ import annotations

import pytest


def test_the_scheduler_sees_the_group_of_a_test(request: pytest.FixtureRequest) -> None:
    """Where xdist and pytest do not fit together, nothing fails: every process just starts every server."""
    if not request.config.getoption("loadgroup", default=False):
        return
    marker = request.node.get_closest_marker("xdist_group")
    assert marker is not None
    assert request.node.nodeid.endswith(f"@{marker.args[0]}")
