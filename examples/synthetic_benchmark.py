"""Training speed of a torchvision model on made-up images, on one process or many.

    hvdrun -np 2 python examples/synthetic_benchmark.py --model resnet18 --batch-size 8

An iteration is --num-batches-per-iter training steps (forward, backward, optimizer). Each process
times its own; the printed spread is 1.96 standard deviations over the iterations, the total is the
sum over the processes. The images are random and stay in memory: reading data is not measured.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
import torch.nn.functional as F

import hvdtorch as hvd

try:
    from torchvision import models
except ImportError as failure:
    raise SystemExit(
        f"this benchmark needs torchvision's models ({failure}); "
        "install the release that belongs to your torch: pip install torchvision"
    ) from None


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="resnet18", help="a name in torchvision.models")
    parser.add_argument("--batch-size", type=int, default=32, help="images per step and process")
    parser.add_argument("--image-size", type=int, default=224, help="pixels on each side")
    parser.add_argument("--num-warmup-batches", type=int, default=3, help="steps not timed")
    parser.add_argument("--num-batches-per-iter", type=int, default=5, help="steps per iteration")
    parser.add_argument("--num-iters", type=int, default=5, help="timed iterations")
    parser.add_argument("--fp16-allreduce", action="store_true", help="send gradients as float16")
    args = parser.parse_args()
    if args.model not in models.list_models(module=models):
        parser.error(f"torchvision.models has no {args.model!r}")
    return args


def spread(values: list[float]) -> float:
    """1.96 standard deviations, half the width of a 95% interval; 0 for one value."""
    return 1.96 * statistics.stdev(values) if len(values) > 1 else 0.0


def main() -> None:
    args = parse_arguments()
    hvd.init()

    def say(text: str) -> None:
        if hvd.rank() == 0:
            print(text, flush=True)

    torch.manual_seed(hvd.rank())
    model = models.get_model(args.model, weights=None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * hvd.size())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
    )

    images = torch.randn(args.batch_size, 3, args.image_size, args.image_size)
    labels = torch.randint(0, 1000, (args.batch_size,))

    def step() -> None:
        optimizer.zero_grad()
        output = model(images)
        logits = getattr(output, "logits", output)  # some models return more while training
        F.cross_entropy(logits, labels).backward()
        optimizer.step()

    parameters = sum(p.numel() for p in model.parameters())
    say(f"model {args.model}, {parameters / 1e6:.1f} million parameters")
    say(f"{hvd.size()} process(es), {args.batch_size} images of {args.image_size}^2 per step each")

    for _ in range(args.num_warmup_batches):
        step()

    mine = []  # images per second of this process, per iteration
    total = []  # of all processes together
    for iteration in range(args.num_iters):
        start = time.perf_counter()
        for _ in range(args.num_batches_per_iter):
            step()
        rate = args.batch_size * args.num_batches_per_iter / (time.perf_counter() - start)
        mine.append(rate)
        rates = torch.tensor(rate, dtype=torch.float64)
        total.append(hvd.allreduce(rates, name="rate", op=hvd.Sum).item())
        say(f"iteration {iteration + 1}: {rate:.1f} images/s on rank 0, {total[-1]:.1f} in all")

    say(f"images/s on rank 0:  {statistics.mean(mine):.1f} +- {spread(mine):.1f}")
    say(
        f"images/s in all:     {statistics.mean(total):.1f} +- {spread(total):.1f} "
        f"({hvd.size()} process(es))"
    )
    hvd.shutdown()


if __name__ == "__main__":
    main()
