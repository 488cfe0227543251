"""Takes a scenario to its verdict: run in fresh ranks, judged against the oracle, confirmed, and compared with known
issues."""
