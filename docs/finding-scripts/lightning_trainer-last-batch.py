"""Lightning 2.6.6: a run that is resumed from a checkpoint of the last batch of an epoch leaves out the next epoch.

    pip install "lightning==2.6.6" "torchdata==0.11.0"
    python lightning_trainer-last-batch.py

One process trains three epochs of two batches with a StatefulDataLoader, and `ModelCheckpoint(every_n_train_steps=2)`
saves after the second batch, before the epoch ends. A second Trainer resumes from there. It should train the second
epoch and the third one. The loader comes back at its end, and no new iterator is made: `TrainingEpochLoop.on_run_start`
makes one in epochs after the first only where nothing is resumed. So the second epoch has no batch, and counts as done.
Ends with status 1 where it shows.
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
from torchdata.stateful_dataloader import StatefulDataLoader

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Model(lightning.LightningModule):
    """Remembers in which epoch it was trained on which batch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.seen = torch.nn.Linear(1, 1), []

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        self.seen.append((self.trainer.current_epoch, [int(value) for value in batch.flatten()]))
        return self.linear(batch).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def seen(folder: str, resume: Path | None = None) -> list[tuple[int, list[int]]]:
    loader = StatefulDataLoader(torch.arange(4.0).reshape(4, 1), batch_size=2)
    model = Model()
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, max_epochs=3, logger=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[ModelCheckpoint(folder, every_n_train_steps=2, save_top_k=-1)],
    )  # fmt: skip
    trainer.fit(model, loader, ckpt_path=resume, weights_only=False)
    return model.seen


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        whole = seen(first)
        resumed = seen(second, Path(first) / "epoch=0-step=2.ckpt")
    print(f"after the checkpoint, without a break: {whole[2:]}")
    print(f"after the checkpoint, resumed:         {resumed}")
    sys.exit(resumed != whole[2:])
