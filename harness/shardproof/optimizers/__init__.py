"""Any `torch.optim.Optimizer`, named by its import path, tried under FSDP2 and distributed checkpoints.

The problem: `pip install` brings hundreds of optimizers, and few of them say whether they survive `fully_shard`, a
checkpoint, or another number of ranks. The rest of shardproof cannot tell either, since its oracles know the arithmetic
of Adam, AdamW and SGD alone. The idea: every question here compares the optimizer with itself. The same class steps
whole tensors in one process, on the exact gradients that reach the ranks, and whatever differs comes from sharding.

The steps, for `shardproof optimizer torch.optim.AdamW`:

1. `asked` reads the import path and the arguments, and `rank.trial` has a warm worker import the class.
2. `arms` names the runs that the questions need, such as *whole tensors, three steps* and *two ranks, save and load*.
   Each is a scenario of the system `system` with an `Arm` beside it, which says what the axes of a scenario cannot.
3. `rank` is what runs on the ranks: FSDP2 and DCP of `shardproof.mechanisms.fsdp2`, or the whole tensors.
4. `compare` puts two runs side by side, bit for bit, in a warm worker.
5. `examine` goes through the questions and gives an `Answer` to each (`answers`); `text` prints them.

What can go wrong is said by the answer itself: an optimizer that fails on whole tensors already cannot be asked, and
an answer that does not come again in fresh ranks is `unknown`.

`survey` asks a list of optimizers, and `table` makes docs/optimizers.md of what they answered.
"""
