"""`horovod.common.exceptions`."""

import hvdtorch.torch  # noqa: F401  (loads torch, which the native module needs)
from hvdtorch.exceptions import (
    HorovodInternalError,
    HorovodVersionMismatchError,
    HostsUpdatedInterrupt,
)

__all__ = ["HorovodInternalError", "HorovodVersionMismatchError", "HostsUpdatedInterrupt"]
