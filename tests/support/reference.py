"""What the collectives must give, computed from all ranks' inputs without any of hvdtorch's code.

Integers are Python integers, floats are numpy's IEEE arithmetic one operation at a time, and the
rules are those of docs/architecture.md, "Values":

- floats narrower than 32 bits and complex64 are computed in float32, float64 and complex128 in
  float64, in rank order, and rounded to the dtype once;
- y = post(reduce(pre(x))): factors in the type that is computed in, for integers a float64 product
  truncated toward zero; an average is divided after the postscale for floats, before it for
  integers, whose quotient is truncated toward zero;
- integers wrap; the sum under an average is exact;
- bool: Sum and Max are "or", Product and Min are "and";
- where an allreduce's ranks are on several hosts: the ranks of each host in rank order, then the
  hosts in the order of their lowest ranks.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from functools import reduce as fold
from typing import Any

import numpy as np
import torch
from torch import Tensor

import hvdtorch as hvd


@dataclasses.dataclass(frozen=True)
class Reduction:
    op: int
    prescale: float = 1.0
    postscale: float = 1.0


def reduced(
    reduction: Reduction,
    inputs: Sequence[Tensor],
    divisor: int = 0,
    hosts: Sequence[int] | None = None,
) -> Tensor:
    """The reduction of one tensor per rank; contiguous. Averages divide by the number of tensors,
    or by `divisor`. `hosts`: by rank, equal for ranks on one host (None: all are)."""
    divisor = divisor or len(inputs)
    hosts = hosts or [0] * len(inputs)
    dtype, shape = inputs[0].dtype, inputs[0].shape
    with np.errstate(all="ignore"):
        if dtype == torch.bool:
            flat = _reduced_bools(reduction, inputs)
        elif dtype.is_complex:
            flat = _reduced_complex(reduction, inputs, divisor, hosts)
        elif dtype.is_floating_point:
            wide = [_computed_in(t) for t in inputs]
            values = _reduced_floats(reduction, wide, divisor, hosts)
            flat = _rounded(values, dtype)
        else:
            flat = _reduced_integers(reduction, inputs, divisor)
    return flat.reshape(shape)


def share(whole: Tensor, index: int, ranks: int) -> Tensor:
    """The rows of a reducescatter's result that belong to rank `index` of the set."""
    counts = [whole.shape[0] // ranks + (r < whole.shape[0] % ranks) for r in range(ranks)]
    return whole.split(counts)[index].contiguous()


def exchanged(inputs: Sequence[Tensor], splits: Sequence[Sequence[int]], index: int) -> Tensor:
    """The rows that an alltoall brings to rank `index`; splits[r] are those of rank r."""
    parts = []
    for rows, counts in zip(inputs, splits, strict=True):
        start = sum(counts[:index])
        parts.append(rows[start : start + counts[index]])
    return torch.cat(parts)


# ----------------------------------------------------------------------------------------------
# bool and integers


def _reduced_bools(reduction: Reduction, inputs: Sequence[Tensor]) -> Tensor:
    columns = zip(*(t.reshape(-1).tolist() for t in inputs), strict=True)
    rule = any if reduction.op in (hvd.Sum, hvd.Max) else all
    return torch.tensor([rule(column) for column in columns], dtype=torch.bool)


def _reduced_integers(reduction: Reduction, inputs: Sequence[Tensor], divisor: int) -> Tensor:
    dtype = inputs[0].dtype
    info = torch.iinfo(dtype)
    lowest, values = info.min, 2**info.bits
    highest = 2**64 - 1 if dtype == torch.uint64 else 2**63 - 1  # what a product is clamped to

    def wrapped(numbers: Iterable[int]) -> list[int]:
        return [(number - lowest) % values + lowest for number in numbers]

    def scaled(numbers: list[int], factor: float) -> list[int]:
        if factor == 1.0:
            return numbers
        products = (int(float(number) * factor) for number in numbers)
        return wrapped(min(max(product, -(2**63)), highest) for product in products)

    rules: dict[int, Callable[[tuple[int, ...]], int]] = {
        hvd.Average: lambda column: _truncated_quotient(sum(column), divisor),
        hvd.Sum: sum,
        hvd.Product: math.prod,
        hvd.Min: min,
        hvd.Max: max,
    }
    columns = zip(
        *(scaled(t.reshape(-1).tolist(), reduction.prescale) for t in inputs), strict=True
    )
    results = scaled(wrapped(map(rules[reduction.op], columns)), reduction.postscale)
    return torch.tensor(results, dtype=dtype)


def _truncated_quotient(number: int, divisor: int) -> int:
    return number // divisor if number >= 0 else -(-number // divisor)


# ----------------------------------------------------------------------------------------------
# floats and complex numbers


def _computed_in(tensor: Tensor) -> Any:
    """The values, flat, in the type they are computed in; widening is exact."""
    flat = tensor.reshape(-1)
    return flat.numpy() if tensor.dtype == torch.float64 else flat.to(torch.float32).numpy()


def _scaled(values: Any, factor: float) -> Any:
    return values if factor == 1.0 else values * values.dtype.type(factor)


def _folded(rule: Callable[[Any, Any], Any], inputs: Sequence[Any], hosts: Sequence[int]) -> Any:
    """Each host's inputs in rank order, then the hosts in the order of their lowest ranks."""
    by_host: dict[int, list[Any]] = {}
    for host, values in zip(hosts, inputs, strict=True):
        by_host.setdefault(host, []).append(values)
    return fold(rule, [fold(rule, of_host) for of_host in by_host.values()])


def _reduced_floats(
    reduction: Reduction, inputs: Sequence[Any], divisor: int, hosts: Sequence[int]
) -> Any:
    rules = {
        hvd.Average: lambda a, b: a + b,
        hvd.Sum: lambda a, b: a + b,
        hvd.Product: lambda a, b: a * b,
        # NaN on either side is the result; of equal ones (0.0 and -0.0) the later rank's.
        hvd.Min: lambda a, b: np.where((a < b) | np.isnan(a), a, b),
        hvd.Max: lambda a, b: np.where((a > b) | np.isnan(a), a, b),
    }
    scaled = [_scaled(x, reduction.prescale) for x in inputs]
    total = _folded(rules[reduction.op], scaled, hosts)
    total = _scaled(total, reduction.postscale)
    if reduction.op == hvd.Average:
        total = total / total.dtype.type(divisor)
    return total


def _rounded(values: Any, dtype: torch.dtype) -> Tensor:
    """To nearest, ties to even. float8 by torch's own conversion, which is its definition."""
    if dtype == torch.float16:
        return torch.from_numpy(values.astype(np.float16))
    if dtype == torch.bfloat16:
        bits = values.view(np.uint32).astype(np.uint64)
        upper = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        upper = np.where(np.isnan(values), 0x7FC0, upper)
        return torch.from_numpy(upper.astype(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(values).to(dtype)


def _reduced_complex(
    reduction: Reduction, inputs: Sequence[Tensor], divisor: int, hosts: Sequence[int]
) -> Tensor:
    dtype = inputs[0].dtype
    parts = [torch.view_as_real(t.contiguous()).reshape(-1, 2).numpy() for t in inputs]
    if reduction.op != hvd.Product:
        result = _reduced_floats(reduction, parts, divisor, hosts)
    else:

        def times(a: Any, b: Any) -> Any:
            real = a[:, 0] * b[:, 0] - a[:, 1] * b[:, 1]
            imaginary = a[:, 0] * b[:, 1] + a[:, 1] * b[:, 0]
            return np.stack([real, imaginary], axis=1)

        scaled = [_scaled(part, reduction.prescale) for part in parts]
        result = _folded(times, scaled, hosts)
        result = _scaled(result, reduction.postscale)
    real, imaginary = torch.from_numpy(result.T.copy())
    return torch.complex(real, imaginary).to(dtype)


# ----------------------------------------------------------------------------------------------
# Comparison


def difference(actual: Tensor, expected: Tensor) -> str:
    """Empty if dtype, shape and bits are equal (any NaN equals any other), else what differs."""
    if (actual.dtype, actual.shape) != (expected.dtype, expected.shape):
        return f"is {actual.dtype}{list(actual.shape)}, not {expected.dtype}{list(expected.shape)}"
    ours, theirs = bits(actual), bits(expected)
    if torch.equal(ours, theirs):
        return ""
    wrong = ours != theirs
    if expected.dtype.is_floating_point or expected.dtype.is_complex:
        wrong &= ~(_is_nan(actual) & _is_nan(expected)).repeat_interleave(
            ours.numel() // _is_nan(expected).numel()
        )
    if not wrong.any():
        return ""
    return f"is\n{actual}\nnot\n{expected}"


def bits(tensor: Tensor) -> Tensor:
    """The logical values, as bytes in row-major order."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _is_nan(tensor: Tensor) -> Tensor:
    real = torch.view_as_real(tensor) if tensor.dtype.is_complex else tensor
    return real.to(torch.float64).isnan().reshape(-1)
