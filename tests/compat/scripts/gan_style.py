"""A generative adversarial network with two optimizers under Horovod.

The generator learns to map noise to points around (2, -1). While it is trained, the
discriminator's parameters are frozen with `requires_grad_(False)`.
"""

import argparse
import hashlib

import horovod.torch as hvd
import torch
from torch import nn, optim

CENTRE = (2.0, -1.0)


def parse_arguments():
    parser = argparse.ArgumentParser(description="A GAN with Horovod")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--noise", type=int, default=4)
    parser.add_argument("--lr", type=float, default=0.003)
    parser.add_argument("--seed", type=int, default=7)
    return parser.parse_args()


class Network(nn.Module):
    """Generator and discriminator have the same layers, and so the same parameter names."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.hidden = nn.Linear(inputs, 32)
        self.last = nn.Linear(32, outputs)

    def forward(self, x):
        return self.last(nn.functional.leaky_relu(self.hidden(x), 0.2))


def set_requires_grad(network, value):
    for parameter in network.parameters():
        parameter.requires_grad_(value)


def distributed(network, lr):
    """The optimizer of a network that all ranks start alike."""
    optimizer = optim.Adam(network.parameters(), lr=lr, betas=(0.5, 0.9))
    hvd.broadcast_parameters(network.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    return hvd.DistributedOptimizer(optimizer, named_parameters=network.named_parameters())


def distance(generator, noise):
    """How far the centre of the generated points is from where it should be."""
    with torch.no_grad():
        centre = generator(torch.randn(500, noise)).mean(dim=0)
    centre = hvd.allreduce(centre, name="centre")
    return (centre - torch.tensor(CENTRE)).norm().item()


def main():
    args = parse_arguments()
    hvd.init()
    torch.manual_seed(args.seed + hvd.rank())
    torch.set_num_threads(1)
    generator, discriminator = Network(args.noise, 2), Network(2, 1)
    optimizer_g = distributed(generator, args.lr * hvd.size())
    optimizer_d = distributed(discriminator, args.lr * hvd.size())
    criterion = nn.BCEWithLogitsLoss()
    ones, zeros = torch.ones(args.batch_size, 1), torch.zeros(args.batch_size, 1)

    before = distance(generator, args.noise)
    for step in range(args.steps):
        real = torch.tensor(CENTRE) + 0.3 * torch.randn(args.batch_size, 2)
        fake = generator(torch.randn(args.batch_size, args.noise))

        set_requires_grad(discriminator, True)
        optimizer_d.zero_grad()
        loss_d = criterion(discriminator(real), ones)
        loss_d = loss_d + criterion(discriminator(fake.detach()), zeros)
        loss_d.backward()
        optimizer_d.step()

        set_requires_grad(discriminator, False)
        optimizer_g.zero_grad()
        loss_g = criterion(discriminator(fake), ones)
        loss_g.backward()
        optimizer_g.step()

        if step % 50 == 0:
            losses = hvd.allreduce(torch.stack([loss_d.detach(), loss_g.detach()]), name="losses")
            if hvd.rank() == 0:
                print(f"step {step}: loss_d={losses[0]:.4f} loss_g={losses[1]:.4f}")
    after = distance(generator, args.noise)
    if hvd.rank() == 0:
        print(f"distance before={before:.4f} after={after:.4f}")

    parameters = [*generator.parameters(), *discriminator.parameters()]
    weights = b"".join(p.detach().numpy().tobytes() for p in parameters)
    print(f"rank {hvd.rank()} of {hvd.size()}: weights {hashlib.sha256(weights).hexdigest()}")


if __name__ == "__main__":
    main()
