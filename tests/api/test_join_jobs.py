"""Jobs in which ranks have joined: the other divisor, deaths, Ctrl-C, before and after the job."""

import pytest
from support.scripts import run_script


def test_the_average_among_the_active_ranks():
    result = run_script(
        3,
        """
        import torch
        import hvdtorch as hvd

        hvd.init()
        half = hvd.add_process_set([0, 2])
        if hvd.rank() < 2:
            for numel in (3, 50_000):
                for call, average in (
                    (hvd.allreduce, 4), (lambda x: hvd.grouped_allreduce([x])[0], 4),
                    (lambda x: hvd.reducescatter(x), 4),
                ):
                    x = torch.full((numel,), 2.0 + 4 * hvd.rank())
                    assert call(x).eq(average).all()
                assert hvd.allreduce(x.long()).eq(average).all()
                if half.included():
                    assert hvd.allreduce(x, process_set=half).eq(2).all()
        assert hvd.join() in (0, 1)
        assert hvd.allreduce(torch.tensor(6.0 * hvd.rank())).item() == 6
        """,
        env={"HVDTORCH_JOIN_DIVISOR": "active"},
    )
    assert result.returncodes == [0, 0, 0], result.stdout


@pytest.mark.parametrize(
    ("victim", "joined", "death", "words"),
    [
        (2, (0, 1), "os.kill(os.getpid(), 9)", "is gone without a goodbye"),
        (0, (1, 2), "os.kill(os.getpid(), 9)", "is gone without a goodbye"),
        (2, (0, 1), "raise ValueError('bad batch')", "ValueError: bad batch"),
        (1, (0, 1), "threading.Timer(1, os.kill, (os.getpid(), 9)).start()", "without a goodbye"),
    ],
    ids=["active", "active coordinator", "active raises", "joined"],
)
def test_a_death_while_ranks_have_joined_is_named(victim, joined, death, words):
    result = run_script(
        3,
        f"""
        import os, threading
        import torch
        import hvdtorch as hvd

        hvd.init()
        rank = hvd.rank()
        try:
            if rank in {joined}:
                if rank == {victim}:
                    {death}
                hvd.join()
            else:
                for step in range(10**6):
                    hvd.allreduce(torch.ones(30_000), name="w")
                    if rank == {victim} and step == 3:
                        {death}
        except hvd.HorovodInternalError as error:
            print("SEEN", error, flush=True)
        """,
    )
    assert result.returncodes[victim] != 0, result.stdout
    for rank in {0, 1, 2} - {victim}:
        assert result.returncodes[rank] == 0, result.stdout
        assert f"rank {victim} " in result.outputs[rank] and "SEEN" in result.outputs[rank]
        assert f"rank {victim} (host " in result.outputs[rank]
        assert words in result.outputs[rank]


def test_ctrl_c_in_join():
    result = run_script(
        2,
        """
        import os, signal, threading
        import torch
        import hvdtorch as hvd

        signal.signal(signal.SIGINT, signal.default_int_handler)
        hvd.init()
        if hvd.rank() == 0:
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
            hvd.join()
        try:
            while True:
                hvd.allreduce(torch.ones(3))
        except hvd.HorovodInternalError as error:
            print("SEEN", error, flush=True)
        """,
    )
    assert result.returncodes[0] != 0 and "KeyboardInterrupt" in result.outputs[0]
    assert result.returncodes[1] == 0, result.stdout
    assert "SEEN" in result.outputs[1] and "rank 0 (host " in result.outputs[1]
    assert "KeyboardInterrupt" in result.outputs[1]


def test_join_again_after_ctrl_c_waits_on(tmp_path):
    result = run_script(
        2,
        """
        import os, signal, threading, time
        import torch
        import hvdtorch as hvd

        signal.signal(signal.SIGINT, signal.default_int_handler)
        for turn in range(2):
            hvd.init()
            mark = os.environ["MARK"] + str(turn)
            if hvd.rank() == 0:
                threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
                try:
                    hvd.join()
                    raise AssertionError("not interrupted")
                except KeyboardInterrupt:
                    open(mark, "w").close()
            while not os.path.exists(mark):
                time.sleep(0.01)
            if turn == 0:
                if hvd.rank() == 1:
                    assert hvd.allreduce(torch.ones(2), op=hvd.Sum).eq(1).all()
                assert hvd.join() == 1
                for _ in range(3):  # numbered alike
                    assert hvd.allreduce(torch.ones(2), op=hvd.Sum).eq(2).all()
                assert hvd.join() in (0, 1)
                hvd.barrier()
            hvd.shutdown()
        hvd.init()  # the join that was interrupted has ended with its job
        assert hvd.join() in (0, 1)
        assert hvd.allreduce(torch.ones(2), op=hvd.Sum).eq(2).all()
        """,
        env={"MARK": str(tmp_path / "mark")},
    )
    assert result.returncodes == [0, 0], result.stdout


def test_join_before_init_and_after_shutdown():
    result = run_script(
        1,
        """
        import hvdtorch as hvd

        for turn in range(2):
            try:
                hvd.join()
            except hvd.HorovodInternalError as error:
                assert "call hvd.init() first" in str(error), error
            else:
                raise AssertionError("no error")
            hvd.init()
            assert hvd.join() == 0
            hvd.shutdown()
        """,
    )
    assert result.returncode == 0, result.stdout
