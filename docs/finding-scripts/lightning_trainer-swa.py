"""Lightning 2.6.6: after a resume inside an epoch, the schedule of StochasticWeightAveraging misses a step.

    pip install "lightning==2.6.6"
    python lightning_trainer-swa.py

One process trains five epochs of two batches. SWA begins at the second epoch and lowers the learning rate at the end of
each epoch. A checkpoint is saved after the third batch and after the fourth, both in the second epoch. A run that is
resumed from either should go on with the same learning rates, and falls one epoch behind: `on_fit_start` of
the callback takes the scheduler of the module away, and `on_train_epoch_start`, which puts that of SWA in its place, is
not called in an epoch that is resumed. So at the end of that epoch there is no scheduler to step. The rows do not
matter, all are equal. Ends with status 1 where it shows.
"""

import os
import sys

# Whatever else goes wrong ends with 125, which `git bisect run` skips.
sys.excepthook = lambda *error: (sys.__excepthook__(*error), print(end="", flush=True), os._exit(125))

import logging
import tempfile
import warnings
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging
from torch.utils.data import DataLoader

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.simplefilter("ignore")


class Model(lightning.LightningModule):
    """Remembers the learning rate of each update."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.rates = torch.nn.Linear(1, 1), {}

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        self.rates[self.trainer.global_step + 1] = round(self.optimizers().param_groups[0]["lr"], 6)
        return self.linear(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def rates(folder: str, resume: Path | None = None) -> dict[int, float]:
    model = Model()
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, max_epochs=5, logger=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[
            StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1),
            ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1),
        ],
    )  # fmt: skip
    trainer.fit(model, DataLoader(torch.ones(4, 1), batch_size=2), ckpt_path=resume, weights_only=False)
    return model.rates


if __name__ == "__main__":
    wrong = False
    with tempfile.TemporaryDirectory() as folder:
        whole = rates(folder)
        for name, where in (("step=3", "inside the epoch"), ("step=4", "after its last batch")):
            with tempfile.TemporaryDirectory() as other:
                resumed = rates(other, Path(folder) / f"epoch=1-{name}.ckpt")
            expected = {step: whole[step] for step in resumed}
            print(f"resumed {where}: {resumed}\n  without a break: {expected}")
            wrong |= resumed != expected
    sys.exit(wrong)
