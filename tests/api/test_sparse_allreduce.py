"""sparse_allreduce_async: entries of all ranks, averaged or summed."""

import pytest
import torch
from support.checks import same

import hvdtorch as hvd


def embedding_gradient(rows: list[int], width: int = 2, dtype=torch.float32) -> torch.Tensor:
    """What an embedding of 3 rows gets: ones for every row looked up, not coalesced."""
    return torch.sparse_coo_tensor(
        torch.tensor([rows], dtype=torch.int64),
        torch.ones(len(rows), width, dtype=dtype),
        (3, width),
        check_invariants=True,
    )


def looked_up() -> None:
    given = embedding_gradient([[0, 1], [1, 1]][hvd.rank()])
    wait = hvd.sparse_allreduce_async(given, name="table", op=hvd.Average)
    result = wait()
    assert result.is_sparse and not result.is_coalesced() and result._nnz() == 4
    same(result.to_dense(), torch.tensor([[0.5, 0.5], [1.5, 1.5], [0.0, 0.0]]))
    summed = hvd.sparse_allreduce_async(given, "table", hvd.Sum)()
    same(summed.to_dense(), torch.tensor([[1.0, 1.0], [3.0, 3.0], [0.0, 0.0]]))
    none = embedding_gradient([[0, 1], []][hvd.rank()])
    result = hvd.sparse_allreduce_async(none, "table", hvd.Average)()
    same(result.to_dense(), torch.tensor([[0.5, 0.5], [0.5, 0.5], [0.0, 0.0]]))


@pytest.mark.np(2)
def test_an_embedding_of_which_ranks_use_other_rows(cluster):
    cluster.run(looked_up)


def any_number_of_entries() -> None:
    rank, size = hvd.rank(), hvd.size()
    dense = torch.zeros(4, 5, 2, dtype=torch.float64)
    for r in range(size):
        for entry in range(r):
            dense[entry, r] += r + 1
    mine = torch.zeros(4, 5, 2, dtype=torch.float64)
    mine[:rank, rank] = rank + 1.0
    for sparse_dims in (1, 2, 3):
        given = mine.to_sparse(sparse_dims).requires_grad_()
        result = hvd.sparse_allreduce_async(given, "entries", hvd.Sum)()
        assert result.sparse_dim() == sparse_dims and not result.requires_grad
        same(result.to_dense(), dense)
    nothing = torch.zeros(4, 5).to_sparse()
    result = hvd.sparse_allreduce_async(nothing, "entries", hvd.Sum)()
    assert result._nnz() == 0 and result.shape == (4, 5)


def test_ranks_have_any_number_of_entries(cluster):
    cluster.run(any_number_of_entries)


def integers_and_ops() -> None:
    size = hvd.size()
    given = embedding_gradient([1], dtype=torch.int64)
    average = hvd.sparse_allreduce_async(given, "whole", hvd.Average)()
    entries = torch.full((size, 2), 1.0) / size
    same(average._values(), entries)
    for op in (hvd.Sum, hvd.Max, hvd.Product, hvd.Adasum):
        result = hvd.sparse_allreduce_async(given, "whole", op)()
        same(result.to_dense(), torch.tensor([[0, 0], [size, size], [0, 0]]))


def test_integers_average_to_floats_and_other_ops_sum(cluster):
    cluster.run(integers_and_ops)


def several_at_once() -> None:
    rank, size = hvd.rank(), hvd.size()
    names = [f"table{i}" for i in range(10)]
    waits = {}
    for name in names if rank % 2 == 0 else reversed(names):
        rows = [int(name[5:]) % 3] * (rank + 1)
        waits[name] = hvd.sparse_allreduce_async(embedding_gradient(rows), name, hvd.Sum)
    for name in reversed(names):
        wanted = torch.zeros(3, 2)
        wanted[int(name[5:]) % 3] = size * (size + 1) / 2
        same(waits[name]().to_dense(), wanted)


def test_several_in_flight_in_any_order(cluster):
    cluster.run(several_at_once)


def refused() -> None:
    given = embedding_gradient([0])
    with pytest.raises(NotImplementedError, match="dense"):
        hvd.sparse_allreduce_async(torch.ones(3), "x", hvd.Sum)
    with pytest.raises(NotImplementedError, match="to_sparse"):
        hvd.sparse_allreduce_async(torch.eye(3).to_sparse_csr(), "x", hvd.Sum)
    for wrong in ([1.0], None):
        with pytest.raises(TypeError, match=r"torch\.Tensor"):
            hvd.sparse_allreduce_async(wrong, "x", hvd.Sum)
    for name in (None, "", 3):
        with pytest.raises(TypeError, match="name"):
            hvd.sparse_allreduce_async(given, name, hvd.Sum)
    with pytest.raises(TypeError, match="op"):
        hvd.sparse_allreduce_async(given, "x", "Sum")
    with pytest.raises(TypeError, match="op"):
        hvd.sparse_allreduce_async(given, "x", None)
    with pytest.raises(TypeError, match="not registered"):
        hvd.sparse_allreduce_async(given, "x", hvd.Sum, process_set=hvd.ProcessSet([0]))
    hvd.sparse_allreduce_async(given, "x", hvd.Sum)()


def test_what_a_rank_can_see_is_refused_at_the_call(cluster):
    cluster.run(refused)


def sized(*shape: int, dtype=torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype).to_sparse(1)


def disagree() -> list[str]:
    odd = int(hvd.rank() == 0)
    texts = []
    for given, op in (
        (sized(3 + odd, 2), hvd.Sum),
        (sized(3, 2 + odd), hvd.Sum),
        (sized(3, 2, dtype=(torch.float32, torch.float64)[odd]), hvd.Sum),
        (sized(3, 2), (hvd.Sum, hvd.Average)[odd]),
        (torch.zeros(3, 2).to_sparse(1 + odd), hvd.Sum),
    ):
        with pytest.raises(hvd.HorovodInternalError, match="disagree") as caught:
            hvd.sparse_allreduce_async(given, "odd", op)()
        texts.append(str(caught.value))
        hvd.sparse_allreduce_async(sized(3, 2), "odd", hvd.Sum)()  # the name is free again
    return texts


@pytest.mark.np(2, 3)
def test_disagreement_is_the_same_error_on_all_ranks(cluster):
    results = cluster.run(disagree)
    assert all(texts == results[0] for texts in results), results
    assert "rank 0: Average" in results[0][3] and ": Sum" in results[0][3]


def without_the_lowest_rank(divide_by_active: bool) -> None:
    rank, size = hvd.rank(), hvd.size()
    if rank > 0:
        given = torch.sparse_coo_tensor([[rank % 2]], [12.0], (2,))
        divisor = size - 1 if divide_by_active else size
        odd = len(range(1, size, 2))
        for op, value in ((hvd.Sum, 12.0), (hvd.Average, 12.0 / divisor)):
            result = hvd.sparse_allreduce_async(given, "table", op)()
            assert result._nnz() == size - 1
            same(result.to_dense(), torch.tensor([value * (size - 1 - odd), value * odd]))
    hvd.join()


@pytest.mark.np(2, 3, 4)
def test_without_a_rank_that_has_joined(cluster):
    cluster.run(without_the_lowest_rank, False)


def test_the_divisor_of_the_ranks_that_are_left(all_clusters):
    cluster = all_clusters.get(3, {"HVDTORCH_JOIN_DIVISOR": "active"})
    cluster.run(without_the_lowest_rank, True)
