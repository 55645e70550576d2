"""Recognise digits with the checkpoint that digits.py wrote: plain PyTorch, no hvdtorch.

    python examples/predict_digits.py out/digits/digits.pt

Prints some test images as text with what the network says they are, and the accuracy on the whole
test set. A model trained on many processes is an ordinary model: nothing here knows how it was
made.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from digits_model import DigitsNet, load
from torch import Tensor

SHADES = " .:-=+*#%@"


def as_text(image: Tensor) -> list[str]:
    """Eight lines for a [1, 8, 8] image with values 0..1, two characters a pixel."""
    return ["".join(2 * SHADES[int(value * 9)] for value in row) for row in image[0].tolist()]


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path, nargs="?", default=Path("out/digits/digits.pt"))
    parser.add_argument("--count", type=int, default=4, help="images shown")
    parser.add_argument("--seed", type=int, default=0, help="the one digits.py was given")
    args = parser.parse_args()
    if not args.checkpoint.exists():
        raise SystemExit(f"no checkpoint {args.checkpoint}: run examples/digits.py first")

    saved = torch.load(args.checkpoint, weights_only=True)
    model = DigitsNet()
    model.load_state_dict(saved["model"])
    model.eval()

    images, labels = load(args.seed)[1].tensors
    chances, predictions = model(images).softmax(dim=1).max(dim=1)

    shown = range(min(args.count, len(images)))
    for rows in zip(*(as_text(images[i]) for i in shown), strict=True):
        print("   ".join(rows))
    captions = [f"{predictions[i]} ({chances[i]:.1%}), is {labels[i]}" for i in shown]
    print("   ".join(f"{caption:^16}" for caption in captions))
    correct = int((predictions == labels).sum())
    print(f"accuracy {correct / len(labels):.2%}: {correct} of {len(labels)} test images")


if __name__ == "__main__":
    main()
