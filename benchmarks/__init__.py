"""Benchmarks: ratios side by side in one run, never timed assertions. `make bench` runs them all."""
