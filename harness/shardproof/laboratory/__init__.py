"""From a scenario to its verdict: observed in fresh ranks, judged, confirmed, and compared with what is known."""
