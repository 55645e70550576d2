"""Compression: send a tensor in a narrower dtype and restore the dtype afterwards.

A compressor is a class (never instantiated) with two methods; any object that has them can be
passed wherever `compression=` is taken. The cast happens outside the collective, so it is part of
the autograd graph. Sums of 16-bit floats are accumulated in float32 and rounded once.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor


class Compressor:
    """The interface: what happens to a tensor before and after a collective."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """The tensor to send, and what `decompress` needs to know."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """The received tensor in the form the caller expects."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Sends the tensor as it is."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        return tensor


class _CastCompressor(Compressor):
    """Sends floating point tensors of any width as `wire_dtype`, all others as they are."""

    wire_dtype: ClassVar[torch.dtype]

    @classmethod
    def compress(cls, tensor: Tensor) -> tuple[Tensor, torch.dtype]:
        sent = tensor.to(cls.wire_dtype) if tensor.dtype.is_floating_point else tensor
        return sent, tensor.dtype

    @classmethod
    def decompress(cls, tensor: Tensor, ctx: torch.dtype) -> Tensor:
        return tensor.to(ctx)


class FP16Compressor(_CastCompressor):
    """Sends floating point tensors as float16: 11 significant bits, values up to 65504."""

    wire_dtype = torch.float16


class BF16Compressor(_CastCompressor):
    """Sends floating point tensors as bfloat16: 8 significant bits, the range of float32."""

    wire_dtype = torch.bfloat16


class Compression:
    """The compressors by name: `compression=hvd.Compression.fp16`."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
