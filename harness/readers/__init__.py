"""Independent readers of checkpoint files, which use neither torch nor any library under test.

`symbolic` reads a pickle without executing it, `archive` a torch.save file, `dcp` a distributed checkpoint
directory, `pieces` any of them as one flat stream, and `roles` says what each piece is. They run in the parent.
"""
