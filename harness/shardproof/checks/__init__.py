"""Checks of shardproof itself: canaries that must be noticed, and what every system must do to be believed."""
