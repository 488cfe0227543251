"""Tests of the system megatron-fsdp."""

RELEASE = "0.6.1"
"""The release that they run."""
