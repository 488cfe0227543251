"""Tests of the system deepspeed."""

RELEASE = "0.19.8"
"""The release that they run."""
