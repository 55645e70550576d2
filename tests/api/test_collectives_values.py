"""What allreduce, allgather and broadcast compute, exactly, for every dtype and op."""

import math

import pytest
import torch
from support.checks import ALL_DTYPES, COMPLEX, FLOAT8, FLOATS, INTEGERS, same, values

import hvdtorch as hvd

NUMBERS = (*INTEGERS, *FLOATS, *FLOAT8)


def contribution(rank: int, size: int, op: int) -> list[int]:
    """Small integers, exact in every dtype, as are their sums, averages and products."""
    unit = 1 if op == hvd.Product else size
    return [unit * (1 + rank % 2), 2, unit * (rank % 2), 1]


def expected(size: int, op: int) -> list[float]:
    columns = zip(*(contribution(rank, size, op) for rank in range(size)), strict=True)
    reductions = {
        hvd.Sum: sum,
        hvd.Average: lambda numbers: sum(numbers) / size,
        hvd.Min: min,
        hvd.Max: max,
        hvd.Product: math.prod,
    }
    return [reductions[op](column) for column in columns]


def reduce_every_number_dtype(op: int) -> None:
    size = hvd.size()
    for dtype in NUMBERS:
        given = values(contribution(hvd.rank(), size, op), dtype)
        wanted = values(expected(size, op), dtype)
        tensor = given.clone()
        same(hvd.allreduce(tensor, op=op), wanted)
        same(hvd.synchronize(hvd.allreduce_async(tensor, op=op)), wanted)
        same(tensor, given)  # the input is left alone
        assert hvd.allreduce_(tensor, op=op) is tensor
        same(tensor, wanted)
        tensor = given.clone()
        assert hvd.synchronize(hvd.allreduce_async_(tensor, op=op)) is tensor
        same(tensor, wanted)


@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum, hvd.Min, hvd.Max, hvd.Product])
def test_allreduce_of_every_number_dtype(cluster, op):
    cluster.run(reduce_every_number_dtype, op)


def integers_wrap() -> None:
    size = hvd.size()
    for dtype in INTEGERS:
        top = torch.iinfo(dtype).max
        tensor = torch.tensor([top, 1], dtype=dtype)
        bits = torch.iinfo(dtype).bits
        wanted = (top * size) % 2**bits
        if wanted > top:
            wanted -= 2**bits
        same(hvd.allreduce(tensor, op=hvd.Sum), torch.tensor([wanted, size], dtype=dtype))


def test_integer_sums_wrap_as_the_dtype_does(cluster):
    cluster.run(integers_wrap)


