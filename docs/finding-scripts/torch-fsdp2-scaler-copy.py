"""torch alone, on a GPU: GradScaler with parameters on the CPU, as FSDP2's CPUOffloadPolicy keeps them.

`unscale_` copies 1/scale to the CPU with non_blocking=True and reads the copy without waiting for it. Where the GPU
still has work to do, it reads what was in that memory before. Here the gradient is 1024, the scale 1024 and the
learning rate 1, so that one step leads from 0 to -1; and after an inf the scale must fall to 512.

python torch-fsdp2-scaler-copy.py    # one GPU, ten seconds; status 1 where the step is wrong, 125 without a GPU
"""

import os
import sys

# Whatever else goes wrong ends with 125, which `git bisect run` skips.
sys.excepthook = lambda *error: (sys.__excepthook__(*error), print(end="", flush=True), os._exit(125))

import math

import torch


def step(gradient: float, *, busy: bool) -> tuple[float, float]:
    """The parameter and the scale after one step of a fresh GradScaler, while the GPU is idle or has other work."""
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
    parameter = torch.nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler.scale(torch.ones((), device="cuda"))
    parameter.grad = torch.full((4,), gradient)
    torch.cuda.synchronize()
    if busy:
        torch.cuda._sleep(100_000_000)
    scaler.step(optimizer)
    scaler.update()
    torch.cuda.synchronize()
    return parameter[0].item(), scaler.get_scale()


def main() -> None:
    if not torch.cuda.is_available():
        print("this needs a GPU")
        sys.exit(125)
    wrong = False
    for gradient, expected in ((1024.0, (-1.0, 1024.0)), (math.inf, (0.0, 512.0))):
        for busy in (False, True):
            observed = step(gradient, busy=busy)
            wrong |= observed != expected
            print(f"gradient {gradient}, GPU {'busy' if busy else 'idle'}: expected {expected}; observed {observed}")
    sys.exit(wrong)


if __name__ == "__main__":
    main()
