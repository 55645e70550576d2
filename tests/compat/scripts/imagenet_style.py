"""Trains on images the way scripts for ImageNet do under Horovod.

That is: a learning rate that warms up batch by batch and then falls in steps, several forward and
backward passes per update, a checkpoint per epoch written by rank 0, and a restart from the last
one. The images are made up: each class has its own colour and its own stripes.
"""

import argparse
import hashlib
import math
import os

import horovod.torch as hvd
import torch
import torch.nn.functional as F
import torch.optim as optim
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

CLASSES = 4


def parse_arguments():
    parser = argparse.ArgumentParser(description="Images with Horovod")
    parser.add_argument("--checkpoint-format", default="./checkpoint-{epoch}.pth.tar")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--val-batch-size", type=int, default=16)
    parser.add_argument("--batches-per-allreduce", type=int, default=1)
    parser.add_argument("--base-lr", type=float, default=0.0125)
    parser.add_argument("--warmup-epochs", type=float, default=1)
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--wd", type=float, default=0.00005)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--fp16-allreduce", action="store_true")
    parser.add_argument("--use-adasum", action="store_true")
    parser.add_argument("--gradient-predivide-factor", type=float, default=1.0)
    parser.add_argument("--num-groups", type=int, default=0)
    return parser.parse_args()


def images(count, seed):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    pictures = 0.5 * torch.randn(count, 3, 12, 12, generator=generator)
    for i, label in enumerate(labels.tolist()):
        pictures[i, label % 3] += 0.5
        pictures[i, :, :: label + 2] += 1.0
    return TensorDataset(pictures, labels)


class Block(nn.Module):
    """Two convolutions around which the input is added, as in a residual network."""

    def __init__(self, channels):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)

    def forward(self, x):
        return F.relu(x + self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))


def make_model():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        Block(8),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, CLASSES),
    )


class Metric:
    """The mean of a value over batches and ranks."""

    def __init__(self, name):
        self.name = name
        self.sum = torch.tensor(0.0)
        self.n = torch.tensor(0.0)

    def update(self, val):
        self.sum += hvd.allreduce(val.detach().cpu(), name=self.name)
        self.n += 1

    @property
    def avg(self):
        return self.sum / self.n


