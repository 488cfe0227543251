"""DeepSpeed takes optimizer state for other parameters' where round_robin_gradients differs from the checkpoint's run.

    pip install torch deepspeed==0.19.8
    python deepspeed-round-robin-switched.py

Two processes on a CPU, stage 2 in bf16. A run is saved, and resumed once with the setting that it had and once with
`round_robin_gradients` switched on. Then comes one step with a learning rate of 0, which must not change a weight.
Ends with status 1 where it does after the switch alone, with 0 where it never does, with 125 for anything else.
"""

import os
import sys
import tempfile

try:
    import deepspeed
    import torch
    import torch.multiprocessing as mp
except ImportError as missing:
    print(missing)
    sys.exit(125)


def engine_of(round_robin: bool, lr: float):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 5))
    config = {
        "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 2, "round_robin_gradients": round_robin},
    }  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return engine


def step(engine) -> None:
    engine.backward(engine(torch.ones(1, 4, dtype=torch.bfloat16)).sum())
    engine.step()


def resumed(folder: str, round_robin: bool) -> list[str]:
    """The names of the weights that a step without a learning rate changes."""
    engine = engine_of(round_robin, lr=0.0)
    engine.load_checkpoint(folder)
    for group in engine.optimizer.param_groups:
        group["lr"] = 0.0
    before = {name: weight.detach().clone() for name, weight in engine.module.named_parameters()}
    step(engine)
    return [name for name, weight in engine.module.named_parameters() if not torch.equal(weight, before[name])]


def rank(index: int, folder: str) -> None:
    os.environ |= {
        "RANK": str(index), "LOCAL_RANK": str(index), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29561", "DS_ACCELERATOR": "cpu",
    }  # fmt: skip
    deepspeed.init_distributed("gloo")
    engine = engine_of(round_robin=False, lr=0.01)
    step(engine)
    engine.save_checkpoint(folder)
    same, switched = resumed(folder, round_robin=False), resumed(folder, round_robin=True)
    torch.distributed.destroy_process_group()
    if index == 0:
        print(f"deepspeed {deepspeed.__version__}: a step with a learning rate of 0 changes")
        print(f"  {same or 'nothing'} after a resume with the same setting")
        print(f"  {switched or 'nothing'} after a resume with round_robin_gradients switched on")
    if same:
        os._exit(125)
    if switched:
        os._exit(1)


if __name__ == "__main__":
    try:
        mp.spawn(rank, (tempfile.mkdtemp(),), nprocs=2)
    except mp.ProcessExitedException as ended:
        sys.exit(1 if ended.exit_code == 1 else 125)
    except mp.ProcessRaisedException as raised:
        print(raised)
        sys.exit(125)
