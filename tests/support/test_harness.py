"""The harness itself: it shows failures, and finds and ends hung ranks and forgotten processes."""

import os
import subprocess
import sys
import time

import pytest
from support.cluster import Cluster, ClusterDied, Clusters, RankFailure
from support.processes import tagged
from support.scripts import run_script

import hvdtorch as hvd


def where_am_i(offset: int) -> tuple[int, int]:
    return hvd.rank() + offset, hvd.size()


def fail_on_one() -> None:
    print("before the failure", flush=True)
    if hvd.rank() == 1:
        raise KeyError("missing piece")


def hang_on_one() -> None:
    if hvd.rank() == 1:
        time.sleep(1000)


def exit_on_one() -> None:
    if hvd.rank() == 1:
        os._exit(7)


def start_a_process() -> int:
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"]).pid


@pytest.mark.np(2)
def test_results_come_by_rank_and_failures_with_their_traceback(cluster: Cluster) -> None:
    assert cluster.run(where_am_i, 10) == [(10, 2), (11, 2)]
    with pytest.raises(RankFailure, match="rank 1") as caught:
        cluster.run(fail_on_one)
    assert "in fail_on_one" in str(caught.value) and "missing piece" in str(caught.value)
    assert list(caught.value.errors) == [1]
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_hung_rank_is_shown_ended_and_replaced(all_clusters: Clusters) -> None:
    cluster = all_clusters.get(2)
    with pytest.raises(ClusterDied, match=r"no answer from ranks \[1\]") as caught:
        cluster.run(hang_on_one, timeout=1.0)
    assert "in hang_on_one" in str(caught.value)
    assert not cluster.alive
    fresh = all_clusters.get(2)
    assert fresh.run(where_am_i, 0) == [(0, 2), (1, 2)]
    with pytest.raises(ClusterDied, match="rank 1 ended") as caught:
        fresh.run(exit_on_one)
    assert "7" in str(caught.value)


def test_a_process_left_behind_by_a_rank_is_found_and_ended() -> None:
    cluster = Cluster(1)
    (pid,) = cluster.run(start_a_process)
    with pytest.raises(AssertionError, match=str(pid)):
        cluster.close()
    assert not tagged(cluster.tag)


@pytest.mark.parametrize("launcher", ["python", "torchrun", "hvdrun"])
def test_scripts_under_every_launcher(launcher) -> None:
    source = """
        import sys
        import hvdtorch as hvd
        hvd.init()
        line = f"rank {hvd.rank()} of {hvd.size()} {sys.argv[1:]}\\n"
        sys.stdout.write(line)  # at once: under torchrun both ranks have the same pipe
    """
    result = run_script(2, source, launcher, args=["--lo", "3", ""])
    assert result.returncode == 0
    for rank in range(2):
        assert f"rank {rank} of 2 ['--lo', '3', '']" in result.stdout


def test_scripts_that_exit_hang_or_leave_something() -> None:
    ended = run_script(2, "import hvdtorch as hvd, sys; hvd.init(); sys.exit(3 * hvd.rank())")
    assert (ended.returncode, ended.returncodes) == (3, [0, 3])
    with pytest.raises(AssertionError, match="line 1 in <module>"):
        run_script(1, "import time; time.sleep(1000)", timeout=5.0)
    leaving = "import subprocess; subprocess.Popen(['sleep', '1000'], start_new_session=True)"
    with pytest.raises(AssertionError, match=r"left processes behind.*sleep"):
        run_script(1, leaving)
