"""Mechanisms shared by several systems, such as FSDP2 or Megatron's optimizers, one file or folder for each.

No system imports another one. So what two of them have in common lies here: what a shared part of a library promises
(`fused_adam`), where it lays things (`row_buffers`, `megatron.flat_buffers`), how its files are read
(`megatron.reader`), and how a rank drives it (`megatron.rank`, `fsdp2.rank`). For example, Megatron-Core and
Megatron-Bridge both derive their contract from `megatron.contract`, and their ranks from `megatron.rank.loop`.

A mechanism may use the core; the core knows none of them. It names no system.
"""
