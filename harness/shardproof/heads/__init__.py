"""Tests of a head: a commit, a working tree or a release of a library for which no results are recorded yet.

Everything of ours was written for releases: readers know their files, drivers their arguments, cures their lines,
entries of `issues.toml` their defects. On another tree each of them may be out of date, and that looks like a failure
of the library until somebody has looked. Two commands look:

* `shardproof port` (`ported.py` is the flow): what of ours no longer fits a head, what is repaired there, what is new.
* `shardproof claims` (`claims.py`): which entries are out of date, since upstream has landed what they name.
"""
