"""`hvd.init(process_sets=...)`: sets that exist from the beginning."""

import pytest
from support.scripts import run_script

START = """
import os
import torch
import hvdtorch as hvd
rank = int(os.environ["RANK"])

def works():
    assert hvd.allreduce(torch.ones(2), op=hvd.Sum).eq(hvd.size()).all()

"""


def run(np, script, **options):
    result = run_script(np, START + script, **options)
    assert set(result.returncodes) == {0}, result.stdout
    return result


@pytest.mark.parametrize("np", [2, 3])
def test_registered_in_the_order_given(np):
    run(
        np,
        """
first, last = hvd.ProcessSet([0]), hvd.ProcessSet([1])
assert hvd.init(process_sets=[first, last]) is None
assert (first.process_set_id, last.process_set_id) == (1, 2)
assert first.included() == (rank == 0) and last.included() == (rank == 1)
assert first.size() == last.size() == 1
for mine in (first, last):
    if mine.included():
        assert mine.rank() == 0
        assert hvd.allreduce(torch.tensor([rank]), process_set=mine).item() == rank

# Again while initialized: known sets get their ids, others are refused.
again = hvd.ProcessSet([1])
hvd.init(process_sets=[again, first])
hvd.init()
assert again.process_set_id == 2 and first.process_set_id == 1
if again.included():
    assert hvd.allreduce(torch.tensor([rank]), process_set=again).item() == rank
try:
    hvd.init(process_sets=[[0], [hvd.size() - 1, 0]])
except ValueError as error:
    assert hvd.size() > 2 and "initialized already" in str(error), error
assert hvd.remove_process_set(again) and last.process_set_id is None
assert not hvd.remove_process_set(last)
works()
""".replace("[hvd.size() - 1, 0]", "[0, 1]" if np == 3 else "[1]"),
    )


def test_lists_of_ranks_and_the_word_dynamic():
    run(
        3,
        """
hvd.init(process_sets=[[2, 0], range(1)])
try:
    hvd.add_process_set([0, 2])
except ValueError as error:
    assert "registered already" in str(error)
else:
    raise AssertionError("no error")
hvd.shutdown()
hvd.init(process_sets="dynamic")
assert hvd.add_process_set([0, 2]).process_set_id == 1
hvd.shutdown()
hvd.init(list(range(3)), [[1]])
works()
""",
    )


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        ("[[0], [1]] if rank == 0 else [[1], [0]]", ["[[0], [1]]", "[[1], [0]]"]),
        ("[[0], [1]] if rank == 1 else [[0]]", ["[[0]]", "[[0], [1]]"]),
        ("[[0]] if rank == 2 else None", ["[]", "[[0]]"]),
        ("[[0, 1]] if rank else [[0, 2]]", ["[[0, 2]]", "[[0, 1]]"]),
        ("[[0], [0]]", ["[0] is registered already"]),
        ("[[1], [0, 1, 2]]", ["global_process_set"]),
        ("[[1], [0, 3]]", ["the job has the ranks 0-2"]),
        ("[[-1]]", ["the job has the ranks 0-2"]),
        ("[hvd.global_process_set]", ["registered already"]),
        ("[one, one]", ["registered already"]),
    ],
)
def test_what_cannot_be_registered_is_an_error_on_all_ranks_and_init_works_again(sets, words):
    result = run(
        3,
        f"""
one = hvd.ProcessSet([1])
for turn in range(2):
    try:
        hvd.init(process_sets={sets})
    except ValueError as error:
        print("SEEN", error, flush=True)
    else:
        raise AssertionError("no error")
    assert not hvd.is_initialized() and one.process_set_id is None
hvd.init(process_sets=[one])
assert one.process_set_id == 1
works()
""",
    )
    lines = {line for line in result.stdout.splitlines() if line.startswith("SEEN")}
    assert len(lines) == 1 and result.stdout.count("SEEN") == 6, result.stdout
    assert all(word in lines.copy().pop() for word in words), result.stdout


def test_what_is_no_list_of_sets_is_refused_before_ranks_meet():
    run(
        2,
        """
for wrong in ("static", 3, hvd.ProcessSet([0]), [[0.5]], [[]], ["0"], [[0, 0]]):
    try:
        hvd.init(process_sets=wrong)
    except ValueError as error:
        print(error)
    else:
        raise AssertionError(f"no error for {wrong}")
    assert not hvd.is_initialized()
hvd.init()
works()
""",
    )


def test_from_communicators():
    run(
        4,
        """
class Comm:
    def __init__(self, ranks):
        self.ranks = ranks
    def Get_size(self):
        return len(self.ranks)
    def allgather(self, value):
        assert value == rank
        return self.ranks

half = hvd.ProcessSet(Comm([0, 1] if rank < 2 else [2, 3]))
odd = hvd.ProcessSet([1, 3])
world = Comm([0, 1, 2, 3])
hvd.init(world, process_sets=[half, odd])
assert hvd.global_process_set.mpi_comm is world
assert half.ranks == ([0, 1] if rank < 2 else [2, 3]) and half.process_set_id == 1 + rank // 2
assert odd.process_set_id == 3
assert half.rank() == rank % 2
x = torch.tensor([float(rank)])
assert hvd.allreduce(x, process_set=half).item() == (0.5 if rank < 2 else 2.5)
if odd.included():
    assert hvd.allreduce(x, process_set=odd).item() == 2
hvd.barrier()
hvd.shutdown()
assert hvd.global_process_set.mpi_comm is None
hvd.init(world, process_sets=[odd, half])
assert half.process_set_id == 2 + rank // 2
hvd.barrier(process_set=half)
hvd.barrier()
""",
    )


def test_without_numpy():
    """numpy is not among torch's dependencies."""
    run(
        2,
        """
import sys
sys.modules["numpy"] = None
hvd.init(process_sets=[[0]])
works()
""",
    )
