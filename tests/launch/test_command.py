"""The command line: what reaches the ranks, and what is refused."""

import json
import os
import platform
from pathlib import Path

import pytest
from hvdrun_runner import HVDRUN, PYTHON, Hvdrun, lines_of

from hvdtorch.launch.cli import main, make_parser, split_command
from hvdtorch.version import __version__

SHOW_ARGUMENTS = "import json, sys; print(json.dumps(sys.argv[1:]))"


def shown_environment(hvdrun: Hvdrun, np: int, *flags: str, **env: str) -> list[dict[str, str]]:
    """The environment of each rank, in rank order."""
    source = "import json, os; print(json.dumps(dict(os.environ)))"
    result = hvdrun.python(np, source, flags=flags, env=env)
    assert (result.returncode, result.stderr) == (0, "")
    return [json.loads(line.partition(":")[2]) for line in lines_of(result.stdout)]


@pytest.mark.parametrize(
    "words",
    [
        ["--lo", "3"],
        ["--", "x", "--"],
        ["", " ", ""],
        ["a b", "it's", 'say "hi"', "$HOME", "`id`", "*", "a\\b", "line\nbreak", "é"],
        ["-np", "7", "-H", "elsewhere:3", "--verbose", "--help", "-v"],
        ["--min-np", "2", "-x=1", "--fusion-threshold-mb=oops"],
    ],
)
def test_arguments_reach_the_ranks_untouched(hvdrun: Hvdrun, words: list[str]) -> None:
    result = hvdrun.python(2, SHOW_ARGUMENTS, *words)
    shown = json.dumps(words)
    assert lines_of(result.stdout) == [f"[0]<stdout>:{shown}", f"[1]<stdout>:{shown}"]
    assert (result.returncode, result.stderr) == (0, "")


def test_the_command_may_follow_two_dashes(hvdrun: Hvdrun) -> None:
    result = hvdrun("-np", "1", "--", PYTHON, "-c", SHOW_ARGUMENTS, "--", "a")
    assert result.stdout == '[0]<stdout>:["--", "a"]\n'


def test_flags_end_where_the_command_starts() -> None:
    parser = make_parser()
    flags = ["-np", "2", "--gloo", "--cycle-time-ms=3", "-H", "localhost:2"]
    for command in (["python", "-np", "3"], ["sh", "--gloo"], ["", "x"]):
        assert split_command(parser, flags + command) == (flags, command)
    assert split_command(parser, [*flags, "--", "--odd"]) == (flags, ["--odd"])
    assert split_command(parser, flags) == (flags, [])


def test_what_each_rank_is_told(hvdrun: Hvdrun) -> None:
    environments = shown_environment(hvdrun, 3)
    for rank, environ in enumerate(environments):
        told = {
            "RANK": rank,
            "WORLD_SIZE": 3,
            "LOCAL_RANK": rank,
            "LOCAL_WORLD_SIZE": 3,
            "GROUP_RANK": 0,
            "MASTER_ADDR": "127.0.0.1",
            "TORCHELASTIC_USE_AGENT_STORE": True,
            "HOROVOD_RANK": rank,
            "HOROVOD_SIZE": 3,
            "HOROVOD_LOCAL_RANK": rank,
            "HOROVOD_LOCAL_SIZE": 3,
            "HOROVOD_CROSS_RANK": 0,
            "HOROVOD_CROSS_SIZE": 1,
            "HOROVOD_HOSTNAME": "localhost",
            "HOROVOD_CONTROLLER": "gloo",
            "HOROVOD_CPU_OPERATIONS": "gloo",
            "PYTHONUNBUFFERED": 1,
        }
        assert {name: environ.get(name) for name in told} == {
            name: str(value) for name, value in told.items()
        }
        assert "TORCHELASTIC_RUN_ID" not in environ
        assert len(bytes.fromhex(environ["HVDTORCH_JOB_KEY"])) == 32
    for name in ("HVDTORCH_JOB_KEY", "MASTER_PORT"):
        assert len({environ[name] for environ in environments}) == 1


