"""A training script that knows nothing of shardproof: DistributedDataParallel and torch.save, with one mistake at a
time by its option --what."""

import argparse
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

asked = argparse.ArgumentParser()
asked.add_argument("--out", type=Path, required=True)
asked.add_argument("--max-steps", type=int, required=True)
asked.add_argument("--save-steps", type=int, default=2)
asked.add_argument("--resume-from", type=Path)
asked.add_argument("--what", default="sound")
asked = asked.parse_args()

if asked.what == "fails":
    sys.exit("this script ends with an error")
if asked.what == "writes-nothing":
    sys.exit()
for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}.items():
    os.environ.setdefault(name, value)  # without torchrun it is one rank
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
if asked.what != "unseeded":
    torch.manual_seed(0)
model = DistributedDataParallel(
    torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.1), torch.nn.Linear(16, 4))
)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
total = asked.max_steps if asked.what == "schedules-until" else 100
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / total)

step = 0
kept = sorted(asked.out.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
found = asked.resume_from or (kept[-1] if kept else None)
if found and asked.what != "begins-anew":
    if asked.what == "hangs" and rank == 1:
        time.sleep(1000)
    saved = torch.load(found / "last.pt")
    model.load_state_dict(saved["model"])
    if asked.what != "forgets":
        optimizer.load_state_dict(saved["optimizer"])
    schedule.load_state_dict(saved["schedule"])
    step = saved["step"]

while step < asked.max_steps:
    batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * step + rank))
    torch.manual_seed(1000 + 10 * step + rank if asked.what != "unseeded" else time.time_ns())
    optimizer.zero_grad()
    model(batch).square().mean().backward()
    optimizer.step()
    schedule.step()
    step += 1
    if step % asked.save_steps == 0 and rank == 0:
        folder = asked.out / f"checkpoint-{step}"
        folder.mkdir(exist_ok=True)
        saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}
        torch.save({**saved, "step": step, "arguments": {"max_steps": asked.max_steps}}, folder / "last.pt")
        (folder / "log.json").write_text(f'{{"time": {time.time()}}}')
dist.barrier()
dist.destroy_process_group()
