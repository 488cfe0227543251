"""Tests of the system megatron-core."""
