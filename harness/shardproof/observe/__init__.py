"""Observations: the state of every rank as raw bytes, and their assembly into logical tensors.

`record` says what a record is and what each role means; `assemble` joins the pieces of all ranks; `logical` has the
joined values, in which oracles speak too; `ambient` records what a process has around the library.
"""
