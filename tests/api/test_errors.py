"""What is refused, where it is raised, and that the job goes on afterwards."""

import re

import numpy
import pytest
import torch
from support.checks import same

import hvdtorch as hvd


def still_in_step() -> None:
    same(hvd.allreduce(torch.ones(2), op=hvd.Sum), torch.full((2,), float(hvd.size())))


def not_tensors() -> None:
    for value in ([1.0, 2.0], 3.0, numpy.ones(2), None, "text"):
        for call in (
            hvd.allreduce,
            hvd.allreduce_,
            hvd.allreduce_async,
            hvd.allgather,
            lambda v: hvd.broadcast(v, 0),
            lambda v: hvd.allreduce(v, compression=hvd.Compression.fp16),
            lambda v: hvd.grouped_allreduce([torch.ones(1), v]),
        ):
            with pytest.raises(TypeError, match=r"torch\.Tensor.*torch\.as_tensor"):
                call(value)
    with pytest.raises(TypeError, match="list of tensors"):
        hvd.grouped_allreduce(torch.ones(2))
    sparse = torch.eye(2).to_sparse()
    for call in (hvd.allreduce, hvd.allreduce_async_, hvd.allgather):
        with pytest.raises(ValueError, match="to_dense"):
            call(sparse)
        with pytest.raises(ValueError, match="meta"):
            call(torch.empty(2, device="meta"))
    still_in_step()


def test_what_is_no_dense_tensor(cluster):
    cluster.run(not_tensors)


def bad_arguments() -> None:
    one, size = torch.ones(1), hvd.size()
    with pytest.raises(ValueError, match="average"):
        hvd.allreduce(one, average=True, op=hvd.Sum)
    with pytest.raises(ValueError, match="average"):
        hvd.grouped_allreduce_async([one], average=False, op=hvd.Sum)
    with pytest.raises(TypeError, match="op"):
        hvd.allreduce(one, op="Sum")
    with pytest.raises(hvd.HorovodInternalError, match="op=99"):
        hvd.allreduce(one, op=99)
    for name in (3, b"bytes", ["x"]):
        with pytest.raises(TypeError, match="name must be a str"):
            hvd.allreduce(one, name=name)
    for root in (-1, size, 10**6):
        with pytest.raises(ValueError, match=rf"root_rank {root} "):
            hvd.broadcast(one, root)
        with pytest.raises(ValueError, match=rf"root_rank {root} "):
            hvd.broadcast_object(1, root)
    for root in (None, "0", 0.0):
        with pytest.raises(TypeError):
            hvd.broadcast_async_(one, root)
    for call in (
        hvd.grouped_allreduce,
        hvd.grouped_allreduce_,
        hvd.grouped_allreduce_async,
        hvd.grouped_allgather,
    ):
        with pytest.raises(ValueError, match="empty"):
            call([])
    for call in (hvd.allgather, hvd.allgather_async, lambda t: hvd.grouped_allgather([one, t])):
        with pytest.raises(ValueError, match="0-dim"):
            call(torch.tensor(1.0))
    still_in_step()


def test_bad_arguments(cluster):
    cluster.run(bad_arguments)


def bad_process_sets() -> None:
    one = torch.ones(1)
    for wrong in (None, 0, [0]):
        for call in (
            lambda s: hvd.allreduce(one, process_set=s),
            lambda s: hvd.broadcast(one, 0, process_set=s),
            lambda s: hvd.barrier(process_set=s),
        ):
            with pytest.raises(TypeError, match="ProcessSet"):
                call(wrong)
    with pytest.raises(TypeError, match="not registered"):
        hvd.allreduce(one, process_set=hvd.ProcessSet([0]))
    everyone = hvd.global_process_set
    assert everyone.process_set_id == 0
    assert everyone.ranks == list(range(hvd.size()))
    assert (everyone.size(), everyone.rank()) == (hvd.size(), hvd.rank())
    assert everyone.included()
    same(hvd.allreduce(one, process_set=everyone), one)
    still_in_step()


def test_process_sets(cluster):
    cluster.run(bad_process_sets)


def duplicates() -> None:
    """The last rank holds its part back, so that the others' operation stays in flight."""
    rank, size = hvd.rank(), hvd.size()
    if rank < size - 1:
        handle = hvd.allreduce_async(torch.ones(1), name="twice")
        with pytest.raises(ValueError, match=r"allreduce\.twice"):
            hvd.allreduce_async(torch.ones(1), name="twice")
        with pytest.raises(ValueError, match=r"allreduce\.twice"):
            hvd.allreduce(torch.ones(1), name="twice")
        group = hvd.grouped_allreduce_async([torch.ones(1)] * 2, name="group")
        with pytest.raises(ValueError, match="group"):
            hvd.grouped_allreduce_async([torch.ones(1)] * 2, name="group")
        hvd.barrier()
    else:
        hvd.barrier()
        handle = hvd.allreduce_async(torch.ones(1), name="twice")
        group = hvd.grouped_allreduce_async([torch.ones(1)] * 2, name="group")
    same(hvd.synchronize(handle), torch.ones(1))
    hvd.synchronize(group)
    same(hvd.allreduce(torch.ones(1), name="twice"), torch.ones(1))


