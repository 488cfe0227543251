"""Lightning 2.6.6: the first epoch after a resume has its data in the order of the run's first epoch.

    pip install "lightning==2.6.6" "torchdata==0.11.0"
    python lightning_trainer-21938.py

One process trains three epochs with a DistributedSampler, which permutes by the number of the epoch, and saves at the
end of each. A second Trainer resumes after the first epoch, and should see the second epoch as the first Trainer did.
It does with a DataLoader, and with a StatefulDataLoader it sees the order of the first epoch: the iterator is made
before the sampler is told its epoch, and this one draws its indices at once, as one with workers does. Public as
Lightning-AI/pytorch-lightning#21938, which tells it of workers. Ends with status 1 where it shows.
"""

import os
import sys

# Whatever else goes wrong ends with 125, which `git bisect run` skips.
sys.excepthook = lambda *error: (sys.__excepthook__(*error), print(end="", flush=True), os._exit(125))

import logging
import tempfile
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Model(lightning.LightningModule):
    """Remembers the rows of each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.seen = torch.nn.Linear(1, 1), {}

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        self.seen.setdefault(self.trainer.current_epoch, []).extend(int(value) for value in batch.flatten())
        return self.linear(batch).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def seen(kind: type[DataLoader], folder: str, resume: Path | None = None) -> dict[int, list[int]]:
    data, model = torch.arange(8.0).reshape(8, 1), Model()
    loader = kind(data, batch_size=4, sampler=DistributedSampler(data, num_replicas=1, rank=0))
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, max_epochs=3, logger=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[ModelCheckpoint(folder, save_top_k=-1)],
    )  # fmt: skip
    trainer.fit(model, loader, ckpt_path=resume, weights_only=False)
    return model.seen


if __name__ == "__main__":
    wrong = False
    for kind in (DataLoader, StatefulDataLoader):
        with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
            whole = seen(kind, first)
            resumed = seen(kind, second, Path(first) / "epoch=0-step=2.ckpt")
        print(f"{kind.__name__}, second epoch: {whole[1]}, resumed {resumed[1]}; the first epoch: {whole[0]}")
        wrong |= resumed[1] != whole[1]
    sys.exit(wrong)
