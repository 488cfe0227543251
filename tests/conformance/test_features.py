"""Features of the systems that ship here: what a limit asks of a release by its number is what the release's own source
shows."""

from __future__ import annotations

import pytest
from shardproof.protocol.features import found_in
from shardproof.protocol.registry import system_named
from shardproof.protocol.releases import package_of
from shardproof.world.interpreter import interpreter
from shardproof.world.overlay import install

from tests.conformance.built_in import BUILT_IN

DECLARE = [
    (info.name, release.version)
    for info in BUILT_IN
    if info.package and info.accepts.features
    for release in package_of(info).releases
]


@pytest.mark.nightly
@pytest.mark.parametrize(("system", "version"), DECLARE)
def test_a_release_shows_the_features_that_its_number_stands_for(system: str, version: str) -> None:
    info = system_named(system)
    declared = package_of(info)
    site = install((f"{declared.name}=={version}",), interpreter())
    expected = tuple(sorted(feature.name for feature in info.accepts.features if feature.in_release(version)))
    until = {feature.name for feature in info.accepts.features if feature.until and not feature.in_release(version)}
    assert (
        tuple(name for name in found_in(site / declared.tree, info.accepts.features) if name not in until) == expected
    )
