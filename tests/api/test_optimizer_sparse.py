"""DistributedOptimizer: sparse gradients."""

import copy
import random
import warnings
from typing import Any

import pytest
import torch
from support.cluster import Cluster
from support.gradients import Submissions, parameter, push, wrap
from torch import Tensor, nn
from torch.nn.functional import embedding
from torch.utils.checkpoint import checkpoint

import hvdtorch as hvd


def table(rows: int = 3, width: int = 1, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.zeros(rows, width, dtype=dtype))


def look_up(weight: Tensor, *rows: int) -> Tensor:
    """A loss that gives the rows a gradient of ones, sparse and not coalesced."""
    return embedding(torch.tensor(rows, dtype=torch.long), weight, sparse=True).sum()


def dense(gradient: Tensor) -> list[float]:
    return gradient.to_dense().flatten().tolist()


# --- Values ------------------------------------------------------------------------------------


def two_steps(options: dict[str, object]) -> list[object]:
    """Ranks look up [0, 1] and [1, 1]; in the second step rank 1 never touches the table."""
    weight, w = table(), parameter(0.0)
    optimizer = wrap({"table": weight, "w": w}, **options)
    seen: list[object] = []
    for rows in ([(0, 1), (1, 1)], [(0, 1), ()]):
        optimizer.zero_grad()
        loss = w.sum() * (1.0 + hvd.rank())
        if rows[hvd.rank()]:
            loss = loss + look_up(weight, *rows[hvd.rank()])
        loss.backward()
        seen += [weight.grad.is_sparse, dense(weight.grad), w.grad.item()]
        optimizer.step()
    return [*seen, [round(value, 5) for value in weight.flatten().tolist()]]


@pytest.mark.np(2)
@pytest.mark.parametrize(
    "options",
    [{}, {"sparse_as_dense": True}, {"gradient_predivide_factor": 2.0}, {"op": hvd.Sum}],
    ids=str,
)
def test_a_table_that_one_rank_does_not_touch(cluster: Cluster, options: dict[str, object]) -> None:
    factor = 2.0 if options.get("op") == hvd.Sum else 1.0
    first, second = [0.5 * factor, 1.5 * factor, 0.0], [0.5 * factor, 0.5 * factor, 0.0]
    w = 1.5 * factor
    after = [round(-0.1 * (a + b), 5) + 0.0 for a, b in zip(first, second, strict=True)]
    expected = [True, first, w, True, second, w, after]
    assert cluster.run(two_steps, options) == [expected] * 2


def looked_up_by_rank(op: int, as_dense: bool) -> tuple[list[float], bool, bool]:
    """Rank r looks up row r twice and row 0 once; two columns."""
    weight = table(5, 2)
    optimizer = wrap({"table": weight}, op=op, sparse_as_dense=as_dense)
    look_up(weight, hvd.rank(), 0, hvd.rank()).backward()
    gradient = weight.grad
    optimizer.step()
    return dense(gradient), gradient.is_coalesced(), weight.grad is gradient


@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])
@pytest.mark.parametrize("as_dense", [False, True])
def test_entries_of_all_ranks_are_summed(cluster: Cluster, op: int, as_dense: bool) -> None:
    size = cluster.size
    sums = [2.0 + size] + [2.0] * (size - 1) + [0.0] * (5 - size)
    if op == hvd.Average:
        sums = (torch.tensor(sums) / size).tolist()
    expected = [value for value in sums for _ in range(2)]
    for got, coalesced, same in cluster.run(looked_up_by_rank, op, as_dense):
        assert got == expected and same
        assert coalesced or size == 1


def never_touched() -> tuple[object, float, list[str]]:
    weight, w = table(), parameter(0.0)
    optimizer = wrap({"table": weight, "w": w})
    with Submissions() as submissions:
        push(1.0 + hvd.rank(), w)
        optimizer.step()
    return weight.grad, w.grad.item(), [name for name in submissions if "table" in name]


