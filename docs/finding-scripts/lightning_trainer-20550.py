"""Lightning 2.6.6: with `estimated_stepping_batches`, a run that is resumed inside an epoch begins its data again.

    pip install "lightning==2.6.6" "torchdata==0.11.0"
    python lightning_trainer-20550.py

One process trains an epoch of four batches with a StatefulDataLoader, whose state is in the checkpoint, and saves after
the second batch. A second Trainer resumes from there, and should see the third batch and the fourth. It does, unless
`configure_optimizers` asks for `trainer.estimated_stepping_batches`, as for OneCycleLR: then the loaders are made
before the checkpoint is read, and its state of them is dropped. Public as Lightning-AI/pytorch-lightning#20550. Ends
with status 1 where it shows.
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
    """Remembers the batches that it is trained on."""

    def __init__(self, *, asks: bool) -> None:
        super().__init__()
        self.linear, self.seen, self.asks = torch.nn.Linear(1, 1), [], asks

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        self.seen.append([int(value) for value in batch.flatten()])
        return self.linear(batch).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.asks:
            _ = self.trainer.estimated_stepping_batches
        return torch.optim.SGD(self.parameters(), lr=0.1)


def seen(folder: str, resume: Path | None = None, *, asks: bool) -> list[list[int]]:
    loader = StatefulDataLoader(torch.arange(8.0).reshape(8, 1), batch_size=2)
    model = Model(asks=asks)
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, max_epochs=1, logger=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[ModelCheckpoint(folder, every_n_train_steps=2, save_top_k=-1)],
    )  # fmt: skip
    trainer.fit(model, loader, ckpt_path=resume, weights_only=False)
    return model.seen


if __name__ == "__main__":
    wrong = False
    for asks in (False, True):
        with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
            whole = seen(first, asks=asks)
            resumed = seen(second, Path(first) / "epoch=0-step=2.ckpt", asks=asks)
        print(f"estimated_stepping_batches asked for: {asks}; without a break {whole[2:]}, resumed {resumed}")
        wrong |= resumed != whole[2:]
    sys.exit(wrong)
