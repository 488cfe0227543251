"""Tests of the system transformer-engine."""
