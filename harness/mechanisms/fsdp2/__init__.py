"""FSDP2 and distributed checkpoints (DCP), for every system whose parameters they shard and store.

`limits` and `formats` are for the parent; `shard` and `checkpoint` run on ranks and import torch.
"""
