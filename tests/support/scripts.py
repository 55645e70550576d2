"""One-off jobs: a script run on np ranks by a launcher, for what a persistent rank cannot show.

Such jobs die, are killed, never call shutdown, or are about the launcher itself.
"""

import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from signal import SIGABRT
from typing import Literal

from support.processes import (
    TAG,
    clean_environment,
    kill_tagged,
    new_tag,
    rank_environment,
    tagged,
    wait_untagged,
)
from torch.distributed import TCPStore

Launcher = Literal["hvdrun", "torchrun", "python"]
LEAVE_SECONDS = 5.0  # for descendants, after the job itself has ended


class ScriptResult(subprocess.CompletedProcess[str]):
    """How the job ended. `returncode` is the launcher's; for "python" the first non-zero rank's.

    `returncodes` and `outputs` (stdout and stderr together) have one item per process that
    `run_script` started itself: one per rank for "python", one in all for a launcher.
    """

    returncodes: list[int]
    outputs: list[str]


def _launch_command(launcher: Launcher, np: int, flags: Sequence[str]) -> list[str]:
    if launcher == "hvdrun":
        return [sys.executable, "-m", "hvdtorch.launch", "-np", str(np), *flags, sys.executable]
    if launcher == "torchrun":
        run = [sys.executable, "-m", "torch.distributed.run"]
        return [*run, "--standalone", "--nproc-per-node", str(np), *flags, "--"]
    return [sys.executable, *flags]


def run_script(
    np: int,
    source: str | Path,
    launcher: Launcher = "python",
    timeout: float = 120.0,
    env: Mapping[str, str] | None = None,
    args: Sequence[str] = (),
    flags: Sequence[str] = (),
) -> ScriptResult:
    """Run a script on `np` ranks and wait for the end of the job and of all it started.

    `source` is a path, or the text of a script (dedented). "python" starts the ranks directly with
    the environment torchrun would set (none at np=1); "hvdrun" and "torchrun" start the launcher.
    `env` is added to an environment that has no launcher's or hvdtorch's variables; `flags` are the
    launcher's (Python's for "python"), `args` the script's.

    Raises AssertionError when the job takes longer than `timeout` seconds (the text has all output
    and stacks) or leaves a process behind. The exit status is for the caller to judge.
    """
    with tempfile.TemporaryDirectory() as directory:
        path = source
        if isinstance(source, str):
            path = Path(directory) / "script.py"
            path.write_text(textwrap.dedent(source))
        command = [*_launch_command(launcher, np, flags), str(path), *args]
        environments = [clean_environment()]
        if launcher == "python" and np > 1:
            store = TCPStore(
                "127.0.0.1", 0, is_master=True, wait_for_workers=False
            )  # lives until return
            environments = [rank_environment(rank, np, store.port) for rank in range(np)]
        return _run(command, environments, env or {}, directory, timeout)


def _run(
    command: list[str],
    environments: list[dict[str, str]],
    extra: Mapping[str, str],
    directory: str,
    timeout: float,
) -> ScriptResult:
    tag = new_tag()
    logs = [Path(directory) / f"output.{i}" for i in range(len(environments))]
    processes: list[subprocess.Popen[bytes]] = []

    def outputs() -> list[str]:
        return [log.read_text(errors="replace") for log in logs]

    try:
        for environment, log in zip(environments, logs, strict=True):
            with log.open("wb") as stream:
                processes.append(
                    subprocess.Popen(
                        command,
                        # torchrun leaves a folder of logs in TMPDIR: it goes with `directory`.
                        env=environment | {TAG: tag, "TMPDIR": directory} | extra,
                        stdin=subprocess.DEVNULL,
                        stdout=stream,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )
        deadline = time.monotonic() + timeout
        try:
            codes = [process.wait(max(0.0, deadline - time.monotonic())) for process in processes]
        except subprocess.TimeoutExpired:
            kill_tagged(tag, SIGABRT)
            time.sleep(1.0)
            text = "\n".join(outputs())
            raise AssertionError(f"{command} did not end within {timeout} s\n{text}") from None
        if left := wait_untagged(tag, LEAVE_SECONDS):
            names = {pid: Path(f"/proc/{pid}/cmdline").read_text().split("\0") for pid in left}
            raise AssertionError(
                f"{command} left processes behind: {names}\n" + "\n".join(outputs())
            )
    finally:
        kill_tagged(tag)
        for process in processes:
            process.wait()
    assert not tagged(tag)
    code = next((code for code in codes if code != 0), 0)
    result = ScriptResult(command, code, "".join(outputs()), "")
    result.returncodes, result.outputs = codes, outputs()
    return result
