"""Emulates a CUDA device, NCCL and compiled extensions on a CPU, so that GPU libraries run unmodified on a machine
without a GPU.

`cuda` is a device with a memory of its own; `apex` and `fused` are the optimizers of apex and TransformerEngine, over
the arithmetic in `kernels`; `te_extension` is TransformerEngine's compiled extension; `collectives` are NCCL's
reductions that gloo lacks, and `backend` gives its name to gloo; `names` are packages without content; `spawn` makes
checkpoint managers start in milliseconds; `device` chooses between all that and the real thing; `pytest_plugin` runs a
suite for GPUs over it, with process groups that go (`groups`) and ranks that stay together (`rank_barrier`).

Every result that used one of them says so, with the list of symbols that were touched. docs/emulation.md has the
semantics, what differs from a GPU, and why.
"""
