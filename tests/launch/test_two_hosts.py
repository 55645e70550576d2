"""Jobs on two hosts of two ranks each: network namespaces of this machine, with a cable between."""

import json
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from support.processes import REPOSITORY, TAG, clean_environment, kill_tagged, new_tag, tagged

sys.path.insert(0, str(REPOSITORY / "benchmarks"))
from bench_tools import namespaces
from bench_tools.namespaces import Host

RANKS_PER_HOST = 2
SECONDS = 120.0


@pytest.fixture(scope="module")
def hosts() -> Iterator[Sequence[Host]]:
    if reason := namespaces.missing():
        pytest.skip(f"two hosts cannot be simulated here: {reason}")
    with namespaces.two_hosts() as pair:
        yield pair


def run(hosts: Sequence[Host], source: str) -> list[tuple[int, str]]:
    """The script on every rank: exit status (minus the signal that ended it) and output, by rank.
    Nothing that it started is left."""
    tag = new_tag()
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "script.py"
        script.write_text("import torch\nimport hvdtorch as hvd\n" + textwrap.dedent(source))
        logs = [Path(folder) / f"output.{r}" for r in range(RANKS_PER_HOST * len(hosts))]
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank, log in enumerate(logs):
                environment = clean_environment() | {TAG: tag}
                environment |= namespaces.rank_environment(hosts, RANKS_PER_HOST, rank)
                command = hosts[rank // RANKS_PER_HOST].command(sys.executable, str(script))
                with log.open("wb") as stream:
                    processes.append(
                        subprocess.Popen(
                            command, env=environment, stdout=stream, stderr=subprocess.STDOUT
                        )
                    )
            codes = [process.wait(SECONDS) for process in processes]
        except subprocess.TimeoutExpired:
            outputs = "\n".join(log.read_text(errors="replace") for log in logs)
            raise AssertionError(f"not ended within {SECONDS} s\n{outputs}") from None
        finally:
            left = tagged(tag)
            kill_tagged(tag)
            for process in processes:
                process.wait()
        assert not left, "the ranks left processes behind"
        return [(code, log.read_text()) for code, log in zip(codes, logs, strict=True)]


def check_all_passed(results: Sequence[tuple[int, str]]) -> None:
    outputs = "\n".join(f"--- rank {r} ---\n{text}" for r, (_, text) in enumerate(results))
    assert [code for code, _ in results] == [0] * len(results), outputs


def sent_bytes(host: Host) -> int:
    """What `host` has sent over the cable so far."""
    command = host.command("ip", "-json", "-statistics", "link", "show", namespaces.INTERFACE)
    shown = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    return int(shown[0]["stats64"]["tx"]["bytes"])


@pytest.mark.timeout(200)
def test_all_collectives(hosts: Sequence[Host]) -> None:
    results = run(
        hosts,
        """
        hvd.init()
        me, ranks = hvd.rank(), hvd.size()
        assert (ranks, hvd.local_size(), hvd.cross_size()) == (4, 2, 2)
        assert (hvd.local_rank(), hvd.cross_rank()) == (me % 2, me // 2)

        def check(actual, expected):
            assert torch.equal(actual, expected.to(actual.dtype)), (actual, expected)

        # From what travels in the log to many stages.
        for count in (1, 7, 100_000, 300_001, 3_000_000):
            place = torch.arange(count) % 8
            for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8):
                mine = (place + me).to(dtype)
                check(hvd.allreduce(mine, op=hvd.Sum), place * 4 + 6)
                check(hvd.allreduce(mine, op=hvd.Max), place + 3)
            check(hvd.allreduce((place + me).float(), op=hvd.Average), place + 1.5)
            check(hvd.allreduce((place + me).int(), op=hvd.Average), place + 1)
            for root in range(ranks):
                check(hvd.broadcast(place + me, root), place + root)
            rows = (place + me)[: count - me]  # none on some ranks
            check(
                hvd.allgather(rows),
                torch.cat([(place + r)[: max(0, count - r)] for r in range(ranks)]),
            )
        check(hvd.alltoall(torch.arange(8) + 10 * me), torch.tensor(
            [10 * r + 2 * me + i for r in range(ranks) for i in range(2)]
        ))
        check(hvd.reducescatter(torch.arange(400_000.0), op=hvd.Sum),
              4 * torch.arange(400_000)[me * 100_000 : (me + 1) * 100_000])
        adasum = hvd.allreduce(torch.full((50_000,), 2.0), op=hvd.Adasum)
        check(adasum, torch.full((50_000,), 2.0))
        hvd.barrier()

        # Process sets of one host, of one rank per host, and of three ranks on two.
        for members in ([2, 3], [0, 2], [0, 1, 3]):
            some = hvd.add_process_set(members)
            if me in members:
                total = hvd.allreduce(torch.full((500_000,), me), op=hvd.Sum, process_set=some)
                check(total, torch.full((500_000,), sum(members)))
            hvd.remove_process_set(some)
        """,
    )
    check_all_passed(results)


@pytest.mark.timeout(200)
def test_data_crosses_the_cable_once_per_host(hosts: Sequence[Host]) -> None:
    before = [sent_bytes(host) for host in hosts]
    results = run(
        hosts,
        """
        hvd.init()
        data = torch.ones(8 << 20, dtype=torch.float32)
        hvd.allreduce_(data, op=hvd.Sum, name="data")
        assert torch.equal(data, torch.full_like(data, 4))
        """,
    )
    check_all_passed(results)
    # Each host sends half of 32 MiB as partial sums, and the other half as results. If every rank
    # sent to every other one it would be twice as much.
    for host, sent in zip(hosts, before, strict=True):
        assert 32 << 20 <= sent_bytes(host) - sent < 40 << 20


@pytest.mark.timeout(200)
@pytest.mark.parametrize("victim", [0, 1, 2, 3])
def test_a_killed_rank_is_named_on_both_hosts(hosts: Sequence[Host], victim: int) -> None:
    results = run(
        hosts,
        f"""
        import os, signal, threading
        hvd.init()
        data = torch.ones(16 << 20)
        if hvd.rank() == {victim}:
            hvd.allreduce(data, name="warm")
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
        else:
            hvd.allreduce(data, name="warm")
        try:
            while True:
                hvd.allreduce_(data, name="data")
        except hvd.HorovodInternalError as error:
            print("told:", error)
        """,
    )
    for rank, (code, output) in enumerate(results):
        if rank == victim:
            assert code in (-9, 137), output
        else:
            assert code == 0 and f"rank {victim}" in output.partition("told: ")[2], (rank, output)
