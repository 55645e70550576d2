"""The collectives, and what holds for all of them.

Each function describes an operation, operation.py executes it. The functions are in reductions.py
(values are computed), exchanges.py (values are moved) and sparse.py; this module has them all.

- An operation starts when every rank of the process set has submitted the same name, in any order
  and from any thread. Without a name, operations are numbered per process set and kind, so ranks
  must then submit them in the same order. A name in flight on this rank cannot be submitted again
  (ValueError).
- Blocking forms wait; `_async` forms return a `Handle` for `poll` and `synchronize`. Forms that end
  in `_` write into the tensor they are given and return it. The results of all others are new
  contiguous tensors of the input's dtype and device.
- Only blocking forms that return new tensors are differentiable.
- Any strided CPU tensor is taken by its logical values: transposed, channels_last, sliced or
  expanded (not expanded in the `_` forms).
- What a rank can see alone is a ValueError or TypeError at the call. A disagreement between ranks
  is the same `HorovodInternalError` on all of them, from `synchronize` or the blocking call, and
  the job stays usable. Before `hvd.init()` and after `hvd.shutdown()` every call is a
  `HorovodInternalError`.

Arguments that many of them share:

tensor
    What this rank contributes; in the grouped forms `tensors`, a list of them, submitted as one.
name
    Which operations of the ranks belong together; None or "" numbers it.
op
    `Average` (the default), `Sum`, `Min`, `Max`, `Product` or `Adasum`. Integers average exactly,
    truncating toward zero; floats narrower than 32 bits are accumulated in float32 and rounded
    once. For bool, Sum and Max are "or", Product and Min are "and"; Average is refused. Complex
    numbers have Average, Sum and Product; Adasum is for float16, bfloat16, float32 and float64.
average
    Deprecated: True is `op=Average`, False is `op=Sum`.
prescale_factor, postscale_factor
    What the values are multiplied by before and after the reduction; integers are truncated toward
    zero after each.
compression
    A class of `hvd.Compression`: the dtype floating point values travel in.
process_set
    The ranks that take part.
"""

from .exchanges import (
    allgather,
    allgather_async,
    alltoall,
    alltoall_async,
    barrier,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    grouped_allgather,
    grouped_allgather_async,
)
from .operation import ADASUM, AVERAGE, MAX, MIN, PRODUCT, SUM, Handle, poll, synchronize
from .reductions import (
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_reducescatter,
    grouped_reducescatter_async,
    reducescatter,
    reducescatter_async,
)
from .sparse import sparse_allreduce_async

__all__ = [
    "Adasum",
    "Average",
    "Handle",
    "Max",
    "Min",
    "Product",
    "Sum",
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "poll",
    "reducescatter",
    "reducescatter_async",
    "sparse_allreduce_async",
    "synchronize",
]

Average, Sum, Adasum = AVERAGE, SUM, ADASUM
Min, Max, Product = MIN, MAX, PRODUCT
