"""`shardproof diff A B`: compares two checkpoints on disk bit for bit, also when different libraries wrote them.

The judge of a scenario knows which model was saved and reads a few megabytes at once. Here nobody knows the model, the
two may be in different formats and differently sharded, and each may be larger than the memory. So the steps are:

1. `formats` looks at the files and makes an index of each checkpoint (`contents`): the name, dtype and shape of every
   tensor, and where its pieces lie. What one library alone writes, its system says in a `Layout`. Nothing in a file is
   executed (`pickles`).
2. `structure` compares the two indices: what is missing, too many, of another dtype or shape, with gaps or overlaps.
3. `bits` reads what is in both, a few megabytes of each tensor at a time (`views`, `files`), puts shards where they
   belong, and counts what differs. The checksums that a format has are verified on the way.
4. `patterns` and `misplaced` look for a mechanism that makes exactly these bits: rounded, scaled, shifted, swapped.
5. `text`, `document` and `page` say what was found.

`run` is these steps as code.
"""
