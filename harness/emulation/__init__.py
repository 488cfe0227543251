"""Stand-ins for what a laptop lacks: a CUDA device (`cuda`) and the compiled optimizer kernels of apex and TE (`apex`).

Every result that used one of them says so, with the list of symbols that were touched. docs/emulation.md has the
semantics, what differs from a GPU, and why.
"""