@pytest.mark.np(2)
def test_a_table_that_no_rank_touches_has_no_gradient(cluster: Cluster) -> None:
    assert cluster.run(never_touched) == [(None, 1.5, [])] * 2


def nothing_looked_up() -> tuple[bool, list[float]]:
    weight = table()
    optimizer = wrap({"table": weight})
    look_up(weight).backward()  # no rows, and yet a gradient
    optimizer.step()
    return weight.grad.is_sparse, dense(weight.grad)


@pytest.mark.np(2)
def test_no_rows_on_any_rank(cluster: Cluster) -> None:
    assert cluster.run(nothing_looked_up) == [(True, [0.0] * 3)] * 2


def operations(options: dict[str, object]) -> list[str]:
    weight = table()
    optimizer = wrap({"table": weight}, **options)
    with Submissions() as submissions:
        look_up(weight, hvd.rank()).backward()
        optimizer.step()
    return [name.replace("optimizer1.", "") for name in submissions.gradients()]


@pytest.mark.np(2)
def test_indices_and_values_are_gathered(cluster: Cluster) -> None:
    for name in ("indices", "values"):
        for got in cluster.run(operations, {}):
            assert any(each.startswith("allgather.") and each.endswith(name) for each in got)
            assert len(got) == 2
    for got in cluster.run(operations, {"sparse_as_dense": True}):
        assert len(got) == 1 and got[0].startswith("allreduce.")


def accumulated(op: int, passes: int, clear: str) -> list[list[float]]:
    """`passes` lookups of row r per reduction, reduced twice; what happens in between: `clear`."""
    weight = table()
    optimizer = wrap({"table": weight}, op=op, backward_passes_per_step=passes)
    seen = []
    for turn in range(2):
        for number in range(passes):
            if turn == 0 or hvd.rank() == 0 or number == 0:
                look_up(weight, hvd.rank(), 2).backward()
        optimizer.step()
        seen.append(dense(weight.grad))
        if clear in ("None", "zeros"):
            optimizer.zero_grad(set_to_none=clear == "None")
    return seen


@pytest.mark.np(2)
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize(("op", "factor"), [(hvd.Average, 0.5), (hvd.Sum, 1.0)])
@pytest.mark.parametrize("clear", ["no", "None", "zeros"])
def test_passes_accumulate_locally(
    cluster: Cluster, op: int, factor: float, passes: int, clear: str
) -> None:
    # In the second turn rank 1 looks up once only.
    first = [passes * factor, passes * factor, 2 * passes * factor]
    second = [passes * factor, factor, (passes + 1) * factor]
    if clear == "no":
        second = [a + b for a, b in zip(first, second, strict=True)]
    assert cluster.run(accumulated, op, passes, clear) == [[first, second]] * 2


def sparse_steps(seed: int) -> list[list[float]]:
    """Random lookups, some of none, over a few steps."""
    choose, weight = random.Random(seed), table(6, 2, torch.float64)
    options = choose.choice([{}, {"op": hvd.Sum}, {"sparse_as_dense": True}])
    passes = choose.choice([1, 2])
    optimizer = wrap({"table": weight, "w": (w := parameter(0.0))}, **options)
    optimizer.set_backward_passes_per_step(passes)
    seen = []
    for rows in random_rows(choose, hvd.size(), passes):
        for each in rows:
            mine = each[hvd.rank()]
            loss = w.sum()
            if mine is not None:
                loss = loss + look_up(weight, *mine)
            loss.backward()
        optimizer.step()
        seen.append([] if weight.grad is None else dense(weight.grad))
        if choose.random() < 0.6:
            optimizer.zero_grad()
    return seen


def random_rows(
    choose: random.Random, size: int, passes: int
) -> list[list[list[tuple[int, ...] | None]]]:
    """Step, pass, rank: the rows looked up, None if the table is not touched."""
    agreed = random.Random(choose.random())
    return [
        [
            [
                agreed.choice([None, tuple(agreed.choices(range(6), k=agreed.randrange(4)))])
                for _ in range(size)
            ]
            for _ in range(passes)
        ]
        for _ in range(6)
    ]


