"""Switches of the `options` axis that only this system has, and which parameters they are about. Values only."""

from __future__ import annotations

from shardproof.models import ParamSpec
from shardproof.scenario import Scenario

PREFIX = "te_"
"""How the names of models begin that are made of the library's own layers. All others are trees of modules with
hand-registered parameters, which the library's optimizer steps."""

CALIBRATING = "calibrating"
NO_EXTRA_STATE = "no_extra_state"
"""The switch under which checkpoints leave the layers' extra state out."""
TAGS = "tags"
"""The switch under which ranks record the marks of tensor-parallel layers (`tags`)."""
FP8_CURRENT, FP8_DELAYED = "fp8_current", "fp8_delayed"
QUANTISED = (FP8_CURRENT, FP8_DELAYED)
"""Switches under which matrices are stored in fp8e4m3, one scale for each."""
FP8_BOUND = 0.4375
"""The largest magnitude of initial values: 448, the largest number of fp8e4m3, times a power of two. A cast then
leaves them as they are."""


def is_layers(model: str) -> bool:
    """Whether a model is made of the library's own layers."""
    return model.startswith(PREFIX)


def is_quantised(scenario: Scenario, spec: ParamSpec) -> bool:
    """Whether a parameter is stored in fp8e4m3 beside one scale. Its storage dtype is then the dtype that it is read
    as."""
    return len(spec.shape) == 2 and any(option in scenario.options for option in QUANTISED)
