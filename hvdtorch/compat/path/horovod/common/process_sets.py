"""`horovod.common.process_sets`."""

from hvdtorch.torch import ProcessSet, global_process_set

__all__ = ["ProcessSet", "global_process_set"]
