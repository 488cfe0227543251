"""Any training script under test: a `Trainer` of twenty lines, judged by itself along other arms.

A *system* of shardproof has a contract, which says what every bit of its state must be. Most people have a trainer and
no contract. So a trainer is its own oracle: it is driven along several *arms*, such as "trained on without a break" and
"saved, loaded into fresh ranks, trained on", and what must be equal between two arms is compared bit for bit.

    from shardproof.trainer import Trainer

    class Mine(Trainer):
        axes = {"mesh": ["2", "4"], "optimizer": ["adamw", "sgd"]}

        def build(self, cell): ...
        def step(self, index): ...
        def save(self, folder): ...
        def load(self, folder): ...

`shardproof trainer my_trainer.py` runs it. docs/trainer.md begins with a whole one.
"""

from shardproof.trainer.base import Cell, Trainer, Unsupported

__all__ = ["Cell", "Trainer", "Unsupported"]
