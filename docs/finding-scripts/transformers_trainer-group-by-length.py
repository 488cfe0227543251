"""Transformers 5.24.0: with group_by_length, a run that is resumed in a later epoch sees other data than without a break.

    pip install torch "transformers==5.24.0" "accelerate==1.15.0"
    python transformers_trainer-group-by-length.py

One process trains two epochs of four batches, and saves after the sixth batch. A second Trainer resumes from there. It
should see the seventh and the eighth batch, and sees others: `LengthGroupedSampler` permutes with the global random
state of torch, and a resumed run asks for its first permutation where the other one asked for its second. With
`train_sampling_strategy="random"` the same is right, since there the epoch is part of the seed. Ends with status 1
where it shows.
"""

import os
import sys

# Whatever else goes wrong ends with 125, which `git bisect run` skips.
sys.excepthook = lambda *error: (sys.__excepthook__(*error), print(end="", flush=True), os._exit(125))

import tempfile

import torch
from transformers import Trainer, TrainingArguments

ROWS = [{"input_ids": torch.tensor([float(number)]), "labels": torch.tensor([0.0])} for number in range(8)]


class Model(torch.nn.Module):
    """Remembers the rows that it is trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.seen = torch.nn.Linear(1, 1), []

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        self.seen.append(sorted(int(value) for value in input_ids.flatten()))
        return {"loss": (self.linear(input_ids) - labels).square().mean()}


def seen(strategy: str, folder: str, resume: str | None = None) -> list[list[int]]:
    arguments = TrainingArguments(
        output_dir=folder, num_train_epochs=2, per_device_train_batch_size=2, train_sampling_strategy=strategy,
        save_strategy="steps", save_steps=6, use_cpu=True, report_to=[], disable_tqdm=True,
    )
    model = Model()
    Trainer(model=model, args=arguments, train_dataset=ROWS).train(resume_from_checkpoint=resume)
    return model.seen


if __name__ == "__main__":
    wrong = {}
    for strategy in ("random", "group_by_length"):
        with tempfile.TemporaryDirectory() as folder:
            whole = seen(strategy, folder)
            resumed = seen(strategy, folder, f"{folder}/checkpoint-6")
        print(f"{strategy}: without a break {whole[6:]}, resumed {resumed}; the epoch is {whole[4:]}")
        wrong[strategy] = resumed != whole[6:]
    sys.exit(any(wrong.values()))
