"""Independent readers of checkpoint files, which use neither torch nor any library under test.

`read_checkpoint` gives records to assemble and compare with `expected_written`: a symmetric mistake hides in a
self-round-trip. `describe` and `render_description` serve `shardproof inspect`; `accept` is the check before a library
may load a checkpoint that is not ours. Nothing out of a file is executed, and all of it runs in the parent.

`symbolic` reads a pickle as data, `archive` a torch.save file, `metadata` that of a distributed checkpoint, `pieces`
either as one flat stream; `roles` says what each piece is.
"""
