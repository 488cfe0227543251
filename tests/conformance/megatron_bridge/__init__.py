"""Tests of the system megatron-bridge."""