@pytest.mark.np(2, 3, 4)
def test_a_name_in_flight_cannot_be_submitted_again(cluster):
    cluster.run(duplicates)


# Each makes the ranks disagree in one respect: rank 0 against all others.
DISAGREEMENTS = {
    "dtype": (
        lambda odd: hvd.allreduce(
            torch.ones(2, dtype=(torch.float32, torch.float64)[odd]), name="n"
        ),
        ("float32", "float64"),
    ),
    "shape": (
        lambda odd: hvd.allreduce(torch.ones(((2, 3), (3, 2))[odd]), name="n"),
        ("[2, 3]", "[3, 2]"),
    ),
    "numel": (
        lambda odd: hvd.allreduce_(torch.ones((5, 70_000)[odd]), name="n"),
        ("[5]", "[70000]"),
    ),
    "op": (
        lambda odd: hvd.allreduce(torch.ones(2), op=(hvd.Sum, hvd.Average)[odd], name="n"),
        ("Sum", "Average"),
    ),
    "prescale": (
        lambda odd: hvd.allreduce(torch.ones(2), prescale_factor=(1.0, 0.5)[odd], name="n"),
        ("prescale", "0.5"),
    ),
    "postscale": (
        lambda odd: hvd.allreduce(torch.ones(2), postscale_factor=(1.0, 0.25)[odd], name="n"),
        ("postscale", "0.25"),
    ),
    "async": (
        lambda odd: hvd.synchronize(hvd.allreduce_async(torch.ones((1, 2)[odd]), name="n")),
        ("[1]", "[2]"),
    ),
    "unnamed": (lambda odd: hvd.allreduce(torch.ones((1, 2)[odd])), ("[1]", "[2]")),
    "root": (lambda odd: hvd.broadcast(torch.ones(2), odd, name="n"), ("root", "0", "1")),
    "broadcast shape": (
        lambda odd: hvd.broadcast(torch.ones((2, 3)[odd]), 0, name="n"),
        ("[2]", "[3]"),
    ),
    "broadcast dtype": (
        lambda odd: hvd.broadcast_(
            torch.ones(2, dtype=(torch.int8, torch.uint8)[odd]), 0, name="n"
        ),
        ("int8", "uint8"),
    ),
    "trailing dims": (
        lambda odd: hvd.allgather(torch.ones(2, (3, 4)[odd]), name="n"),
        ("3", "4"),
    ),
    "number of dims": (
        lambda odd: hvd.allgather(torch.ones(((2, 3), (2, 3, 1))[odd]), name="n"),
        ("3]", "3, 1]"),
    ),
    "member of a group": (
        lambda odd: hvd.grouped_allreduce([torch.ones(1), torch.ones((2, 3)[odd])], name="n"),
        ("[2]", "[3]"),
    ),
}


def disagree(case: str) -> str:
    call, _ = DISAGREEMENTS[case]
    with pytest.raises(hvd.HorovodInternalError) as caught:
        call(int(hvd.rank() > 0))
    still_in_step()
    return str(caught.value)


def agree_again(case: str) -> None:
    call, _ = DISAGREEMENTS[case]
    call(0)  # the same name is free and works


@pytest.mark.np(2, 3)
@pytest.mark.parametrize("case", DISAGREEMENTS)
def test_disagreement_is_the_same_error_on_all_ranks(cluster, case):
    texts = cluster.run(disagree, case)
    assert len(set(texts)) == 1, texts
    for word in DISAGREEMENTS[case][1]:
        assert word in texts[0], texts[0]
    for rank in range(cluster.size):
        assert re.search(rf"\b{rank}\b", texts[0]), texts[0]
    assert re.search(r"test_errors\.py:\d+", texts[0]), texts[0]
    cluster.run(agree_again, case)


def one_bad_among_good() -> None:
    """A disagreement about one operation leaves those around it alone."""
    rank, size = hvd.rank(), hvd.size()
    good = [hvd.allreduce_async(torch.ones(10), name=f"good.{i}", op=hvd.Sum) for i in range(10)]
    bad = hvd.allreduce_async(torch.ones(1 + rank), name="bad")
    more = [hvd.allreduce_async(torch.ones(10), name=f"more.{i}", op=hvd.Sum) for i in range(10)]
    for handle in good + more:
        same(hvd.synchronize(handle), torch.full((10,), float(size)))
    with pytest.raises(hvd.HorovodInternalError, match=r"allreduce\.bad"):
        hvd.synchronize(bad)
    assert hvd.synchronize(bad) is None  # gone
    with pytest.raises(ValueError):
        hvd.poll(bad)


@pytest.mark.np(2, 3)
def test_a_failed_operation_leaves_its_neighbours_alone(cluster):
    cluster.run(one_bad_among_good)


def in_place_failure() -> None:
    tensor = torch.full((1 + hvd.rank(),), 7.0)
    with pytest.raises(hvd.HorovodInternalError):
        hvd.allreduce_(tensor, name="kept")
    same(tensor, torch.full((1 + hvd.rank(),), 7.0))


@pytest.mark.np(2)
def test_a_failed_in_place_operation_leaves_the_tensor_alone(cluster):
    cluster.run(in_place_failure)
