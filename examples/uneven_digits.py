"""Train where every process has a different amount of data, and only some processes evaluate.

    hvdrun -np 3 python examples/uneven_digits.py
    torchrun --nproc-per-node 3 examples/uneven_digits.py

Process r has r + 1 parts of the training images. A process that has used up its own calls
`hvd.join()`: the others go on without it, and no image is dropped or seen twice. Batch
normalization uses the batches of all processes that still have one. After each epoch a process set,
every other process, evaluates; the rest wait for it, which `hvd.expected_stall` says is meant.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from digits_model import DigitsNet, load, shifted
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset

import hvdtorch as hvd


def own_share(dataset: Dataset) -> Subset:
    """Rank r's images: r + 1 parts of 1 + 2 + ... + size."""
    parts = hvd.size() * (hvd.size() + 1) // 2
    first = hvd.rank() * (hvd.rank() + 1) // 2
    cuts = [len(dataset) * part // parts for part in (first, first + hvd.rank() + 1)]
    return Subset(dataset, range(*cuts))


def make_model() -> nn.Module:
    model = DigitsNet()
    model.features.insert(1, nn.BatchNorm2d(32))
    return hvd.SyncBatchNorm.convert_sync_batchnorm(model)


@torch.no_grad()
def accuracy(model: nn.Module, dataset: Dataset, evaluators: hvd.ProcessSet) -> float:
    """On the whole of `dataset`, of which each process of the set computes a part."""
    model.eval()
    part = Subset(dataset, range(evaluators.rank(), len(dataset), evaluators.size()))
    images, labels = next(iter(DataLoader(part, batch_size=len(part))))
    correct = (model(images).argmax(1) == labels).sum()
    total = hvd.allreduce(correct, name="correct", op=hvd.Sum, process_set=evaluators)
    return total.item() / len(dataset)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=8, help="passes over the training images")
    parser.add_argument("--min-accuracy", type=float, help="exit with status 1 below this (0..1)")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    hvd.init()
    every_other = list(range(0, hvd.size(), 2))
    if hvd.size() > 1:
        evaluators = hvd.add_process_set(every_other)
    else:
        evaluators = hvd.global_process_set
    training, held_out = load(0)
    loader = DataLoader(own_share(training), batch_size=32, shuffle=True)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    reached = 0.0
    for epoch in range(arguments.epochs):
        model.train()
        for images, labels in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(shifted(images)), labels).backward()
            optimizer.step()
        # The others have more: their steps no longer wait for this process.
        last = hvd.join()
        # They went on with the weights, so all take those of the last one.
        hvd.broadcast_parameters(model.state_dict(), root_rank=last)
        hvd.broadcast_optimizer_state(optimizer, root_rank=last)
        if evaluators.included():
            with hvd.expected_stall(60):
                reached = accuracy(model, held_out, evaluators)
            if hvd.rank() == 0:
                print(f"epoch {epoch + 1}: {100 * reached:.2f}% of {len(held_out)} images right")
    reached = hvd.broadcast_object(reached, root_rank=0)
    if arguments.min_accuracy is not None and reached < arguments.min_accuracy:
        raise SystemExit(f"accuracy {reached:.4f} is below {arguments.min_accuracy}")


if __name__ == "__main__":
    main()
