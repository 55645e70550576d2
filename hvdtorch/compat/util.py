"""The helpers of `horovod.common.util`, for scripts and libraries that use them."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from hvdtorch import buildinfo

_T = TypeVar("_T")
_cache = functools.cache


@contextmanager
def env(**variables: str | None) -> Iterator[None]:
    """Inside, environment variables have these values; None leaves a variable as it is.

    Afterwards each has its former value again, or is unset again.
    """
    given = {name: text for name, text in variables.items() if text is not None}
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    try:
        yield
    finally:
        for name, text in before.items():
            if text is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = text


def split_list(l: Sequence[_T], n: int) -> list[Sequence[_T]]:  # noqa: E741
    """Cut a sequence into `n` consecutive parts.

    Their lengths differ by one at most, the longer ones come first; of more parts than items the
    last are empty. Raises ValueError if `n` is not positive.
    """
    if n < 1:
        raise ValueError(f"split_list: the number of parts must be positive, not {n}")
    length, longer = divmod(len(l), n)
    ends = [part * length + min(part, longer) for part in range(n + 1)]
    return [l[start:end] for start, end in itertools.pairwise(ends)]


def is_iterable(x: Any) -> bool:
    """Whether `iter(x)` works."""
    try:
        iter(x)
    except TypeError:
        return False
    return True


def num_rank_is_power_2(num_rank: int) -> bool:
    """Whether a number of ranks is 1, 2, 4, 8, ..."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


# ---- what is built ----


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether the native part for a framework can be loaded: for "torch", if it was built.

    With `verbose`, what is missing is printed.
    """
    if ext_base_name != "torch":
        return _told(False, verbose, f"hvdtorch has nothing for {ext_base_name!r}, only for torch")
    why = buildinfo.check_build()["native"]["error"]
    return _told(why is None, verbose, f"hvdtorch's native module cannot be used: {why}")


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether collectives can work on the GPUs of this machine.

    True for "torch" if hvdtorch was built with CUDA and torch finds a device.
    """
    if not extension_available(ext_base_name, verbose):
        return False
    if not buildinfo.cuda_built():
        return _told(False, verbose, "hvdtorch was built without CUDA")
    import torch

    return _told(torch.cuda.is_available(), verbose, "torch finds no CUDA device")


def mpi_built(verbose: bool = False) -> bool:
    """Whether MPI is built in: never."""
    return _told(buildinfo.mpi_built(), verbose, "hvdtorch works without MPI")


def gloo_built(verbose: bool = False) -> bool:
    """Whether Gloo can be used."""
    return _told(buildinfo.gloo_built(), verbose, "the native module or torch's Gloo is missing")


def nccl_built(verbose: bool = False) -> int:
    """The version code of the NCCL that can be used; 0 if there is none."""
    code = buildinfo.nccl_built()
    _told(code > 0, verbose, "hvdtorch was built without NCCL")
    return code


def ddl_built(verbose: bool = False) -> bool:
    """Whether IBM DDL is built in: never."""
    return _told(buildinfo.ddl_built(), verbose, "hvdtorch has no DDL")


def ccl_built(verbose: bool = False) -> bool:
    """Whether Intel oneCCL is built in: never."""
    return _told(buildinfo.ccl_built(), verbose, "hvdtorch has no oneCCL")


def _told(answer: bool, verbose: bool, why_not: str) -> bool:
    if verbose and not answer:
        print(why_not)
    return answer
