"""`horovod.run`: call a function on every rank of a new job, and get the results.

The function travels pickled by value, in a file in a folder of this job, to fresh processes that
hvdrun starts; each leaves its result, or the exception it ended with, in the same folder. Nobody
but the user can read or write there.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import cloudpickle

# The files in the folder.
CALL = "call.pickle"
STARTED = "started"
RESULT = "result.{rank}.pickle"


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int = 1,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    slots: int | None = None,
    reset_limit: int | None = None,
    cooldown_range: Sequence[int] | None = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    host_discovery_script: str | None = None,
    start_timeout: float | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    disable_cache: bool | None = None,
    output_filename: str | None = None,
    verbose: int | None = None,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
    mpi_args: str | None = None,
    network_interface: str | None = None,
    network_interfaces: Sequence[str] | str | None = None,
    executable: str | None = None,
    np: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
) -> list[Any]:
    """Call `func(*args, **kwargs)` on every rank of a job of `num_proc` new processes.

    The function calls `hvd.init()` itself. It may be a lambda or a closure. Modules that it imports
    are looked for where this process looks for them.

    Args:
        func, args, kwargs: what is called. Cloudpickle must know them, and the results.
        num_proc: number of ranks.
        hosts, hostfile: where they run, as for `hvdrun -H`, `--hostfile`: this host.
        start_timeout: seconds in which the ranks must have met.
        output_filename: a folder that gets the ranks' output as well.
        verbose: tell what is being done.
        network_interfaces: those to use, a list or a comma list.
        executable: the Python of the ranks; default: this one.
        disable_cache, use_gloo: accepted, without effect.
        min_num_proc, max_num_proc, slots, reset_limit, cooldown_range, host_discovery_script,
            ssh_port, ssh_identity_file: not available yet.
        use_mpi, mpi_args: refused, hvdtorch works without MPI.
        np, min_np, max_np, network_interface: old names of num_proc, min_num_proc, max_num_proc,
            network_interfaces, deprecated.

    Returns:
        The results in rank order.

    Raises:
        RuntimeError: a rank failed; the text names it and what it ended with.
        ValueError: arguments that exclude each other, or that hvdrun refuses.
        NotImplementedError: arguments that are not available yet.
    """
    num_proc = _renamed(np, "np", num_proc, "num_proc")
    min_num_proc = _renamed(min_np, "min_np", min_num_proc, "min_num_proc")
    max_num_proc = _renamed(max_np, "max_np", max_num_proc, "max_num_proc")
    network_interfaces = _renamed(
        network_interface, "network_interface", network_interfaces, "network_interfaces"
    )
    if hosts is not None and hostfile is not None:
        raise ValueError("horovod.run: give hosts or hostfile, not both")
    if use_gloo and use_mpi:
        raise ValueError("horovod.run: give use_gloo or use_mpi, not both")
    if use_mpi or mpi_args is not None:
        raise ValueError("horovod.run: hvdtorch works without MPI; leave use_mpi and mpi_args out")
    not_yet = {
        "min_num_proc": min_num_proc,
        "max_num_proc": max_num_proc,
        "slots": slots,
        "reset_limit": reset_limit,
        "cooldown_range": cooldown_range,
        "host_discovery_script": host_discovery_script,
        "ssh_port": ssh_port,
        "ssh_identity_file": ssh_identity_file,
    }
    given = [name for name, value in not_yet.items() if value is not None]
    if given:
        raise NotImplementedError(
            f"horovod.run: {', '.join(given)}: elastic jobs and other hosts are not available in "
            "hvdtorch yet"
        )
    if isinstance(network_interfaces, str):
        network_interfaces = network_interfaces.split(",")
    flags = ["-np", str(num_proc)]
    for flag, value in (
        ("--hosts", hosts),
        ("--hostfile", hostfile),
        ("--start-timeout", start_timeout),
        ("--output-filename", output_filename),
        ("--network-interfaces", ",".join(network_interfaces) if network_interfaces else None),
    ):
        if value is not None:
            flags += [flag, str(value)]
    if verbose:
        flags.append("--verbose")
    return _run(func, args, kwargs or {}, num_proc, flags, executable or sys.executable)


def _renamed(old: Any, old_name: str, new: Any, new_name: str) -> Any:
    """The value of an argument that may be given under its old name."""
    if old is None:
        return new
    warnings.warn(f"{old_name} is deprecated: use {new_name}", DeprecationWarning, stacklevel=3)
    return old


def _run(
    func: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    num_proc: int,
    flags: list[str],
    executable: str,
) -> list[Any]:
    with tempfile.TemporaryDirectory(prefix="hvdtorch-run-") as directory:
        folder = Path(directory)
        call = cloudpickle.dumps((func, tuple(args), dict(kwargs)))
        # The path comes first: the call may need modules that are found there only.
        (folder / CALL).write_bytes(pickle.dumps((sys.path, call)))
        worker = [executable, "-m", "hvdtorch.launch.function", directory]
        status = _hvdrun([*flags, *worker])
        if status == 2 and not (folder / STARTED).exists():
            raise ValueError("horovod.run: hvdrun refused its arguments, see what it printed")
        results = [_result(folder, rank) for rank in range(num_proc)]
    failed = [rank for rank, (done, _) in enumerate(results) if not done]
    if status != 0 or failed:
        said = "".join(f"\nrank {rank}: {results[rank][1]}" for rank in failed)
        raise RuntimeError(f"horovod.run: the job ended with status {status}{said}")
    return [value for _, value in results]


def _hvdrun(arguments: list[str]) -> int:
    process = subprocess.Popen([sys.executable, "-m", "hvdtorch.launch", *arguments])
    try:
        return process.wait()
    except BaseException:  # Ctrl-C reaches hvdrun too, but an exception in a handler does not
        process.send_signal(signal.SIGTERM)
        process.wait()
        raise


def _result(folder: Path, rank: int) -> tuple[bool, Any]:
    """Whether the call returned on this rank, and its value; else what became of it."""
    try:
        done, value = pickle.loads((folder / RESULT.format(rank=rank)).read_bytes())
    except FileNotFoundError:
        return False, "it ended without a result"
    return done, pickle.loads(value) if done else value


def _work(folder: Path) -> int:
    """The other end, in a rank: make the call, and leave the result; the exit status."""
    (folder / STARTED).touch()
    path, call = pickle.loads((folder / CALL).read_bytes())
    sys.path += [entry for entry in path if entry not in sys.path]
    file = folder / RESULT.format(rank=os.environ["RANK"])
    outcome: tuple[bool, Any]
    try:
        func, args, kwargs = pickle.loads(call)
        outcome = True, cloudpickle.dumps(func(*args, **kwargs))
    except Exception:
        file.write_bytes(pickle.dumps((False, traceback.format_exc())))
        raise
    file.write_bytes(pickle.dumps(outcome))
    return 0


if __name__ == "__main__":
    sys.exit(_work(Path(sys.argv[1])))
