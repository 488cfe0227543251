"""Tests of the system megatron-fsdp."""