def expected_steps(seed: int, size: int) -> list[list[float]]:
    choose = random.Random(seed)
    options = choose.choice([{}, {"op": hvd.Sum}, {"sparse_as_dense": True}])
    passes = choose.choice([1, 2])
    total: Tensor | None = None
    seen = []
    for rows in random_rows(choose, size, passes):
        for mine in (mine for each in rows for mine in each if mine is not None):
            total = torch.zeros(6, 2, dtype=torch.float64) if total is None else total
            for row in mine:
                total[row] += 1.0 if "op" in options else 1.0 / size
        seen.append([] if total is None else total.flatten().tolist())
        if choose.random() < 0.6:
            total = None
    return seen


@pytest.mark.np(2, 4)
def test_random_lookups(cluster: Cluster) -> None:
    for seed in range(20):
        expected = expected_steps(seed, cluster.size)
        for got in cluster.run(sparse_steps, seed):
            assert got == expected, f"seed {seed}"


def half_precision(dtype: torch.dtype) -> tuple[list[float], str]:
    """256 from rank 0, ones from the others: in bfloat16 256 + 1 is 256."""
    weight = table(2, 1, dtype)
    optimizer = wrap({"table": weight}, op=hvd.Sum)
    (look_up(weight, 1) * (256.0 if hvd.rank() == 0 else 1.0)).backward()
    optimizer.step()
    return dense(weight.grad), str(weight.grad.dtype)


@pytest.mark.np(4)
def test_narrow_floats_are_summed_in_float32(cluster: Cluster) -> None:
    assert cluster.run(half_precision, torch.bfloat16) == [([0.0, 260.0], "torch.bfloat16")] * 4
    assert cluster.run(half_precision, torch.float16) == [([0.0, 259.0], "torch.float16")] * 4


def compressed() -> list[float]:
    """Sparse gradients travel as they are: 1 + 2^-20 has no float16."""
    weight, w = table(), parameter(0.0)
    optimizer = wrap({"table": weight, "w": w}, compression=hvd.Compression.fp16)
    ((look_up(weight, 2) + w.sum()) * (1 + 2.0**-20)).backward()
    optimizer.step()
    return [*dense(weight.grad), w.grad.item()]


@pytest.mark.np(2)
def test_compression_is_for_dense_gradients(cluster: Cluster) -> None:
    assert cluster.run(compressed) == [[0.0, 0.0, 1 + 2.0**-20, 1.0]] * 2


def several_sparse_dims() -> list[float]:
    """A gradient of two sparse dims; the other rank has none and learns that there are two."""
    weight = nn.Parameter(torch.zeros(2, 2, 2))
    optimizer = wrap({"weight": weight})
    if hvd.rank() == 1:
        weight.grad = torch.sparse_coo_tensor(
            torch.tensor([[0, 0], [1, 1]]), torch.tensor([[1.0, 2.0], [3.0, 4.0]]), (2, 2, 2)
        )
    optimizer.step()
    return dense(weight.grad)


@pytest.mark.np(2)
def test_several_sparse_dims(cluster: Cluster) -> None:
    assert cluster.run(several_sparse_dims) == [[0, 0, 2.0, 3.0, 0, 0, 0, 0]] * 2


# --- Optimizers for sparse gradients -----------------------------------------------------------


def trained(rows: list[int], wrapped: bool, as_dense: bool) -> list[Tensor]:
    torch.manual_seed(1)
    bag = nn.EmbeddingBag(6, 2, mode="sum", sparse=True).double()
    optimizer = torch.optim.SparseAdam(bag.parameters(), lr=0.1)
    if wrapped:
        optimizer = hvd.DistributedOptimizer(
            optimizer, bag.named_parameters(), op=hvd.Sum, sparse_as_dense=as_dense
        )
    for step in range(3):
        optimizer.zero_grad()
        mine = [row for row in rows if step == 0 or row % 2]
        if mine:
            target = torch.arange(len(mine), dtype=torch.float64)[:, None] * 0.0
            (bag(torch.tensor(mine)[:, None]) - target).square().sum().backward()
        optimizer.step()
    return [bag.weight.detach()]


