"""Deliberate defects: `logical` ones mutate the reference, `boundary` ones strike what surrounds any system.

A harness that finds nothing may be blind. So every CI run plants defects that it must find: mistakes that real
libraries made, in the reference (`catalogue`); lost operations, flipped bits and dead ranks, in every system
(`boundary`, `strikes`); and pairs of values that a tolerant comparison would call equal (`comparisons`).
"""
