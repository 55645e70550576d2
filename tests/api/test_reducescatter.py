"""reducescatter and grouped_reducescatter: shares, values, what is refused, gradients."""

import time

import pytest
import torch
from support.checks import COMPLEX, FLOAT8, FLOATS, INTEGERS, same, values

import hvdtorch as hvd

NUMBERS = (*INTEGERS, *FLOATS, *FLOAT8)


def share(whole: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """The rows of rank `rank`: d // size, and one more for the first d % size ranks."""
    rows, longer = divmod(whole.shape[0], size)
    start = rank * rows + min(rank, longer)
    return whole[start : start + rows + (rank < longer)]


def shares() -> None:
    rank, size = hvd.rank(), hvd.size()
    total = size * (size - 1) // 2
    for rows in (0, 1, 2, 3, 4, 5, 8, 11):
        for trailing in ((), (3,), (2, 0)):
            base = torch.arange(rows, dtype=torch.float32).reshape(-1, *(1 for _ in trailing))
            base = base.expand(rows, *trailing)
            given = base + rank
            result = hvd.reducescatter(given, op=hvd.Sum)
            same(result, share(base * size + total, rank, size))
            same(given, base + rank)
            asynchronous = hvd.reducescatter_async(given, op=hvd.Sum, name="share")
            same(hvd.synchronize(asynchronous), share(base * size + total, rank, size))


def test_rows_are_shared_out_as_evenly_as_they_can(cluster):
    cluster.run(shares)


def every_op_and_dtype() -> None:
    rank, size = hvd.rank(), hvd.size()
    for dtype in NUMBERS:
        given = values([[size * (rank % 2), size], [1, 2], [2, size]], dtype)
        odd = size // 2  # ranks with an odd number
        for op, column in (
            (hvd.Average, [[odd, size], [1, 2], [2, size]]),
            (hvd.Sum, [[size * odd, size * size], [size, 2 * size], [2 * size, size * size]]),
            (hvd.Min, [[0, size], [1, 2], [2, size]]),
            (hvd.Max, [[size * (size > 1), size], [1, 2], [2, size]]),
        ):
            same(hvd.reducescatter(given, op=op), share(values(column, dtype), rank, size))
        ones = values([[1], [2], [1], [1]], dtype)
        product = values([[1], [2**size], [1], [1]], dtype)
        same(hvd.reducescatter(ones, op=hvd.Product), share(product, rank, size))
    same(hvd.reducescatter(torch.ones(4)), share(torch.ones(4), rank, size))  # Average
    for dtype in COMPLEX:
        given = torch.tensor([1 + 2j, 3j, 4.0], dtype=dtype)
        same(hvd.reducescatter(given, op=hvd.Sum), share(given * size, rank, size))
    logic = torch.tensor([True, False, rank == 0, rank != 0])
    any_of = torch.tensor([True, False, True, size > 1])
    same(hvd.reducescatter(logic, op=hvd.Sum), share(any_of, rank, size))


def test_every_op_and_dtype(cluster):
    cluster.run(every_op_and_dtype)


def factors_and_order_of_arguments() -> None:
    rank, size = hvd.rank(), hvd.size()
    given = torch.arange(6.0) + rank
    total = size * (size - 1) / 2
    wanted = share((torch.arange(6.0) * size + total) * 2, rank, size)
    factors = {"prescale_factor": 0.5, "postscale_factor": 4.0}
    same(hvd.reducescatter(given, op=hvd.Sum, **factors), wanted)
    everyone = hvd.global_process_set
    none = hvd.Compression.none
    same(hvd.reducescatter(given, "n", none, hvd.Sum, everyone, 0.5, 4.0), wanted)
    same(
        hvd.synchronize(hvd.reducescatter_async(given, "n", hvd.Sum, everyone, 0.5, 4.0)),
        wanted,
    )
    result = hvd.grouped_reducescatter([given], "n", none, hvd.Sum, everyone, 0.5, 4.0)
    assert type(result) is list
    same(result[0], wanted)
    handle = hvd.grouped_reducescatter_async([given], "n", hvd.Sum, everyone, 0.5, 4.0)
    same(hvd.synchronize(handle)[0], wanted)
    truncated = hvd.reducescatter(
        torch.tensor([3, -3] * size), op=hvd.Max, prescale_factor=0.5, postscale_factor=3.0
    )
    same(truncated, torch.tensor([3, -3]))
    fine = torch.full((size,), 1 + 2**-12)
    same(hvd.reducescatter(fine, compression=hvd.Compression.fp16), torch.ones(1))
    same(hvd.reducescatter(fine), fine[:1])


def test_factors_compression_and_the_order_of_arguments(cluster):
    cluster.run(factors_and_order_of_arguments)


def grouped() -> None:
    rank, size = hvd.rank(), hvd.size()

    def group() -> list[torch.Tensor]:
        return [
            torch.full((size + 1, 2), float(rank)),
            torch.arange(5, dtype=torch.int16) + rank,
            torch.empty(0, 3, dtype=torch.bfloat16),
            torch.full((20_000, 2), float(rank), dtype=torch.float64).t().contiguous().t(),
        ]

    total = size * (size - 1) // 2
    wanted = [
        torch.full((size + 1, 2), float(total)),
        torch.arange(5, dtype=torch.int16) * size + total,
        torch.empty(0, 3, dtype=torch.bfloat16),
        torch.full((20_000, 2), float(total), dtype=torch.float64),
    ]

    def check(result, container) -> None:
        assert type(result) is container, type(result)
        for one, other in zip(result, wanted, strict=True):
            same(one, share(other, rank, size))

    check(hvd.grouped_reducescatter(group(), op=hvd.Sum), list)
    check(hvd.grouped_reducescatter(tuple(group()), op=hvd.Sum, name="named"), list)
    check(hvd.synchronize(hvd.grouped_reducescatter_async(group(), op=hvd.Sum)), tuple)


def test_grouped(cluster):
    cluster.run(grouped)


def refused() -> None:
    one = torch.ones(4)
    for call in (
        hvd.reducescatter,
        hvd.reducescatter_async,
        lambda t, **options: hvd.grouped_reducescatter([one, t], **options),
        lambda t, **options: hvd.grouped_reducescatter_async([one, t], **options),
    ):
        with pytest.raises(ValueError, match="0-dim"):
            call(torch.tensor(1.0))
        for op in (None, "Sum", 1.0):
            with pytest.raises(TypeError, match="op must be"):
                call(one, op=op)
        for op, text in ((hvd.Adasum, "Adasum"), (99, "99")):
            with pytest.raises(hvd.HorovodInternalError, match=text):
                call(one, op=op)
        with pytest.raises(ValueError, match="bool"):
            call(torch.tensor([True]))
        with pytest.raises(ValueError, match="complex"):
            call(torch.tensor([1j]), op=hvd.Min)
        with pytest.raises(TypeError, match=r"torch\.Tensor"):
            call([1.0])
        with pytest.raises(ValueError, match="to_dense"):
            call(torch.eye(2).to_sparse())
        with pytest.raises(TypeError, match="not registered"):
            call(one, process_set=hvd.ProcessSet([0]))
    for call in (hvd.grouped_reducescatter, hvd.grouped_reducescatter_async):
        with pytest.raises(ValueError, match="empty"):
            call([])
        with pytest.raises(TypeError, match="list of tensors"):
            call(one)
    same(hvd.reducescatter(one), share(one, hvd.rank(), hvd.size()))


def test_what_a_rank_can_see_is_refused_at_the_call(cluster):
    cluster.run(refused)


def disagree() -> list[str]:
    odd = hvd.rank() == 0
    texts = []
    for call in (
        lambda: hvd.reducescatter(torch.ones(3 + odd), name="odd"),
        lambda: hvd.reducescatter(torch.ones(3), op=(hvd.Sum, hvd.Average)[odd], name="odd"),
        lambda: hvd.reducescatter(torch.ones(3), prescale_factor=1.0 + odd, name="odd"),
        lambda: hvd.reducescatter(torch.ones(3), postscale_factor=1.0 + odd, name="odd"),
        lambda: hvd.reducescatter(
            torch.ones(3, dtype=(torch.int32, torch.int64)[odd]), op=hvd.Sum, name="odd"
        ),
        lambda: hvd.grouped_reducescatter([torch.ones(3), torch.ones(2 + odd)], name="odd"),
    ):
        with pytest.raises(hvd.HorovodInternalError, match=r"reducescatter\.odd") as caught:
            call()
        texts.append(str(caught.value))
        same(hvd.reducescatter(torch.ones(hvd.size()), name="odd"), torch.ones(1))
    return texts


@pytest.mark.np(2, 3)
def test_disagreement_is_the_same_error_on_all_ranks(cluster):
    results = cluster.run(disagree)
    assert all(texts == results[0] for texts in results), results


def gradients() -> None:
    rank, size = hvd.rank(), hvd.size()
    rows = 2 * size + 1  # uneven shares

    def owners() -> torch.Tensor:
        """rank + 1 of the rank that gets each row."""
        each = [torch.full_like(share(torch.ones(rows), r, size), r + 1.0) for r in range(size)]
        return torch.cat(each).double()

    for op, factor in (
        (hvd.Average, 1.0),
        (hvd.Sum, float(size)),
        (hvd.Min, 1.0),
        (hvd.Max, 1.0),
        (hvd.Product, 1.0),
    ):
        x = torch.ones(rows, dtype=torch.float64, requires_grad=True)
        y = hvd.reducescatter(x, op=op)
        incoming = []
        y.register_hook(incoming.append)
        ((rank + 1) * y).sum().backward()
        same(x.grad, owners() * factor)
        same(incoming[0], torch.full_like(y, rank + 1.0))  # not written into
        x = torch.ones(rows, 2, dtype=torch.float64, requires_grad=True)
        scaled = hvd.reducescatter(x, op=op, prescale_factor=0.5, postscale_factor=8.0)
        ((rank + 1) * scaled).sum().backward()
        same(x.grad, (owners() * factor * 4).reshape(-1, 1).repeat(1, 2))
    xs = [
        torch.ones(rows, dtype=torch.float64, requires_grad=True),
        torch.ones(rows, dtype=torch.int64),
        torch.ones(1, dtype=torch.float64, requires_grad=True),
    ]
    ys = hvd.grouped_reducescatter(xs, op=hvd.Sum)
    assert [y.requires_grad for y in ys] == [True, False, True]
    ((rank + 1) * (ys[0].sum() + 10 * ys[2].sum())).backward()
    same(xs[0].grad, owners() * size)
    same(xs[2].grad, torch.tensor([10.0 * size], dtype=torch.float64))
    with torch.no_grad():
        assert not hvd.reducescatter(xs[0]).requires_grad
    assert not hvd.synchronize(hvd.reducescatter_async(xs[0])).requires_grad


def test_gradients_have_the_documented_factors(cluster):
    cluster.run(gradients)


def large_rounds(rounds: int) -> None:
    """Random data of 8 MiB; one rank, another in each round, comes late and reads slowly."""
    rank, size = hvd.rank(), hvd.size()
    numel = 1 << 20
    generator = torch.Generator().manual_seed(1234)
    # Every rank knows all contributions: windows at random offsets of one long random sequence.
    pool = torch.randn(numel * 2, dtype=torch.float64, generator=generator)
    for turn in range(rounds):
        starts = torch.randint(0, numel, (size,), generator=generator).tolist()
        given = [pool[start : start + numel] for start in starts]
        if turn % size == rank:
            time.sleep(0.002)
        result = hvd.reducescatter(given[rank], op=hvd.Sum, name="large")
        total = share(given[0], rank, size).clone()
        for other in given[1:]:
            total += share(other, rank, size)
        assert torch.equal(result, total), f"round {turn}"


@pytest.mark.np(2, 3)
@pytest.mark.slow
def test_large_ones_are_right_every_time(cluster):
    cluster.run(large_rounds, 200, timeout=180.0)
