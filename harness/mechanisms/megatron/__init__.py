"""Megatron's training loop, optimizers and distributed checkpoints, for every system that drives them.

`contract`, `partition`, `host_elements`, `domains`, `limits`, `reader` and what `reader` needs are for the parent and
the judge; `loop`, `model`, `state` and `observe` run on ranks and import the library.
"""
