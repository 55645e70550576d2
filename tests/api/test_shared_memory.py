"""Memory shared by the ranks of a host: `hvd.shared_empty`, and what happens without."""

import os
from pathlib import Path

import pytest
import torch
from support.scripts import run_script

import hvdtorch as hvd

COUNTS = (1, 1000, 40_000, 1_000_003)


def reduce_in_place(dtype):
    results = []
    for count in COUNTS:
        tensor = hvd.shared_empty(count, dtype=dtype)
        tensor.copy_(torch.arange(count) % 50 + hvd.rank())
        same = hvd.allreduce_(tensor, name=f"in place {count}", op=hvd.Sum)
        expected = hvd.size() * (torch.arange(count) % 50) + sum(range(hvd.size()))
        results.append(same is tensor and torch.equal(tensor.to(torch.int64), expected))
    return results


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bfloat16], ids=str)
def test_allreduce_in_place(cluster, dtype):
    # bfloat16 holds these integers exactly.
    assert cluster.run(reduce_in_place, dtype) == [[True] * len(COUNTS)] * cluster.size


def every_collective():
    rank, size = hvd.rank(), hvd.size()
    rows, columns = 12 * size, 3001
    block = hvd.shared_empty((rows + 2, columns))
    tensor = block[1:-1]  # somewhere in the middle
    values = torch.arange(rows * columns, dtype=torch.float32).view(rows, columns) % 1000
    ranks = sum(range(1, size + 1))
    tensor.copy_(values * (rank + 1))
    block[0] = block[-1] = -1
    share = slice(12 * rank, 12 * (rank + 1))
    right = [
        torch.equal(hvd.reducescatter(tensor, op=hvd.Sum), values[share] * ranks),
        torch.equal(hvd.allreduce(tensor, op=hvd.Sum), values * ranks),
        torch.equal(hvd.allgather(tensor)[rows * rank : rows * (rank + 1)], tensor),
        torch.equal(hvd.broadcast(tensor, size - 1), values * size),
        torch.equal(
            hvd.alltoall(tensor), torch.cat([values[share] * (r + 1) for r in range(size)])
        ),
        torch.equal(tensor, values * (rank + 1)),  # read only, so far
    ]
    transposed = tensor.t()
    hvd.allreduce_(transposed, op=hvd.Sum)
    right.append(torch.equal(tensor, values * ranks))
    right.append(bool((block[0] == -1).all() and (block[-1] == -1).all()))
    return right


def test_every_collective(cluster):
    assert cluster.run(every_collective) == [[True] * 8] * cluster.size


def mixed_with_ordinary_memory():
    """Some ranks' tensors in shared memory, others' not; and different ones next."""
    right = []
    for step in range(4):
        make = torch.empty if (hvd.rank() + step) % 2 else hvd.shared_empty
        tensor = make(300_000)
        tensor.fill_(hvd.rank() + step)
        hvd.allreduce_(tensor, name="mixed", op=hvd.Sum)
        expected = sum(range(hvd.size())) + step * hvd.size()
        right.append(bool((tensor == expected).all()))
    return right


def test_mixed_with_ordinary_memory(cluster):
    assert cluster.run(mixed_with_ordinary_memory) == [[True] * 4] * cluster.size


def shapes():
    return [
        (list(tensor.shape), tensor.dtype)
        for tensor in (
            hvd.shared_empty(2, 3),
            hvd.shared_empty((4,), dtype=torch.int16),
            hvd.shared_empty(torch.Size([0, 5])),
            hvd.shared_empty(),
        )
    ]


def test_shapes(cluster):
    expected = [
        ([2, 3], torch.float32),
        ([4], torch.int16),
        ([0, 5], torch.float32),
        ([], torch.float32),
    ]
    assert cluster.run(shapes) == [expected] * cluster.size


def refusals():
    texts = []
    for arguments, dtype in (
        ((-1,), None),
        ((1 << 40, 1 << 40), None),
        ((1 << 70,), None),
        ((2.5,), None),
        (("12",), None),
        ((3,), "float32"),
        ((1 << 45,), None),
    ):
        try:
            hvd.shared_empty(*arguments, dtype=dtype)
        except (ValueError, TypeError, MemoryError) as error:
            texts.append(f"{type(error).__name__}: {error}")
    return texts


def test_refusals(cluster):
    for texts in cluster.run(refusals):
        assert texts == [
            "ValueError: shared_empty: there is no tensor of shape [-1]",
            "ValueError: shared_empty: there is no tensor of shape [1099511627776, 1099511627776]",
            "ValueError: shared_empty: there is no tensor of shape [1180591620717411303424]",
            "TypeError: 'float' object cannot be interpreted as an integer",
            "TypeError: 'str' object cannot be interpreted as an integer",
            "TypeError: shared_empty(dtype=...) takes a torch.dtype, not 'float32'",
            "MemoryError: shared_empty: no memory for 140737488355328 bytes",
        ]


