"""`horovod.torch.optimizer`."""

from hvdtorch.optimizer import DistributedOptimizer, _DistributedOptimizer

__all__ = ["DistributedOptimizer", "_DistributedOptimizer"]
