"""Tests of the system torch-fsdp2."""
