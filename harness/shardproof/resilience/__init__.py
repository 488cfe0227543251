"""Tests how a checkpoint survives crashes and damage on disk, for any stack that saves and loads one.

A *stack* (`stacks`) is a way to keep a checkpoint: a writer, a reader and a layout. One process saves an *old* state
and then, while `trace` records every change of the file system, a *new* one. `states` works out of that record every
folder that a crash may leave behind, `corruptions` damages the finished folder, and `trial` has each of them loaded in
a process of its own and compares what comes out with the two known states, bit by bit. `run` does all of it,
`scorecard` counts, `page` and `table` show the counts.
"""
