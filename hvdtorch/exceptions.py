"""Exceptions that users catch."""

from hvdtorch._C import HorovodInternalError
from hvdtorch.native import HorovodVersionMismatchError

__all__ = ["HorovodInternalError", "HorovodVersionMismatchError", "HostsUpdatedInterrupt"]


class HostsUpdatedInterrupt(RuntimeError):
    """Raised between two steps of elastic training when hosts came or went.

    Elastic training is not available in this version, so nothing raises it yet; it is here for
    scripts that name it in an `except`.

    Attributes
    ----------
    skip_sync : bool
        Whether the state need not be synchronized again, as hosts only went.
    """

    def __init__(self, skip_sync: bool) -> None:
        super().__init__(skip_sync)
        self.skip_sync = skip_sync
