"""What is trained: small networks whose gradients are many and small, or few and large.

    deep      244 tensors, 0.7 M parameters: 40 residual blocks of two 32-channel convolutions
    wide      18 tensors, 23 M parameters: a perceptron 256-1792x8-10
    resnet18, resnet50    torchvision's

Models and batches depend on the name and the rank alone, so every process can make them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

CLASSES = 10
BATCHES = 4  # different ones, used in turn


class Residual(nn.Module):
    """x + two convolutions of x, each normalised."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.body(x))


def deep() -> nn.Module:
    """For images [N, 3, 8, 8]."""
    blocks = [Residual(32) for _ in range(40)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, CLASSES)]
    return nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), *blocks, *head)


def wide() -> nn.Module:
    """For vectors [N, 256]."""
    widths = [256, *[1792] * 8]
    hidden: list[nn.Module] = []
    for here, there in itertools.pairwise(widths):
        hidden += [nn.Linear(here, there), nn.ReLU()]
    return nn.Sequential(*hidden, nn.Linear(widths[-1], CLASSES))


def resnet(depth: int) -> nn.Module:
    """torchvision's, for images [N, 3, 64, 64]."""
    import torchvision

    return getattr(torchvision.models, f"resnet{depth}")(num_classes=CLASSES)


@dataclass(frozen=True)
class Recipe:
    """A model and the shape of its batches (batch first)."""

    make: Callable[[], nn.Module]
    batch: tuple[int, ...]
    needs_torchvision: bool = False


RECIPES = {
    "deep": Recipe(deep, (4, 3, 8, 8)),
    "wide": Recipe(wide, (16, 256)),
    "resnet18": Recipe(lambda: resnet(18), (8, 3, 64, 64), True),
    "resnet50": Recipe(lambda: resnet(50), (4, 3, 64, 64), True),
}


def missing(name: str) -> str | None:
    """Why this interpreter cannot make the model, or None."""
    if RECIPES[name].needs_torchvision:
        try:
            import torchvision  # noqa: F401
        except Exception as error:
            return f"torchvision cannot be imported: {error}"
    return None


def make(name: str) -> nn.Module:
    """The same weights in every process."""
    torch.manual_seed(20)
    return RECIPES[name].make()


def batches(name: str, rank: int) -> list[tuple[Tensor, Tensor]]:
    """Inputs and labels that are the rank's own."""
    generator = torch.Generator().manual_seed(1000 + rank)
    shape = RECIPES[name].batch
    return [
        (
            torch.randn(shape, generator=generator),
            torch.randint(CLASSES, shape[:1], generator=generator),
        )
        for _ in range(BATCHES)
    ]


def optimizer(model: nn.Module) -> torch.optim.SGD:
    """Of every column."""
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
