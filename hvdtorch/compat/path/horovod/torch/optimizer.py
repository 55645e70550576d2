"""`horovod.torch.optimizer`."""

from hvdtorch.compat.adasum import _DistributedAdasumOptimizer
from hvdtorch.optimizer import DistributedOptimizer, _DistributedOptimizer

__all__ = ["DistributedOptimizer", "_DistributedAdasumOptimizer", "_DistributedOptimizer"]