def test_what_another_job_said_is_replaced(hvdrun: Hvdrun) -> None:
    stale = {"RANK": "9", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "x", "HOROVOD_RANK": "9"}
    key = "00" * 32
    (environ,) = shown_environment(hvdrun, 1, **stale, HVDTORCH_JOB_KEY=key)
    assert environ["RANK"] == environ["HOROVOD_RANK"] == "0"
    assert environ["MASTER_PORT"] != "1"
    assert "TORCHELASTIC_RUN_ID" not in environ
    assert environ["HVDTORCH_JOB_KEY"] != key


def test_threads_share_the_cores_unless_the_user_says_so(hvdrun: Hvdrun) -> None:
    (environ,) = shown_environment(hvdrun, 1, OMP_NUM_THREADS="7")
    assert environ["OMP_NUM_THREADS"] == "7"
    without = ("env", "-u", "OMP_NUM_THREADS", *HVDRUN)
    source = "import os; print(os.environ['OMP_NUM_THREADS'])"
    result = hvdrun(*hvdrun.command(2, source), program=without)
    share = max(1, len(os.sched_getaffinity(0)) // 2)
    assert lines_of(result.stdout) == [f"[{rank}]<stdout>:{share}" for rank in range(2)]


def test_flags_become_variables_under_both_names(hvdrun: Hvdrun) -> None:
    flags = (
        *("--fusion-threshold-mb", "32", "--cycle-time-ms", "3.5", "--cache-capacity", "0"),
        *("--thread-affinity", "1", "--gloo-timeout-seconds", "40", "--log-level", "ERROR"),
        *("--network-interface", "lo", "--network-interface", "eth0", "--log-hide-timestamp"),
        *("--gloo", "--disable-cache", "--no-stall-check"),
        *("--stall-check-warning-time-seconds", "5", "--stall-check-shutdown-time-seconds", "9.5"),
    )
    (environ,) = shown_environment(hvdrun, 1, *flags, HVDTORCH_CYCLE_TIME="9")
    expected = {
        "FUSION_THRESHOLD": "33554432",
        "CYCLE_TIME": "3.5",
        "CACHE_CAPACITY": "0",
        "THREAD_AFFINITY": "1",
        "START_TIMEOUT": "40",
        "LOG_LEVEL": "ERROR",
        "LOG_HIDE_TIME": "1",
        "STALL_CHECK_DISABLE": "1",
        "STALL_CHECK_TIME_SECONDS": "5",
        "STALL_SHUTDOWN_TIME_SECONDS": "9.5",
    }
    for name, value in expected.items():
        assert environ[f"HVDTORCH_{name}"] == environ[f"HOROVOD_{name}"] == value
    assert environ["HOROVOD_GLOO_TIMEOUT_SECONDS"] == "40"
    assert environ["HVDTORCH_INTERFACE"] == environ["HOROVOD_GLOO_IFACE"] == "lo,eth0"


def test_a_flag_that_is_not_given_sets_nothing(hvdrun: Hvdrun) -> None:
    (environ,) = shown_environment(hvdrun, 1, HOROVOD_CYCLE_TIME="2")
    given = {
        name: text for name, text in environ.items() if name.startswith(("HVDTORCH_", "HOROVOD_"))
    }
    assert given.pop("HOROVOD_CYCLE_TIME") == "2"
    for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE"):
        del given[f"HOROVOD_{name}"]
    for name in ("HOSTNAME", "CONTROLLER", "CPU_OPERATIONS"):
        del given[f"HOROVOD_{name}"]
    assert sorted(given) == ["HVDTORCH_ECHO_FD", "HVDTORCH_JOB_KEY", "HVDTORCH_TEST_TAG"]


def test_flags_without_effect_are_accepted_with_a_warning(hvdrun: Hvdrun) -> None:
    """A value that looks like the command, or like a flag, is still theirs."""
    flags = (
        *("--mpi", "--mpi-args", "-x A=1", "--binding-args=-bind-to none", "--no-autotune"),
        *("--timeline-filename", "python", "--gloo", "--disable-cache", "--tcp"),
    )
    result = hvdrun.python(1, SHOW_ARGUMENTS, "--mpi", flags=flags)
    assert (result.returncode, result.stdout) == (0, '[0]<stdout>:["--mpi"]\n')
    assert lines_of(result.stderr) == sorted(
        f"hvdrun: warning: {flag} has no effect: {why}"
        for flag, why in (
            ("--mpi", "hvdtorch works without MPI"),
            ("--mpi-args", "hvdtorch works without MPI"),
            ("--binding-args", "hvdtorch works without MPI; --thread-affinity chooses cores"),
            ("--timeline-filename", "no timeline is written, hvdtorch has none yet"),
            ("--tcp", "NCCL is not available yet"),
        )
    )


HOROVODRUN = """
    -h --help -v --version -np --num-proc -cb --check-build --disable-cache --start-timeout
    --network-interfaces --network-interface --output-filename --verbose --config-file -p --ssh-port
    -i --ssh-identity-file --fusion-threshold-mb --cycle-time-ms --cache-capacity
    --hierarchical-allreduce --no-hierarchical-allreduce --hierarchical-allgather
    --no-hierarchical-allgather --torus-allreduce --no-torus-allreduce --autotune --no-autotune
    --autotune-log-file --autotune-warmup-samples --autotune-steps-per-sample
    --autotune-bayes-opt-max-samples --autotune-gaussian-process-noise --min-np --min-num-proc
    --max-np --max-num-proc --slots-per-host --elastic-timeout --reset-limit
    --blacklist-cooldown-range --timeline-filename --timeline-mark-cycles --no-timeline-mark-cycles
    --no-stall-check --stall-check --stall-check-warning-time-seconds
    --stall-check-shutdown-time-seconds --mpi-threads-disable --no-mpi-threads-disable --mpi-args
    --tcp --binding-args --num-nccl-streams --thread-affinity --gloo-timeout-seconds --log-level
    --log-with-timestamp --log-without-timestamp --log-hide-timestamp --no-log-hide-timestamp
    -prefix-timestamp --prefix-output-with-timestamp -H --hosts -hostfile --hostfile
    --host-discovery-script --gloo --mpi --jsrun
"""


def test_every_flag_of_horovodrun_is_known() -> None:
    known = {flag for action in make_parser()._actions for flag in action.option_strings}
    assert set(HOROVODRUN.split()) - known == set()


def test_a_configuration_file_sets_variables_and_flags_win(hvdrun: Hvdrun, tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(
        "params: {fusion_threshold_mb: 16, cycle_time_ms: 2.5}\nstall_check: {enabled: false}\n"
    )
    flags = ("--config-file", str(file), "--cycle-time-ms", "7")
    (environ,) = shown_environment(hvdrun, 1, *flags, HVDTORCH_FUSION_THRESHOLD="1")
    for prefix in ("HVDTORCH", "HOROVOD"):
        assert environ[f"{prefix}_FUSION_THRESHOLD"] == str(16 << 20)
        assert environ[f"{prefix}_CYCLE_TIME"] == "7"
        assert environ[f"{prefix}_STALL_CHECK_DISABLE"] == "1"
    assert not any(name.endswith("CACHE_CAPACITY") for name in environ)


def test_more_slots_than_ranks_start_the_ranks_asked_for(hvdrun: Hvdrun, tmp_path: Path) -> None:
    source = "import os; print(os.environ['HOROVOD_SIZE'], os.environ['HOROVOD_HOSTNAME'])"
    result = hvdrun.python(2, source, flags=["-H", "127.0.0.1:3,localhost:1"])
    assert lines_of(result.stdout) == [f"[{rank}]<stdout>:2 127.0.0.1" for rank in range(2)]
    hostfile = tmp_path / "hosts"
    hostfile.write_text("# mine\nlocalhost slots=4\n")
    result = hvdrun.python(1, source, flags=["-hostfile", str(hostfile)])
    assert result.stdout == "[0]<stdout>:1 localhost\n"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("true", "-np is missing"),
        ("-np 2", "the command is missing"),
        ("-np 0 true", "'0' must be an integer from 1 to 65536"),
        ("-np 99999999999999 true", "must be an integer from 1 to 65536"),
        ("-np x true", "'x' must be an integer"),
        ("-np 4 -H localhost:2 true", "-np 4 needs 4 slots, but the hosts have only 2"),
        ("-np 1 -H 192.0.2.1:1 true", "host '192.0.2.1' is not this machine"),
        ("-np 1 -H localhost:x true", "'localhost:x' must be host:slots"),
        ("-np 1 -H localhost:1 --hostfile f true", "not allowed with argument"),
        ("-np 1 --hostfile /nonexistent true", "cannot read the hostfile /nonexistent"),
        ("-np 1 --cycle-time-ms -3 true", "--cycle-time-ms: '-3' must be a number >= 0"),
        ("-np 1 --cache-capacity 1.5 true", "--cache-capacity: '1.5' must be an integer >= 0"),
        ("-np 1 --log-level loud true", "--log-level: 'loud' must be trace or debug"),
        ("-np 1 --grace-time never true", "'never' must be a number of seconds >= 0"),
        ("-np 1 --output-filename /dev/null true", "Not a directory"),
        ("-np 1 --verb true", "unrecognized arguments: --verb"),
        ("-np 1 --json true", "--json goes with --check-build"),
        ("-np 1 --jsrun true", "--jsrun: hvdrun starts the ranks itself, on this host"),
        ("-np 1 --min-np 1 true", "--min-np: an elastic job is not available in hvdrun yet"),
        ("-np 1 -p 22 true", "-p: running on several hosts is not available in hvdrun yet"),
        ("-np 1 --stall-check-warning-time-seconds x true", "'x' must be a number >= 0"),
        ("-np 1 --config-file /nonexistent true", "cannot read the configuration file /nonex"),
        ("-np 1 --timeline-filename", "--timeline-filename: expected one argument"),
    ],
)
def test_what_makes_no_sense_is_refused(
    line: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(line.split())
    assert caught.value.code == 2
    assert says in capsys.readouterr().err


def test_a_command_that_cannot_be_run(hvdrun: Hvdrun, tmp_path: Path) -> None:
    result = hvdrun("-np", "2", "/nonexistent/program")
    assert result.returncode == 127
    assert result.stderr.startswith("hvdrun: cannot run '/nonexistent/program': No such file")
    plain = tmp_path / "plain"
    plain.write_text("no program")
    result = hvdrun("-np", "2", str(plain))
    assert (result.returncode, result.stdout) == (126, "")
    assert result.stderr == f"hvdrun: cannot run '{plain}': Permission denied\n"


def test_version_and_help_need_no_torch(hvdrun: Hvdrun) -> None:
    assert hvdrun("--version").stdout == hvdrun("-v").stdout == f"{__version__}\n"
    source = (
        "import sys; from hvdtorch.launch.cli import main\n"
        "try: main(['--help'])\n"
        "finally: assert 'torch' not in sys.modules"
    )
    result = hvdrun(program=[PYTHON, "-c", source])
    assert (result.returncode, result.stderr) == (0, "")
    for flag in ("--fusion-threshold-mb", "--grace-time", "--output-filename", "128 MiB"):
        assert flag in result.stdout
    assert "--mpi" not in result.stdout


def test_check_build_says_what_is_there(hvdrun: Hvdrun) -> None:
    import torch

    build = json.loads(hvdrun("--check-build", "--json").stdout)
    assert build["version"] == __version__
    assert build["torch"] == torch.__version__
    assert build["cuda"] == torch.version.cuda
    assert build["python"] == platform.python_version()
    assert build["frameworks"] == {
        "TensorFlow": False,
        "PyTorch": build["native"]["importable"],
        "MXNet": False,
    }
    assert build["native"]["importable"] == (build["native"]["error"] is None)
    result = hvdrun("-cb")
    assert (result.returncode, result.stderr) == (0, "")
    mark = "X" if build["native"]["importable"] else " "
    for line in (f"[{mark}] PyTorch", f"[{mark}] Gloo", "[ ] MPI", "[ ] DDL", "[ ] TensorFlow"):
        assert f"    {line}\n" in result.stdout
    assert torch.__version__ in result.stdout