def trained_on_my_rows(as_dense: bool) -> list[Tensor]:
    rows = [row for row in (0, 1, 1, 3, 5, 4, 4, 2) if row % hvd.size() == hvd.rank()]
    return trained(rows, True, as_dense)


@pytest.mark.parametrize("as_dense", [False, True])
def test_sparse_adam_equals_one_process_on_the_joined_batch(
    cluster: Cluster, as_dense: bool
) -> None:
    expected = trained([0, 1, 1, 3, 5, 4, 4, 2], False, False)
    for got in cluster.run(trained_on_my_rows, as_dense):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)


# --- Dense and sparse at once ------------------------------------------------------------------


def mixed(as_dense: bool, first: str) -> list[object]:
    """One rank's gradient is sparse, the other's dense."""
    weight, w = table(), parameter(0.0)
    optimizer = wrap({f"{first}.table": weight, "w": w}, sparse_as_dense=as_dense)
    sparse_here = (hvd.rank() == 0) == (first == "sparse")
    loss = (look_up(weight, 0, 1) if sparse_here else weight.sum()) + w.sum() * (1.0 + hvd.rank())
    if not as_dense:
        with pytest.raises(hvd.HorovodInternalError) as error:
            loss.backward()
        optimizer.zero_grad()
        push(1.0 + hvd.rank(), w, weight)  # the job goes on
        return [str(error.value), weight.grad.flatten().tolist(), w.grad.item()]
    loss.backward()
    optimizer.step()
    assert weight.grad.is_sparse == sparse_here
    return [dense(weight.grad), w.grad.item()]


@pytest.mark.np(2)
@pytest.mark.parametrize("first", ["sparse", "dense"])
def test_sparse_on_one_rank_and_dense_on_another(cluster: Cluster, first: str) -> None:
    one, other = cluster.run(mixed, False, first)
    assert one == other
    sparse, dense = (0, 1) if first == "sparse" else (1, 0)
    assert f"{first}.table' is sparse on rank {sparse}, and dense on rank {dense}" in one[0]
    assert one[1:] == [[1.5] * 3, 1.5]
    assert cluster.run(mixed, True, first) == [[[1.0, 1.0, 0.5], 1.5]] * 2


def dense_then_sparse(op: int, reverse: bool) -> tuple[list[float], bool]:
    """Within one pass: a reentrant checkpoint makes the table fire twice, once sparse, once not."""
    weight, seed = table(), torch.ones(1, requires_grad=True)

    def lookup(x: Tensor) -> Tensor:
        return x * look_up(weight, 0, 0)

    def product(x: Tensor) -> Tensor:
        return x * weight.sum()

    first, second = (product, lookup) if reverse else (lookup, product)
    optimizer = wrap({"table": weight}, op=op)
    with torch.no_grad():
        weight.fill_(1.0)
    y = checkpoint(first, seed, use_reentrant=True)
    y = checkpoint(second, y, use_reentrant=True)
    y.sum().backward()
    optimizer.step()
    return dense(weight.grad), weight.grad.is_sparse


@pytest.mark.np(2)
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(("op", "factor"), [(hvd.Average, 1.0), (hvd.Sum, 2.0)])
def test_a_table_used_both_ways_has_a_dense_gradient(
    cluster: Cluster, op: int, factor: float, reverse: bool
) -> None:
    # d(2 w0 * (w0 + w1 + w2)) at ones: 2 * 3 + 2 for w0, 2 for the others
    expected = [8.0 * factor, 2.0 * factor, 2.0 * factor]
    assert cluster.run(dense_then_sparse, op, reverse) == [(expected, False)] * 2