def test_before_init_and_after_shutdown():
    result = run_script(
        2,
        """
        import torch
        import hvdtorch as hvd

        try:
            hvd.shared_empty(3)
        except hvd.HorovodInternalError as error:
            print("BEFORE", error)
        hvd.init()
        kept = hvd.shared_empty(200_000).fill_(1.0)
        hvd.allreduce_(kept, op=hvd.Sum)
        hvd.shutdown()
        kept += 1
        hvd.init()
        hvd.allreduce_(kept, op=hvd.Sum)  # ordinary memory now
        assert (kept == 6).all()
        print("AFTER")
        """,
    )
    assert result.returncodes == [0, 0], result.outputs
    for output in result.outputs:
        assert "BEFORE hvdtorch is not running: call hvd.init() first" in output
        assert "AFTER" in output


# ---- how ranks come to share memory, or do not ----

TRANSFER = """
import os
import torch
import hvdtorch as hvd
{before}
hvd.init()
x = torch.full((300_000,), hvd.rank() + 1.0)
hvd.allreduce_(x, op=hvd.Sum)
assert (x == 3).all()
y = hvd.shared_empty(300_000).fill_(hvd.rank() + 1.0)
hvd.allreduce_(y, op=hvd.Sum)
assert (y == 3).all()
maps = open("/proc/self/maps").read()
print("SHARED", maps.count("memfd:hvdtorch"), flush=True)
"""

REFUSE = """
from hvdtorch import _C
def refuse(*_):
    raise RuntimeError("no memory for this test")
_C.HostGroup.{failing} = staticmethod(refuse)
"""


def shared_segments(result):
    return [int(output.split("SHARED ")[1].split()[0]) for output in result.outputs]


def test_ranks_of_one_host_share_memory():
    result = run_script(2, TRANSFER.format(before=""))
    assert result.returncodes == [0, 0], result.outputs
    assert min(shared_segments(result)) > 1


@pytest.mark.parametrize(
    "settings",
    [{"HVDTORCH_SHARED_MEMORY": "0"}, {"HVDTORCH_HOST_ID": "two hosts"}],
    ids=["turned off", "hosts"],
)
def test_no_sharing(settings):
    before = ""
    if "HVDTORCH_HOST_ID" in settings:
        before = 'os.environ["HVDTORCH_HOST_ID"] = os.environ["RANK"]'
    result = run_script(2, TRANSFER.format(before=before), env=settings)
    assert result.returncodes == [0, 0], result.outputs
    assert "WARN" not in "".join(result.outputs).upper()
    # Only what this process shares with nobody: its own arena.
    assert max(shared_segments(result)) == 0


@pytest.mark.parametrize("failing", ["create", "open"])
def test_what_cannot_be_shared_is_said_once_and_sent_through_sockets(failing):
    result = run_script(2, TRANSFER.format(before=REFUSE.format(failing=failing)))
    assert result.returncodes == [0, 0], result.outputs
    assert shared_segments(result) == [0, 0]
    warning = "exchange data through sockets, which is slower"
    assert result.outputs[0].count(warning) == 1 and warning not in result.outputs[1]
    rank = 0 if failing == "create" else 1
    assert (
        f"because rank {rank} cannot share memory with them: no memory for this test"
        in (result.outputs[0])
    )


@pytest.mark.skipif(
    not Path("/dev/shm").is_dir() or os.geteuid() != 0, reason="needs /dev/shm and root"
)
def test_a_tiny_dev_shm_does_not_matter():
    """As in a container that was given next to none: the memory has no file there."""
    before = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
if libc.unshare(0x00020000) != 0:  # CLONE_NEWNS
    print("NOT PERMITTED")
    raise SystemExit
libc.mount(None, b"/", None, 0x44000, None)  # MS_REC | MS_PRIVATE
assert libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, b"size=64k") == 0
"""
    result = run_script(2, TRANSFER.format(before=before))
    if "NOT PERMITTED" in result.outputs[0]:
        pytest.skip("mount namespaces are not permitted here")
    assert result.returncodes == [0, 0], result.outputs
    assert min(shared_segments(result)) > 1


def test_a_killed_job_leaves_no_shared_memory():
    before = set(os.listdir("/dev/shm"))
    result = run_script(
        2,
        """
        import os, signal
        import hvdtorch as hvd

        hvd.init()
        x = hvd.shared_empty(1_000_000).fill_(1.0)
        hvd.allreduce_(x)
        os.kill(os.getpid(), signal.SIGKILL)
        """,
    )
    assert result.returncodes == [-9, -9]
    assert set(os.listdir("/dev/shm")) - before == set()


def test_ranks_that_see_other_processes_do_not_share():
    """A rank in a process namespace of its own, as in a container of its own."""
    result = run_script(
        2,
        """
        import os, sys
        if os.environ["RANK"] == "1" and "INSIDE" not in os.environ:
            command = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, *sys.argv]
            os.environ["INSIDE"] = "1"
            os.execvp(command[0], command)
        """
        + TRANSFER.format(before="").replace("\n", "\n        "),
    )
    if "unshare failed" in result.outputs[1] or "No such file" in result.outputs[1]:
        pytest.skip("process namespaces are not permitted here")
    assert result.returncodes == [0, 0], result.outputs
    assert shared_segments(result) == [0, 0]
    assert "rank 1 cannot share memory with them" in result.outputs[0]
