"""Tests of the system automodel."""
