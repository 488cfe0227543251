"""Independent readers of checkpoint files, which use neither torch nor any library under test.

Why: a mistake that a save and a load share hides in a round trip. If both use the same wrong index map, two moments are
swapped on the way out and swapped back on the way in. So the judge reads the file itself, with code that knows the
format and nothing of the library.

Nothing out of a file is executed. `symbolic` reads a pickle as data; `archive` and `values` read a file of torch.save,
`metadata` that of a distributed checkpoint, `safetensors` Hugging Face's shards; `pieces` gives each of them as one
flat stream of boxes and plain objects; `roles` says what each piece is, and `checkpoint` joins all that into records.
What only one system writes, its own `stored.py` adds. `description` serves `shardproof inspect`.
"""