def one_entry(options: dict[str, Any]) -> list[float]:
    """One row of one column: autograd gives it values with strides of 0."""
    weight = table(3, 1, torch.float32)
    optimizer = wrap({"table": weight}, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            optimizer.zero_grad()
            look_up(weight, hvd.rank()).backward()
            optimizer.step()
    return dense(weight.detach())


@pytest.mark.np(2)
@pytest.mark.parametrize(
    ("options", "each"),
    [({}, -0.1), ({"sparse_as_dense": True}, -0.1), ({"op": hvd.Adasum}, -0.2)],
    ids=str,
)
def test_single_lookups_of_one_column(
    cluster: Cluster, options: dict[str, Any], each: float
) -> None:
    for got in cluster.run(one_entry, options):
        assert got == pytest.approx([each, each, 0.0])


# --- Errors ------------------------------------------------------------------------------------


def refused(op: int) -> tuple[str, list[float]]:
    weight = table()
    optimizer = wrap({f"op{op}.table": weight}, op=op)
    with pytest.raises(ValueError) as error:
        if hvd.rank() == 0:
            look_up(weight, 0).backward()
        optimizer.step()  # here rank 1 meets rank 0
    text = str(error.value)
    del optimizer, error
    weight.grad = None
    again = wrap({"again": weight}, op=op, sparse_as_dense=True)
    (look_up(weight, 0, 1, 2) * (1.0 + hvd.rank())).backward()
    again.step()
    return text, dense(weight.grad)


@pytest.mark.np(2)
@pytest.mark.parametrize(("op", "result"), [(hvd.Max, 2.0), (hvd.Min, 1.0), (hvd.Product, 2.0)])
def test_sparse_gradients_have_average_and_sum_only(
    cluster: Cluster, op: int, result: float
) -> None:
    (text, gradient), other = cluster.run(refused, op)
    assert (text, gradient) == other and gradient == [result] * 3
    assert f"'op{op}.table' is sparse on rank 0" in text and "sparse_as_dense" in text


def compressed_rows() -> str:
    weight = nn.Parameter(torch.eye(3).to_sparse_csr())
    optimizer = wrap({"csr.table": weight})
    if hvd.rank() == 1:
        weight.grad = torch.eye(3).to_sparse_csr()
    with pytest.raises(ValueError) as error:
        optimizer.step()
    return str(error.value)


@pytest.mark.np(2)
@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_other_sparse_layouts_are_refused(cluster: Cluster) -> None:
    for text in cluster.run(compressed_rows):
        assert "'csr.table' has a sparse layout on rank 1 that cannot be reduced" in text


def different_dims() -> str:
    weight = nn.Parameter(torch.zeros(2, 2))
    optimizer = wrap({"dims.table": weight})
    weight.grad = torch.ones(2, 2).to_sparse(1 + hvd.rank())
    with pytest.raises(hvd.HorovodInternalError) as error:
        optimizer.step()
    return str(error.value)


@pytest.mark.np(2)
def test_ranks_must_agree_on_the_number_of_sparse_dims(cluster: Cluster) -> None:
    for text in cluster.run(different_dims):
        assert "'dims.table'" in text and "1 (rank 0), 2 (rank 1)" in text


def copied_while_wrapped() -> list[float]:
    """A sparse gradient does not keep a model from being copied."""
    model = nn.Embedding(3, 1, sparse=True)
    nn.init.zeros_(model.weight)
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters())
    model(torch.tensor([hvd.rank()])).sum().backward()
    copied, _ = copy.deepcopy((model, optimizer))
    optimizer.step()
    return [*model.weight.flatten().tolist(), *copied.weight.flatten().tolist()]


@pytest.mark.np(2)
def test_copies_with_sparse_gradients(cluster: Cluster) -> None:
    assert cluster.run(copied_while_wrapped) == [[-0.5, -0.5, 0.0, 0.0, 0.0, 0.0]] * 2
