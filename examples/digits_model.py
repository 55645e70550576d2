"""The network and the data of the digits examples: plain PyTorch and scikit-learn, one process.

digits.py trains this network on any number of processes, predict_digits.py reads the checkpoint
back; what both must agree on is here.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.utils.data import TensorDataset

CLASSES = 10


class DigitsNet(nn.Module):
    """Two convolutions and two linear layers: [N, 1, 8, 8] float32 in 0..1 to [N, 10] logits."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 32, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 64, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.classifier = nn.Sequential(
            nn.Flatten(),
            nn.Dropout(0.25),
            nn.Linear(64 * 4 * 4, 128),
            nn.ReLU(),
            nn.Linear(128, CLASSES),
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.classifier(self.features(images))


def shifted(images: Tensor) -> Tensor:
    """`images` [N, 1, 8, 8], each moved by up to one pixel, so that no two epochs look the same."""
    count, size = len(images), images.shape[-1]
    padded = F.pad(images, (1, 1, 1, 1))
    rows = torch.randint(0, 3, (count, 1, 1)) + torch.arange(size).reshape(1, size, 1)
    columns = torch.randint(0, 3, (count, 1, 1)) + torch.arange(size).reshape(1, 1, size)
    return padded[torch.arange(count).reshape(count, 1, 1), 0, rows, columns].unsqueeze(1)


def load(seed: int = 0) -> tuple[TensorDataset, TensorDataset]:
    """(training, test) sets of scikit-learn's 1,797 handwritten digits; nothing is downloaded.

    A fifth of each digit's images is held out as the test set. The same `seed` gives the same
    split, in every process.
    """
    images, labels = load_digits(return_X_y=True)  # [1797, 64] values 0..16, [1797]
    split = train_test_split(images, labels, test_size=0.2, stratify=labels, random_state=seed)
    train_images, test_images, train_labels, test_labels = split

    def dataset(images, labels) -> TensorDataset:
        pixels = torch.tensor(images / 16.0, dtype=torch.float32).reshape(-1, 1, 8, 8)
        return TensorDataset(pixels, torch.tensor(labels, dtype=torch.int64))

    return dataset(train_images, train_labels), dataset(test_images, test_labels)
