"""`horovod.torch.sync_batch_norm`."""

from hvdtorch.torch import SyncBatchNorm

__all__ = ["SyncBatchNorm"]