def complex_numbers() -> None:
    rank, size = hvd.rank(), hvd.size()
    for dtype in COMPLEX:
        tensor = torch.tensor([complex(rank + 1, -rank), 2j], dtype=dtype)
        total = complex(size * (size + 1) // 2, -(size * (size - 1) // 2))
        same(
            hvd.allreduce(tensor, op=hvd.Sum),
            torch.tensor([total, complex(0, 2 * size)], dtype=dtype),
        )
        even = torch.tensor([complex(size * rank, -size)], dtype=dtype)
        average = complex(sum(range(size)), -size)
        same(hvd.allreduce(even, op=hvd.Average), torch.tensor([average], dtype=dtype))
        turned = hvd.allreduce(torch.tensor([1j], dtype=dtype), op=hvd.Product)
        assert torch.equal(turned, torch.tensor([1j**size], dtype=dtype)), turned
        for op in (hvd.Min, hvd.Max):  # complex numbers have no order
            with pytest.raises(ValueError, match=str(dtype).removeprefix("torch.")):
                hvd.allreduce(tensor, op=op)


def test_complex_sums_averages_and_products(cluster):
    cluster.run(complex_numbers)


def logic() -> None:
    rank, size = hvd.rank(), hvd.size()
    tensor = torch.tensor([True, False, rank == 0, rank != 0])
    some_or = torch.tensor([True, False, True, size > 1])
    some_and = torch.tensor([True, False, size == 1, False])
    for op, wanted in (
        (hvd.Sum, some_or),
        (hvd.Max, some_or),
        (hvd.Product, some_and),
        (hvd.Min, some_and),
    ):
        same(hvd.allreduce(tensor, op=op), wanted)
    with pytest.raises((ValueError, hvd.HorovodInternalError), match="bool"):
        hvd.allreduce(tensor, op=hvd.Average)
    same(hvd.allreduce(tensor, op=hvd.Sum), some_or)


def test_bool_reduces_by_logic_and_has_no_average(cluster):
    cluster.run(logic)


def integer_averages() -> None:
    rank = hvd.rank()
    given = torch.tensor([[-1, 1, 2, 3], [-2, 2, 3, 4]][rank], dtype=torch.int32)
    same(hvd.allreduce(given), torch.tensor([-1, 1, 2, 3], dtype=torch.int32))
    big = torch.tensor([2**60 + (3, 1)[rank]])
    same(hvd.allreduce(big), torch.tensor([2**60 + 2]))
    small = torch.tensor([(200, 100)[rank]], dtype=torch.uint8)
    same(hvd.allreduce(small), torch.tensor([150], dtype=torch.uint8))


@pytest.mark.np(2)
def test_integer_average_is_exact_and_truncates_toward_zero(cluster):
    cluster.run(integer_averages)


def sixteen_bit_range() -> None:
    big = torch.tensor([40000.0], dtype=torch.float16)
    same(hvd.allreduce(big), big)
    same(hvd.allreduce(big, op=hvd.Sum), torch.tensor([float("inf")], dtype=torch.float16))
    tiny = torch.tensor([2.0**-24], dtype=torch.float16)
    same(hvd.allreduce(tiny), tiny)


@pytest.mark.np(2)
def test_float16_average_neither_overflows_nor_vanishes(cluster):
    cluster.run(sixteen_bit_range)


def rounded_once(numbers: list[float]) -> None:
    for length in (1, 1000, 300_000):  # travels in the log, in one piece, in several
        tensor = torch.full((length,), numbers[hvd.rank()], dtype=torch.bfloat16)
        same(hvd.allreduce(tensor, op=hvd.Sum), torch.full_like(tensor, 260.0))
        same(hvd.allreduce(tensor, op=hvd.Average), torch.full_like(tensor, 65.0))


@pytest.mark.np(4)
@pytest.mark.parametrize("position", range(4))
def test_bfloat16_sums_are_rounded_once_whatever_the_order(cluster, position):
    numbers = [1.0] * 4
    numbers[position] = 256.0
    cluster.run(rounded_once, numbers)


def scaled_floats() -> None:
    rank, size = hvd.rank(), hvd.size()
    for dtype in FLOATS:
        tensor = torch.tensor([rank + 1.0, -2.0], dtype=dtype)
        for op, low, high in (
            (hvd.Sum, size * (size + 1) / 2, -2 * size),
            (hvd.Min, 1, -2),
            (hvd.Max, size, -2),
        ):
            wanted = torch.tensor([low * 0.5 * 4, high * 0.5 * 4], dtype=dtype)
            same(hvd.allreduce(tensor, op=op, prescale_factor=0.5, postscale_factor=4.0), wanted)
        product = hvd.allreduce(
            tensor[1:], op=hvd.Product, prescale_factor=0.5, postscale_factor=3.0
        )
        same(product, torch.tensor([(-1.0) ** size * 3], dtype=dtype))
    big = torch.tensor([40000.0], dtype=torch.float16)  # scaled in float32
    same(hvd.allreduce(big, prescale_factor=4.0, postscale_factor=0.25), big)


def test_scale_factors_apply_around_every_op(cluster):
    cluster.run(scaled_floats)


def scaled_integers() -> None:
    for dtype in (torch.int8, torch.int16, torch.int32, torch.int64):
        tensor = torch.tensor([1, 2, 3, -3], dtype=dtype)
        before = hvd.allreduce(tensor, op=hvd.Sum, prescale_factor=0.5)
        same(before, torch.tensor([0, 2, 2, -2], dtype=dtype))
        after = hvd.allreduce(tensor, op=hvd.Sum, postscale_factor=0.25)
        same(after, torch.tensor([0, 1, 1, -1], dtype=dtype))


@pytest.mark.np(2)
def test_scaled_integers_truncate_toward_zero_before_and_after(cluster):
    cluster.run(scaled_integers)


def gather_every_dtype() -> None:
    rank, size = hvd.rank(), hvd.size()

    def rows(of_rank: int, dtype: torch.dtype) -> torch.Tensor:
        return values([[of_rank, i % 2] for i in range(of_rank * 2 % 3)], dtype).reshape(-1, 2)

    for dtype in ALL_DTYPES:
        wanted = torch.cat([rows(r, dtype) for r in range(size)])
        same(hvd.allgather(rows(rank, dtype)), wanted)
        same(hvd.synchronize(hvd.allgather_async(rows(rank, dtype))), wanted)


def test_allgather_of_every_dtype_with_uneven_rows(cluster):
    cluster.run(gather_every_dtype)


def grouped_gather() -> None:
    rank, size = hvd.rank(), hvd.size()

    def group(of_rank: int) -> list[torch.Tensor]:
        return [
            torch.full((of_rank, 2, 3), float(of_rank)),
            torch.tensor([of_rank + 1], dtype=torch.int16),
            torch.empty(0, 5, dtype=torch.bool),
        ]

    wanted = [torch.cat(member) for member in zip(*map(group, range(size)), strict=True)]
    for result in (
        hvd.grouped_allgather(group(rank)),
        hvd.synchronize(hvd.grouped_allgather_async(group(rank), name="g")),
    ):
        assert type(result) is tuple
        for one, other in zip(result, wanted, strict=True):
            same(one, other)


def test_grouped_allgather(cluster):
    cluster.run(grouped_gather)


def broadcast_every_dtype(root: int) -> None:
    rank = hvd.rank()
    for dtype in ALL_DTYPES:
        wanted = values([[1, 0, root % 2], [0, 1, 1]], dtype)
        given = wanted if rank == root else torch.zeros_like(wanted)
        kept = given.clone()
        result = hvd.broadcast(given, root)
        same(result, wanted)
        same(given, kept)
        assert result.data_ptr() != given.data_ptr()
        same(hvd.synchronize(hvd.broadcast_async(given, root)), wanted)
        same(given, kept)
        assert hvd.broadcast_(given, root) is given
        same(given, wanted)
        again = kept.clone()
        assert hvd.synchronize(hvd.broadcast_async_(again, root)) is again
        same(again, wanted)


def test_broadcast_of_every_dtype_from_every_root(cluster):
    for root in range(cluster.size):
        cluster.run(broadcast_every_dtype, root)


def special_bits() -> None:
    """NaN payloads, -0.0 and subnormals are moved bit by bit."""
    patterns = torch.tensor([0x7FC00001, 0x7F800001, -(2**31), 1, -1], dtype=torch.int32)
    special = patterns.view(torch.float32)
    given = special.clone() if hvd.rank() == 0 else torch.zeros(5)
    same(hvd.broadcast(given, 0), special)
    same(hvd.allgather(special), special.repeat(hvd.size()))


def test_moving_keeps_every_bit(cluster):
    cluster.run(special_bits)


def grouped_all_forms() -> None:
    rank, size = hvd.rank(), hvd.size()
    total = size * (size - 1) // 2

    def group() -> list[torch.Tensor]:
        return [
            torch.full((2, 3), rank, dtype=torch.float32),
            torch.tensor(rank, dtype=torch.int16),
            torch.empty(0, dtype=torch.float64),
            torch.full((70_000,), rank, dtype=torch.bfloat16),
        ]

    wanted = [torch.full_like(tensor, total) for tensor in group()]

    def check(result, container) -> None:
        assert type(result) is container, type(result)
        for one, other in zip(result, wanted, strict=True):
            same(one, other)

    check(hvd.grouped_allreduce(group(), op=hvd.Sum), list)
    check(hvd.grouped_allreduce(tuple(group()), op=hvd.Sum, name="named"), list)
    check(hvd.synchronize(hvd.grouped_allreduce_async(group(), op=hvd.Sum)), tuple)
    given = group()
    result = hvd.grouped_allreduce_(given, op=hvd.Sum)
    check(result, tuple)
    assert all(one is other for one, other in zip(result, given, strict=True))
    given = group()
    result = hvd.synchronize(hvd.grouped_allreduce_async_(given, op=hvd.Sum))
    check(result, tuple)
    assert all(one is other for one, other in zip(result, given, strict=True))


def test_grouped_allreduce_in_all_forms(cluster):
    cluster.run(grouped_all_forms)


def many_sizes() -> None:
    """Around every boundary: payload in the log, one message, several chunks, odd divisions."""
    rank, size = hvd.rank(), hvd.size()
    for numel in (0, 1, 2, 3, 5, 7, 63, 64, 65, 1023, 1025, 16_383, 65_537, 1_000_003):
        tensor = (torch.arange(numel) % 97 + rank).to(torch.float32)
        wanted = (torch.arange(numel) % 97 * size + size * (size - 1) // 2).to(torch.float32)
        same(hvd.allreduce(tensor, op=hvd.Sum, name="sized"), wanted)


def test_allreduce_of_many_sizes(cluster):
    cluster.run(many_sizes)


def average_argument() -> list[str]:
    import warnings

    ones = torch.ones(2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        same(hvd.allreduce(ones, average=True), ones)
        same(hvd.allreduce(ones, False), ones * hvd.size())
        same(hvd.synchronize(hvd.allreduce_async(ones, average=False)), ones * hvd.size())
        same(hvd.grouped_allreduce_([ones.clone()], average=False)[0], ones * hvd.size())
    assert all(warning.category is DeprecationWarning for warning in caught)
    assert all(warning.filename == __file__ for warning in caught), caught
    return [str(warning.message) for warning in caught]


def test_average_argument_warns_at_the_callers_line(cluster):
    for messages in cluster.run(average_argument):
        assert len(messages) == 4 and all("average" in message for message in messages)


def barrier_and_names() -> None:
    assert hvd.barrier() is None
    for name in ("", None, "with space", 'quote"', "ünïcode ☃", "a" * 1000):
        same(hvd.allreduce(torch.ones(1), name=name, op=hvd.Sum), torch.tensor([float(hvd.size())]))
    same(hvd.broadcast(torch.ones(1), 0, name="x"), torch.ones(1))
    pending = hvd.allreduce_async(torch.ones(1), name="x")  # other kinds may use the name
    other = hvd.broadcast_async(torch.ones(1), 0, name="x")
    same(hvd.synchronize(pending), torch.ones(1))
    same(hvd.synchronize(other), torch.ones(1))


def test_barrier_and_all_sorts_of_names(cluster):
    cluster.run(barrier_and_names)


def use_of_one_name() -> None:
    for step in range(100):
        result = hvd.allreduce(torch.full((4,), float(step)), name="loss")
        same(result, torch.full((4,), float(step)))
    for shape in ((2,), (3, 3), (), (2,)):  # the same name with another shape, on all ranks
        same(hvd.allreduce(torch.ones(shape), name="loss"), torch.ones(shape))
    same(
        hvd.allreduce(torch.ones(2, dtype=torch.int32), name="loss"),
        torch.ones(2, dtype=torch.int32),
    )


def test_a_name_can_be_used_again_and_again(cluster):
    cluster.run(use_of_one_name)