class Trainer:
    def __init__(self, args):
        self.args = args
        self.verbose = hvd.rank() == 0
        self.accumulated = args.batch_size * args.batches_per_allreduce
        train_set, val_set = images(384, seed=1), images(96, seed=2)
        self.train_sampler = DistributedSampler(train_set, num_replicas=hvd.size(), rank=hvd.rank())
        self.train_loader = DataLoader(
            train_set, batch_size=self.accumulated, sampler=self.train_sampler
        )
        val_sampler = DistributedSampler(val_set, num_replicas=hvd.size(), rank=hvd.rank())
        self.val_loader = DataLoader(val_set, batch_size=args.val_batch_size, sampler=val_sampler)
        self.model = make_model()
        self.lr_scaler = args.batches_per_allreduce * (1 if args.use_adasum else hvd.size())
        optimizer = optim.SGD(
            self.model.parameters(),
            lr=args.base_lr * self.lr_scaler,
            momentum=args.momentum,
            weight_decay=args.wd,
        )
        compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none
        self.optimizer = hvd.DistributedOptimizer(
            optimizer,
            named_parameters=self.model.named_parameters(),
            compression=compression,
            backward_passes_per_step=args.batches_per_allreduce,
            op=hvd.Adasum if args.use_adasum else hvd.Average,
            gradient_predivide_factor=args.gradient_predivide_factor,
            num_groups=args.num_groups,
        )

    def resume(self):
        """The epoch to go on with; the root loads, the others get everything from it."""
        resume_from_epoch = 0
        for try_epoch in range(self.args.epochs, 0, -1):
            if os.path.exists(self.args.checkpoint_format.format(epoch=try_epoch)):
                resume_from_epoch = try_epoch
                break
        # Only the root need see the files, so its answer is everyone's.
        resume_from_epoch = hvd.broadcast(
            torch.tensor(resume_from_epoch), root_rank=0, name="resume_from_epoch"
        ).item()
        if resume_from_epoch > 0 and hvd.rank() == 0:
            checkpoint = torch.load(self.args.checkpoint_format.format(epoch=resume_from_epoch))
            self.model.load_state_dict(checkpoint["model"])
            self.optimizer.load_state_dict(checkpoint["optimizer"])
        hvd.broadcast_parameters(self.model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(self.optimizer, root_rank=0)
        return resume_from_epoch

    def adjust_learning_rate(self, epoch, batch_idx):
        warmup = self.args.warmup_epochs
        if epoch < warmup:
            progress = epoch + float(batch_idx + 1) / len(self.train_loader)
            lr_adj = 1.0 / self.lr_scaler * (progress * (self.lr_scaler - 1) / warmup + 1)
        elif epoch < 6:
            lr_adj = 1.0
        else:
            lr_adj = 1e-1
        for param_group in self.optimizer.param_groups:
            param_group["lr"] = self.args.base_lr * self.lr_scaler * lr_adj

    def train(self, epoch):
        self.model.train()
        self.train_sampler.set_epoch(epoch)
        train_loss, train_accuracy = Metric("train_loss"), Metric("train_accuracy")
        for batch_idx, (data, target) in enumerate(self.train_loader):
            self.adjust_learning_rate(epoch, batch_idx)
            self.optimizer.zero_grad()
            parts = math.ceil(len(data) / self.args.batch_size)
            for start in range(0, len(data), self.args.batch_size):
                data_batch = data[start : start + self.args.batch_size]
                target_batch = target[start : start + self.args.batch_size]
                output = self.model(data_batch)
                train_accuracy.update(accuracy(output, target_batch))
                loss = F.cross_entropy(output, target_batch)
                train_loss.update(loss)
                loss.div_(parts)
                loss.backward()
            self.optimizer.step()
        if self.verbose:
            print(
                f"Train Epoch #{epoch + 1}: loss={train_loss.avg.item():.5f} "
                f"accuracy={100 * train_accuracy.avg.item():.2f}"
            )

    def validate(self, epoch):
        self.model.eval()
        val_loss, val_accuracy = Metric("val_loss"), Metric("val_accuracy")
        with torch.no_grad():
            for data, target in self.val_loader:
                output = self.model(data)
                val_loss.update(F.cross_entropy(output, target))
                val_accuracy.update(accuracy(output, target))
        if self.verbose:
            print(
                f"Validate Epoch #{epoch + 1}: loss={val_loss.avg.item():.5f} "
                f"accuracy={100 * val_accuracy.avg.item():.2f}"
            )

    def save_checkpoint(self, epoch):
        if hvd.rank() == 0:
            state = {
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
            }
            torch.save(state, self.args.checkpoint_format.format(epoch=epoch + 1))


def accuracy(output, target):
    return (output.argmax(dim=1) == target).float().mean()


def main():
    args = parse_arguments()
    hvd.init()
    torch.manual_seed(args.seed + hvd.rank())  # the broadcast makes all models alike
    torch.set_num_threads(1)
    trainer = Trainer(args)
    resume_from_epoch = trainer.resume()
    if trainer.verbose:
        print(f"starting after epoch {resume_from_epoch}")
    for epoch in range(resume_from_epoch, args.epochs):
        trainer.train(epoch)
        trainer.validate(epoch)
        trainer.save_checkpoint(epoch)

    weights = b"".join(p.detach().numpy().tobytes() for p in trainer.model.parameters())
    print(f"rank {hvd.rank()} of {hvd.size()}: weights {hashlib.sha256(weights).hexdigest()}")


if __name__ == "__main__":
    main()
