"""Tests of the system transformer-engine."""

RELEASE = "2.20.2"
"""The release that they run."""
