"""`shardproof trainer --command '…'`: a training script under test without a line of Python.

The script is a command line with places in it: `{folder}` for where it writes checkpoints, `{until}` for how many steps
it trains, and `{world}` for how many ranks there are. So nothing can be looked at but the checkpoints that it leaves:

    whole          the command with the larger {until}, into an empty folder
    twice          the same once more
    cut            the command with the smaller {until}
    resumed        in a copy of that folder, the command with the larger {until}
    other world W  the same, on W ranks

The newest checkpoint of each is found (`checkpoints`) and compared with that of `whole` by the code of `shardproof
diff`. `asked` is the command and its places, `process` runs it, `runs` keeps what was run, `arms` is the arms, `text`
what is said of them.
"""
