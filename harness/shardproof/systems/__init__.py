"""The systems under test, each a package of its own, behind one protocol.

`protocol` is all that the core may ask of a system, `accepts` the language of what one runs, `registry` how they are
found, `conformance` what every one must pass, and `torch_loop` the training loop that several of them share.
"""
