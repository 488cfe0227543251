"""A save that is killed half way over an earlier checkpoint leaves one that loads: some tensors new, the others old.

torch.distributed.checkpoint with a file for each tensor, saved twice into one folder, as a run does that always writes
to `latest/`. The second save is killed (SIGKILL) when it opens its fourth file. The load after it raises nothing.
"""

import os
import signal
import sys
import tempfile

import torch
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, load, save

NAMES = [f"layer{i}.weight" for i in range(6)]
folder = tempfile.mkdtemp()


def saved(step: int) -> None:
    writer = FileSystemWriter(folder, single_file_per_rank=False)
    save({name: torch.full((4, 4), float(step)) for name in NAMES}, storage_writer=writer, no_dist=True)


saved(100)
child = os.fork()
if child == 0:
    opened = []

    def die_at_the_fourth_file(event: str, arguments: tuple) -> None:
        if event == "open" and str(arguments[0]).endswith(".distcp"):
            opened.append(arguments[0])
            if len(opened) == 4:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(die_at_the_fourth_file)
    saved(200)
    os._exit(0)
assert os.WIFSIGNALED(os.waitpid(child, 0)[1])

state = {name: torch.zeros(4, 4) for name in NAMES}
load(state, storage_reader=FileSystemReader(folder), no_dist=True)
for name in NAMES:
    print(name, "is of step", int(state[name][0, 0]))
if len({int(value[0, 0]) for value in state.values()}) > 1:
    sys.exit("the load raised nothing, and what it gave is of two steps")
