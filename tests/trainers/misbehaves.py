"""A trainer that misbehaves in the way that its axis says, where a file of a user's may."""

import os
import signal
import subprocess
import sys

import torch
from shardproof.trainer import Trainer, Unsupported


class Misbehaves(Trainer):
    """One rank, one parameter, torch.save."""

    axes = {
        "mesh": ["1"],
        "what": ["prints", "forks", "sets_signals", "exits", "no_state", "writes_outside", "raises", "raises_in_state",
                 "refuses_late"],
    }  # fmt: skip
    steps = (1, 1)

    def build(self, cell):
        self.what, self.outside = cell.what, str(cell.folder.parent / "last.pt")
        torch.manual_seed(cell.seed)
        if cell.what == "no_state":
            return
        if cell.what == "sets_signals":
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
                signal.signal(number, signal.SIG_IGN)
        self.model = torch.nn.Linear(4, 4)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)

    def step(self, index):
        match self.what:
            case "prints":
                print("loss" * 1000)
                print("to stderr", file=sys.stderr)
            case "forks":
                child = os.fork()
                if not child:
                    os._exit(0)
                os.waitpid(child, 0)
                subprocess.run(["true"], check=True)
            case "exits":
                sys.exit(0)
            case "raises":
                raise ZeroDivisionError("as a step may")
            case "refuses_late":
                raise Unsupported("no such step")
            case "no_state":
                return
        self.optimizer.zero_grad()
        self.model(torch.full((2, 4), 1.0 + index)).square().mean().backward()
        self.optimizer.step()

    def save(self, folder):
        if self.what == "no_state":
            return
        where = self.outside if self.what == "writes_outside" else folder / "last.pt"
        torch.save([self.model.state_dict(), self.optimizer.state_dict()], where)

    def load(self, folder):
        if self.what == "no_state":
            return
        model, optimizer = torch.load(self.outside if self.what == "writes_outside" else folder / "last.pt")
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)

    def state(self):
        if self.what == "raises_in_state":
            raise KeyError("no such attribute")
        return super().state()
