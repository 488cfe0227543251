"""What of a trainer runs on the ranks, and may load torch: finding its state.

`found` walks from the trainer's attributes to everything that holds state; `modules`, `optimizers` and `leaves` read
what it meets; `pieces` and `boxes` say which part of a logical tensor a local one is. Nothing here knows a stack by its
name, and nothing here changes what it looks at.
"""
