"""The reference: a full sharded optimizer, in lockstep over simulated ranks, that shares no code with the twin.

Its ranks are rows of numpy arrays, and its collectives are sums over rows, so that thousands of scenarios take a
minute. It is two things: the second oracle, which must agree with the twin before either is believed, and a system
under test itself, in which faults can be planted (`shardproof.faults.logical`). `placement` says where each element
lies, `trainer` steps, `checkpoint`, `restore` and `readback` save and load, `kernels` and `fused_adam` have the
arithmetic.
"""
