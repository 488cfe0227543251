"""Scenarios as data: spaces to walk (smoke, nightly, weekly) and regressions, one file for each known defect.

Shipped inside the wheel, so that an installed shardproof runs them by name. `harness.space` reads them.
"""
