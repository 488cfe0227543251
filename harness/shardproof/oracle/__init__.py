"""The oracle of expected values: the contracts that systems promise, and the twin that computes what follows from
them.

`contract` turns a scenario into `inputs`, a frozen value; `twin` executes it on whole tensors, with the optimizers in
`steppers` and `scaled_adam` and the rules in `clipping` and `scaler`; `carried` says what a round trip must do with
bytes that nobody can predict; `kernels_table` lists the kernels of torch that have no single right answer. The second
oracle is `shardproof.reference`.
"""
