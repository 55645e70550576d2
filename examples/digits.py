"""Train a small convolutional network on handwritten digits, on one process or many.

    python examples/digits.py                                    one process
    hvdrun -np 2 python examples/digits.py                       two
    torchrun --nproc-per-node 2 examples/digits.py               two, under torch's own launcher

The lines that make it distributed are marked "hvd:". Every process computes gradients on its own
share of the images; the optimizer averages them, so all processes keep the same weights. Rank 0
alone shows progress and writes files: `digits.pt` (the checkpoint) and `curve.png` (loss and
accuracy per epoch) in the folder given by --out.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from digits_model import DigitsNet, load, shifted
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset
from tqdm import tqdm

import hvdtorch as hvd


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=20, help="passes over the training images")
    parser.add_argument("--batch-size", type=int, default=32, help="images per step and process")
    parser.add_argument("--lr", type=float, default=0.02, help="learning rate of one process")
    parser.add_argument("--seed", type=int, default=0, help="of the split, the order, the weights")
    parser.add_argument("--out", type=Path, default=Path("out/digits"), help="folder for results")
    parser.add_argument("--fp16-allreduce", action="store_true", help="send gradients as float16")
    parser.add_argument("--min-accuracy", type=float, help="exit with status 1 below this (0..1)")
    return parser.parse_args()


def train_epoch(model, loader, optimizer) -> float:
    """One pass over this process's share; returns the loss averaged over all processes."""
    model.train()
    total = torch.zeros(())
    for images, labels in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(shifted(images)), labels)
        loss.backward()
        optimizer.step()
        total += loss.detach()
    # hvd: the average of the processes' mean losses (they all have the same number of images).
    return hvd.allreduce(total / len(loader), name="train_loss").item()


@torch.no_grad()
def evaluate(model, dataset: Dataset) -> tuple[float, float]:
    """(loss, accuracy) on the whole of `dataset`, of which each process computes a part."""
    model.eval()
    part = Subset(dataset, range(hvd.rank(), len(dataset), hvd.size()))
    sums = torch.zeros(3, dtype=torch.float64)  # loss, correct, images
    for images, labels in DataLoader(part, batch_size=256):
        logits = model(images)
        sums[0] += F.cross_entropy(logits, labels, reduction="sum")
        sums[1] += (logits.argmax(dim=1) == labels).sum()
        sums[2] += len(labels)
    # hvd: parts may differ by one image, so sums are added up and divided once.
    loss, correct, images = hvd.allreduce(sums, name="evaluation", op=hvd.Sum).tolist()
    return loss / images, correct / images


def save_checkpoint(path: Path, model, epochs: int, accuracy: float) -> None:
    """Write the checkpoint; a reader finds the old file or the new one, never half of one."""
    unfinished = path.with_suffix(".tmp")
    torch.save({"model": model.state_dict(), "epochs": epochs, "accuracy": accuracy}, unfinished)
    os.replace(unfinished, path)


def save_curve(path: Path, history: list[tuple[float, float, float]]) -> None:
    """Draw (training loss, test loss, test accuracy) per epoch."""
    import matplotlib

    matplotlib.use("Agg")  # needs no screen
    from matplotlib import pyplot as plt

    epochs = range(1, len(history) + 1)
    train_loss, test_loss, accuracy = zip(*history, strict=True)
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    left.plot(epochs, train_loss, label="training")
    left.plot(epochs, test_loss, label="test")
    left.set(title="Loss", xlabel="epoch", ylabel="cross-entropy", yscale="log")
    left.legend()
    right.plot(epochs, [100 * value for value in accuracy], color="tab:green")
    right.set(title=f"Test accuracy: {accuracy[-1]:.2%}", xlabel="epoch", ylabel="%")
    for axes in (left, right):
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.3)
    figure.suptitle(f"Handwritten digits on {hvd.size()} process(es)")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> int:
    args = parse_arguments()
    hvd.init()  # hvd: from here on this process knows its rank and the job's size
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # the network is too small to gain from more

    train_set, test_set = load(args.seed)
    # hvd: each process sees its own share of the training images.
    sampler = DistributedSampler(
        train_set, num_replicas=hvd.size(), rank=hvd.rank(), shuffle=True, seed=args.seed
    )
    loader = DataLoader(train_set, batch_size=args.batch_size, sampler=sampler)

    torch.manual_seed(args.seed + hvd.rank())  # the processes start with different weights ...
    model = DigitsNet()
    # hvd: a step uses size times as many images, so it may be size times as long.
    optimizer = torch.optim.SGD(
        model.parameters(), lr=args.lr * hvd.size(), momentum=0.9, nesterov=True
    )

    # hvd: ... and all get rank 0's.
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    # hvd: gradients are averaged over the processes before they are used.
    compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), compression=compression
    )
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs)

    started = time.perf_counter()
    history = []
    progress = tqdm(range(args.epochs), desc="epochs", ncols=90, disable=hvd.rank() != 0)
    for epoch in progress:
        sampler.set_epoch(epoch)
        train_loss = train_epoch(model, loader, optimizer)
        test_loss, accuracy = evaluate(model, test_set)
        scheduler.step()
        history.append((train_loss, test_loss, accuracy))
        progress.set_postfix(loss=f"{train_loss:.3f}", accuracy=f"{accuracy:.2%}")
    seconds = time.perf_counter() - started

    # hvd: one process writes the files; every process knows the accuracy.
    if hvd.rank() == 0:
        args.out.mkdir(parents=True, exist_ok=True)
        save_checkpoint(args.out / "digits.pt", model, args.epochs, accuracy)
        save_curve(args.out / "curve.png", history)
        print(
            f"test accuracy {accuracy:.2%} ({len(test_set)} images never trained on) after "
            f"{args.epochs} epochs on {hvd.size()} process(es) in {seconds:.1f} s"
        )
        print(f"training curve: {args.out / 'curve.png'}")
        print(f"checkpoint:     {args.out / 'digits.pt'}", flush=True)
    hvd.shutdown()

    if args.min_accuracy is not None and accuracy < args.min_accuracy:
        print(f"accuracy {accuracy:.4f} is below {args.min_accuracy}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
