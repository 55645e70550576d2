"""What DistributedOptimizer costs per parameter and step, apart from the communication itself.

    hvdrun -np 2 python benchmarks/hooks.py [--tensors 244] [--numel 32] [--steps 300]

Two equal models with many small parameters take turns in one process: one with a plain optimizer,
one with a wrapped one. Of each step (zero_grad, backward, step) the wall time and the CPU time of
the calling thread are taken; the thread sleeps while it waits for the other ranks, so the
difference in CPU time is what the hooks, the round and their wrapping cost here. Printed are
microseconds per parameter (median and 99th percentile of the steps) on rank 0, as a table or, with
--json, as one object. Both models end with equal parameters, or the result is an error.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

import hvdtorch as hvd


class ManyScales(nn.Module):
    """As many parameters as asked for, each in one cheap operation."""

    def __init__(self, tensors: int, numel: int) -> None:
        super().__init__()
        self.scales = nn.ParameterList(torch.full((numel,), 1.0) for _ in range(tensors))

    def forward(self, x: Tensor) -> Tensor:
        for scale in self.scales:
            x = x * scale
        return x.sum()


def timed(step: Callable[[], None]) -> tuple[float, float]:
    """Seconds of wall time, and of CPU time of this thread."""
    wall, cpu = time.perf_counter(), time.thread_time()
    step()
    return time.perf_counter() - wall, time.thread_time() - cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--tensors", type=int, default=244)
    parser.add_argument("--numel", type=int, default=32)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    hvd.init()
    torch.set_num_threads(1)
    x = torch.full((options.numel,), 1.0)
    models = [ManyScales(options.tensors, options.numel) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=1e-6) for model in models]
    hvd.DistributedOptimizer(optimizers[1], models[1].named_parameters())

    def step(which: int) -> None:
        optimizers[which].zero_grad()
        models[which](x).backward()
        optimizers[which].step()

    times: list[tuple[float, ...]] = []
    for number in range(options.steps + 5):
        row = (*timed(lambda: step(0)), *timed(lambda: step(1)))
        if number >= 5:  # in the first ones the ranks agree about the buckets
            times.append(row)
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=0)
    per_parameter = 1e6 / options.tensors
    rows: dict[str, list[float]] = {
        "wall": [(wrapped - plain) * per_parameter for plain, _, wrapped, _ in times],
        "cpu": [(wrapped - plain) * per_parameter for _, plain, _, wrapped in times],
    }
    table = {
        name: {"median": statistics.median(each), "p99": statistics.quantiles(each, n=100)[98]}
        for name, each in rows.items()
    }
    if hvd.rank() == 0:
        if options.json:
            print(json.dumps({"np": hvd.size(), **vars(options), "us_per_parameter": table}))
        else:
            print(f"{options.tensors} parameters of {options.numel}, np={hvd.size()}: us each")
            for name, row in table.items():
                print(f"  {name:>4}  median {row['median']:7.3f}   p99 {row['p99']:7.3f}")
    hvd.shutdown()


if __name__ == "__main__":
    main()
