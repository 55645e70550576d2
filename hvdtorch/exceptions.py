"""Exceptions that users catch."""

from hvdtorch._C import HorovodInternalError

__all__ = ["HorovodInternalError"]
