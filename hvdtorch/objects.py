"""Python objects between ranks: `broadcast_object`, `allgather_object`, and agreeing on things.

Objects travel as pickles: by cloudpickle where it is installed (which also takes lambdas and
classes of the main script), else by pickle. The ranks of a job trust each other: each has proved
that it knows the job's key before anything is read from it.

No failure stays on one rank: if one cannot pickle or rebuild an object, every rank raises.
"""

from __future__ import annotations

import ctypes
import hashlib
import io
import pickle
from typing import Any

import torch
from torch import Tensor

from .collective_arguments import rank_of_root
from .collectives import allgather, allgather_async, broadcast_, synchronize
from .process_sets import ProcessSet, global_process_set

try:
    from cloudpickle import Pickler
except ImportError:
    from pickle import Pickler

__all__ = [
    "Pickler",
    "agree",
    "allgather_object",
    "broadcast_bytes",
    "broadcast_object",
    "differing",
]


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """The object of `root_rank` (a global rank) on every rank; what the others pass is ignored.

    The root gets the very object it passed, the others a copy. The object is pickled, with
    cloudpickle if that is installed. Raises RuntimeError with the same text on every rank if the
    root cannot pickle it or a rank cannot rebuild it, ValueError if the root is not a member of the
    process set.
    """
    is_root = rank_of_root(root_rank, process_set, "broadcast_object") == process_set.rank()
    name = name or "broadcast_object"  # not a number: other ranks' other calls must not matter
    payload: memoryview | None = None
    error: Exception | None = None
    if is_root:
        try:
            payload = _pickled(obj)
        except Exception as caught:
            error = caught
    data = broadcast_bytes(payload, root_rank, name, process_set)
    if data is not None and not is_root:
        try:
            obj = pickle.loads(data)
        except Exception as caught:
            error = caught
    agree(error, "broadcast_object", name, process_set)
    return obj


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """The objects of all ranks, in rank order; this rank's own one is a copy too.

    Pickled as by `broadcast_object`. Raises RuntimeError with the same text on every rank if one
    cannot pickle its object or rebuild another's.
    """
    name = name or "allgather_object"
    payload = memoryview(b"")
    error: Exception | None = None
    objects: list[Any] = []
    try:
        payload = _pickled(obj)
    except Exception as caught:
        error = caught
    header = allgather_async(torch.tensor([-1 if error else len(payload)]), f"{name}.sz")
    data = memoryview(_to_bytes(allgather(_to_tensor(payload), f"{name}.t")))
    lengths = synchronize(header).tolist()
    if min(lengths) >= 0:
        try:
            for length in lengths:
                objects.append(pickle.loads(data[:length]))
                data = data[length:]
        except Exception as caught:
            error = caught
    agree(error, "allgather_object", name, global_process_set)
    return objects


# ----------------------------------------------------------------------------------------------
# What the functions above and broadcast_state.py are made of


def broadcast_bytes(
    payload: memoryview | None, root_rank: int, name: str, process_set: ProcessSet
) -> memoryview | None:
    """The root's bytes on every rank; None if the root has none. Other ranks pass None."""
    length = torch.tensor([-1 if payload is None else len(payload)])
    broadcast_(length, root_rank, f"{name}.sz", process_set)
    if length.item() < 0:
        return None
    data = memoryview(bytearray(int(length))) if payload is None else payload
    broadcast_(_to_tensor(data), root_rank, f"{name}.t", process_set)
    return data


def agree(error: Exception | None, what: str, name: str, process_set: ProcessSet) -> None:
    """Raise on every rank if `error` is set on any; a collective.

    The text of the RuntimeError names each failed rank and its error.
    """
    rank = (process_set.ranks or [0])[process_set.rank() or 0]
    text = "" if error is None else f"\n  rank {rank}: {type(error).__name__}: {error}"
    texts = allgather(_to_tensor(memoryview(bytearray(text.encode()))), f"{name}.ok", process_set)
    if len(texts):
        raise RuntimeError(f"{what} failed:{_to_bytes(texts).decode()}") from error


def differing(description: object, name: str) -> list[Any] | None:
    """None if all ranks passed the same plain data, else everyone's, by rank; a collective.

    Compares 32 bytes per rank, and sends the descriptions only if those differ.
    """
    digest = hashlib.sha256(repr(description).encode()).digest()
    digests = allgather(_to_tensor(memoryview(bytearray(digest))), f"{name}.digest")
    if (digests.view(-1, len(digest)) == digests[: len(digest)]).all():
        return None
    return allgather_object(description, f"{name}.descriptions")


def _pickled(obj: Any) -> memoryview:
    stream = io.BytesIO()
    Pickler(stream, protocol=pickle.HIGHEST_PROTOCOL).dump(obj)
    return stream.getbuffer()


def _to_tensor(data: memoryview) -> Tensor:
    """A writable buffer as a uint8 tensor that shares its memory."""
    if not data:  # torch.frombuffer refuses an empty one
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(data, dtype=torch.uint8)


def _to_bytes(tensor: Tensor) -> bytes:
    # numpy, which would do this, is not among torch's dependencies.
    return ctypes.string_at(tensor.data_ptr(), tensor.numel()) if tensor.numel() else b""
