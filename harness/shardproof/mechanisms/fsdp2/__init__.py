"""FSDP2 and distributed checkpoints (DCP), for every system whose parameters they shard and store.

`limits` (what FSDP2 refuses) and `formats` (which checkpoint formats there are) are for the parent; `rank.shard` and
`rank.checkpoint` run on ranks and import torch.
"""
