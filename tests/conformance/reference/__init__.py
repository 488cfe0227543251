"""Tests of the system reference."""
