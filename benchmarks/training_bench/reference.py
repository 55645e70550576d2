"""The training of all ranks in one process: what their losses have to be."""

from __future__ import annotations

import torch
from torch.nn.functional import cross_entropy

from training_bench import models


def losses(model_name: str, rank: int, size: int, steps: int) -> list[float]:
    """Losses of `rank` when each step averages the gradients of `size` ranks."""
    model = models.make(model_name)
    optimizer = models.optimizer(model)
    data = [models.batches(model_name, other) for other in range(size)]
    found = []
    for step in range(steps):
        sums = [torch.zeros_like(p) for p in model.parameters()]
        for other in range(size):
            model.zero_grad()
            inputs, labels = data[other][step % models.BATCHES]
            loss = cross_entropy(model(inputs), labels)
            loss.backward()
            for total, parameter in zip(sums, model.parameters(), strict=True):
                total += parameter.grad
            if other == rank:
                found.append(loss.item())
        for total, parameter in zip(sums, model.parameters(), strict=True):
            parameter.grad = total / size
        optimizer.step()
    return found
