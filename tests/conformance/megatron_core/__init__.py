"""Tests of the system megatron-core."""

RELEASE = "0.16.1"
"""The release that most of them run."""
