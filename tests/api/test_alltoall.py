"""alltoall: which rows arrive where, what splits may be, and what is refused."""

import numpy
import pytest
import torch
from support.checks import ALL_DTYPES, same, values

import hvdtorch as hvd


def rows_of(rank: int, count: int) -> torch.Tensor:
    """Rows that say where they come from: 100 * rank + row number."""
    return (100 * rank + torch.arange(count, dtype=torch.float32)).reshape(-1, 1).repeat(1, 3)


def even_parts() -> None:
    rank, size = hvd.rank(), hvd.size()
    wanted = torch.cat([rows_of(r, 2 * size)[2 * rank : 2 * rank + 2] for r in range(size)])
    given = rows_of(rank, 2 * size)
    result = hvd.alltoall(given)
    same(result, wanted)
    same(given, rows_of(rank, 2 * size))
    output, received = hvd.synchronize(hvd.alltoall_async(given, name="even"))
    same(output, wanted)
    same(received, torch.full((size,), 2, dtype=torch.int32))
    output, received = hvd.alltoall(given, splits=[])  # even as well, and the pair comes back
    same(output, wanted)
    same(received, torch.full((size,), 2, dtype=torch.int32))
    same(hvd.alltoall(torch.empty(0, 4)), torch.empty(0, 4))
    same(hvd.alltoall(torch.empty(size, 0)), torch.empty(size, 0))


def test_without_splits_dim_0_is_cut_into_equal_parts(cluster):
    cluster.run(even_parts)


def uneven_splits(of_rank: int) -> list[int]:
    """Rows from `of_rank` to each rank: differs between ranks, with zeros."""
    return [(of_rank + 2 * to) % 3 for to in range(hvd.size())]


def uneven_parts() -> None:
    rank, size = hvd.rank(), hvd.size()

    def sent(source: int) -> torch.Tensor:
        start = sum(uneven_splits(source)[:rank])
        return rows_of(source, 20)[start : start + uneven_splits(source)[rank]]

    wanted = torch.cat([sent(source) for source in range(size)])
    counts = torch.tensor([uneven_splits(source)[rank] for source in range(size)])
    splits = uneven_splits(rank)
    given = rows_of(rank, sum(splits) + rank)  # the last rows are not sent
    for form in (
        splits,
        tuple(splits),
        numpy.array(splits),
        numpy.array(splits, dtype=numpy.int32),
        torch.tensor(splits, dtype=torch.int32),
        torch.tensor(splits, dtype=torch.int64),
        torch.tensor([splits, splits], dtype=torch.int32).t()[:, 0],
    ):
        output, received = hvd.alltoall(given, splits=form)
        same(output, wanted)
        same(received, counts.to(torch.int32))
        assert received.device.type == "cpu"
        output, received = hvd.synchronize(hvd.alltoall_async(given, form, name="uneven"))
        same(output, wanted)
        same(received, counts.to(torch.int32))


def test_splits_of_every_form(cluster):
    cluster.run(uneven_parts)


def every_dtype() -> None:
    rank, size = hvd.rank(), hvd.size()
    for dtype in ALL_DTYPES:
        given = values([[rank, to % 2] for to in range(size)], dtype)
        same(hvd.alltoall(given), values([[r, rank % 2] for r in range(size)], dtype))


def test_every_dtype(cluster):
    cluster.run(every_dtype)


def all_to_one() -> None:
    rank, size = hvd.rank(), hvd.size()
    target = size - 1
    splits = [rank + 1 if to == target else 0 for to in range(size)]
    output, received = hvd.alltoall(rows_of(rank, rank + 1), splits)
    if rank == target:
        same(output, torch.cat([rows_of(r, r + 1) for r in range(size)]))
        same(received, torch.arange(1, size + 1, dtype=torch.int32))
    else:
        same(output, torch.empty(0, 3))
        same(received, torch.zeros(size, dtype=torch.int32))


def test_rows_for_one_rank_only(cluster):
    cluster.run(all_to_one)


def refused() -> None:
    size = hvd.size()
    rows = torch.ones(4 * size, 2)
    good = [1] * size
    for bad, text in (
        ([1] * (size + 1), "entries"),
        ([5] * size, "add up"),
        ([-1, *good[1:]], "negative"),
        ([2**31, *good[1:]], "above"),
        ([good], "integers"),
        ([1.5, *good[1:]], "integers"),
        (torch.tensor([good]), "integers"),
        (torch.tensor(1), "integers"),
        (torch.ones(size), "integers"),
        (numpy.ones(size), "integers"),
        ("ab", "integers"),
    ):
        for call in (hvd.alltoall, hvd.alltoall_async):
            with pytest.raises(ValueError, match=text):
                call(rows, splits=bad)
    for call in (hvd.alltoall, hvd.alltoall_async):
        with pytest.raises(ValueError, match="0-dim"):
            call(torch.tensor(1.0))
        with pytest.raises(ValueError, match="0-dim"):
            call(torch.tensor(1.0), good)
        if size > 1:
            with pytest.raises(ValueError, match=f"{size + 1} rows"):
                call(torch.ones(size + 1))
        with pytest.raises(TypeError, match=r"torch\.Tensor"):
            call([1.0] * size)
        with pytest.raises(ValueError, match="to_dense"):
            call(torch.eye(size).to_sparse())
        with pytest.raises(TypeError, match="not registered"):
            call(rows, process_set=hvd.ProcessSet([0]))
    same(hvd.alltoall(rows), rows)


def test_what_a_rank_can_see_is_refused_at_the_call(cluster):
    cluster.run(refused)


def disagree() -> list[str]:
    rank, size = hvd.rank(), hvd.size()
    texts = []
    for given in (
        torch.ones(size, 2 + (rank == 0)),
        torch.ones(size, 2, dtype=(torch.float32, torch.float64)[rank == 0]),
        torch.ones((size, 2) if rank == 0 else (size, 2, 1)),
    ):
        with pytest.raises(hvd.HorovodInternalError, match=r"alltoall\.odd") as caught:
            hvd.alltoall(given, name="odd")
        texts.append(str(caught.value))
        same(hvd.alltoall(torch.ones(size), name="odd"), torch.ones(size))
    return texts


@pytest.mark.np(2, 3)
def test_disagreement_is_the_same_error_on_all_ranks(cluster):
    results = cluster.run(disagree)
    assert all(texts == results[0] for texts in results), results


def gradients() -> None:
    rank, size = hvd.rank(), hvd.size()
    splits = uneven_splits(rank)
    x = rows_of(rank, sum(splits) + 2).double().requires_grad_()
    output, received = hvd.alltoall(x, splits)
    assert output.requires_grad and not received.requires_grad
    ((rank + 1) * output).sum().backward()
    factors = [to + 1.0 for to, count in enumerate(splits) for _ in range(count)] + [0.0, 0.0]
    same(x.grad, torch.tensor(factors, dtype=torch.float64).reshape(-1, 1).repeat(1, 3))

    x = torch.full((size,), 2.0, dtype=torch.float64, requires_grad=True)
    y = hvd.alltoall(x)
    (first,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
    same(first.detach(), torch.full((size,), 12.0, dtype=torch.float64))
    (second,) = torch.autograd.grad(first.sum(), x)
    same(second, torch.full((size,), 12.0, dtype=torch.float64))
    with torch.no_grad():
        assert not hvd.alltoall(x).requires_grad
    assert not hvd.synchronize(hvd.alltoall_async(x))[0].requires_grad


def test_gradients_go_back_where_the_rows_came_from(cluster):
    cluster.run(gradients)
