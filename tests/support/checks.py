"""Exact comparisons and inputs for functions that run on the ranks, where pytest's assert does not
explain itself."""

from typing import Any

import torch
from torch import Tensor

INTEGERS = (
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
COMPLEX = (torch.complex64, torch.complex128)
FLOAT8 = (
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
)
ALL_DTYPES = (torch.bool, *INTEGERS, *FLOATS, *COMPLEX, *FLOAT8)


def same(actual: Any, expected: Any) -> None:
    """Equal dtype, shape and bits (a NaN equals itself); else an AssertionError that shows both."""
    assert isinstance(actual, Tensor), f"expected a tensor, got {actual!r}"
    if not isinstance(expected, Tensor):
        expected = torch.tensor(expected, dtype=actual.dtype)
    assert actual.dtype == expected.dtype, f"dtype is {actual.dtype}, expected {expected.dtype}"
    assert actual.shape == expected.shape, f"shape is {actual.shape}, expected {expected.shape}"
    if bits(actual) != bits(expected):
        raise AssertionError(f"got\n{actual}\nexpected\n{expected}")


def bits(tensor: Tensor) -> list[int]:
    """The logical values, as bytes in row-major order."""
    dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return dense.reshape(-1).view(torch.uint8).tolist()


def values(numbers: Any, dtype: torch.dtype) -> Tensor:
    """Small numbers in any dtype, also those torch cannot build directly."""
    return torch.tensor(numbers, dtype=torch.float64).to(dtype)
