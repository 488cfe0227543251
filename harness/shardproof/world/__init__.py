"""Runs real ranks: a warm server that forks them, and the isolation that keeps one job from harming another.

The parent talks to a server through `server`; `host` is the server's own process, `supervisor` that of one job, `rank`
that of one rank, and `worker` one that answers calls. `job` is what is asked and what comes back, `wire` how it is
sent. `overlay` puts a release of a library in front of the path, and `environments` keeps a server for each.
`rehearsal` shows beforehand whether ranks can run on this machine.
"""
