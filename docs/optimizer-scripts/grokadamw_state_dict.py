"""GrokAdamW starts anew after load_state_dict: its state is kept by parameter objects. One process."""

import io

import torch
from grokadamw import GrokAdamW
from torch import nn


def made() -> tuple[nn.Module, GrokAdamW]:
    torch.manual_seed(0)
    model = nn.Linear(4, 4, bias=False)
    return model, GrokAdamW(model.parameters(), lr=0.01)


def step(model: nn.Module, optimizer: GrokAdamW) -> None:
    model(torch.ones(1, 4)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


if __name__ == "__main__":
    print("torch", torch.__version__)
    model, optimizer = made()
    for _ in range(5):
        step(model, optimizer)
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict()], file)
    file.seek(0)
    weights, state = torch.load(file)
    resumed, other = made()
    resumed.load_state_dict(weights)
    other.load_state_dict(state)
    step(model, optimizer)
    step(resumed, other)
    print("largest difference of the weights after one more step:", (model.weight - resumed.weight).abs().max().item())
    print("steps counted for the weight:", other.param_groups[0]["state"][resumed.weight]["step"], "instead of 6")
