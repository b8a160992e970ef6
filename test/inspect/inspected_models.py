"""The modules that conftest.py exports.

They have a file of their own because torch.cond finds the globals of a branch by the name of its Python module, and
`conftest` is the name of several modules.
"""

import torch


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 4)
        self.register_buffer("steps", torch.zeros(4))

    def forward(self, x):
        y = torch.nn.functional.gelu(self.linear(x))
        self.steps.add_(1)
        return torch.softmax(y, -1) + self.steps


class Branches(torch.nn.Module):
    def forward(self, x):
        return torch.cond(x.sum() > 0, lambda x: torch.exp(x) * 2, lambda x: torch.sin(x), (x,)) + 1
