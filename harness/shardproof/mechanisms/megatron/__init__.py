"""Megatron's training loop, optimizers and distributed checkpoints, for every system that drives them.

For the parent and the judge: `contract` (what is promised), `limits` (what is refused), `partition`, `flat_buffers`,
`host_elements` and `domains` (which elements lie where, by our own arithmetic), `reader` and `stored` (its
checkpoints). On ranks, with the library imported: `rank.loop`, `rank.model`, `rank.state` and `rank.observe`.
"""
