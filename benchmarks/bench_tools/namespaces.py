"""Two hosts on one machine: network namespaces with nothing but a virtual cable between them.

A namespace belongs to a process that does nothing and ends when this one does, whatever ends it;
with it go the namespace, its end of the cable and the shaping: nothing can be left behind. Ranks
are started inside with `Host.command`. Needs root, iproute2 (ip, tc) and util-linux (unshare,
nsenter).
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

INTERFACE = "veth-hvd"
_NETWORK = "10.213.7"
_PORT = 29500  # nobody else is in the namespace
_TOOLS = ("ip", "tc", "unshare", "nsenter")


@dataclass(frozen=True)
class Host:
    """One of the two, by the process that keeps it alive."""

    index: int
    keeper: int

    @property
    def address(self) -> str:
        return f"{_NETWORK}.{self.index + 1}"

    def command(self, *command: str) -> list[str]:
        """What runs `command` on this host."""
        return ["nsenter", f"--net=/proc/{self.keeper}/ns/net", "--", *command]


def missing() -> str | None:
    """Why two hosts cannot be had here, or None."""
    absent = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if absent:
        return f"not installed: {', '.join(absent)}"
    if os.geteuid() != 0:
        return "network namespaces need root"
    try:
        with two_hosts():
            return None
    except (OSError, RuntimeError) as error:
        return str(error)


@contextmanager
def two_hosts(rate: str = "") -> Iterator[tuple[Host, Host]]:
    """Two hosts with a cable between them, shaped to `rate` ("1gbit") in each direction.

    Raises RuntimeError with what `ip`, `tc` or `unshare` said.
    """
    with ExitStack() as leaving:
        first, second = (leaving.enter_context(_host(index)) for index in range(2))
        _run(
            first.command(
                *("ip", "link", "add", INTERFACE, "type", "veth"),
                *("peer", "name", INTERFACE, "netns", str(second.keeper)),
            )
        )
        for host in (first, second):
            _run(host.command("ip", "link", "set", "lo", "up"))
            _run(host.command("ip", "address", "add", f"{host.address}/24", "dev", INTERFACE))
            _run(host.command("ip", "link", "set", INTERFACE, "up"))
            if rate:
                # What waits longer than 50 ms is dropped, as by a switch.
                shape = f"tbf rate {rate} burst 128kb latency 50ms"
                _run(host.command(*f"tc qdisc add dev {INTERFACE} root {shape}".split()))
        yield first, second


@contextmanager
def _host(index: int) -> Iterator[Host]:
    keeper = subprocess.Popen(
        ["unshare", "--net", "sh", "-c", "echo ready; exec cat"],  # until its input ends
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with keeper:  # closes its input, and waits for it
        assert keeper.stdout is not None and keeper.stderr is not None
        if keeper.stdout.readline() != "ready\n":
            raise RuntimeError(keeper.stderr.read().strip() or "unshare gave no network namespace")
        yield Host(index, keeper.pid)


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        words = " ".join(command[command.index("--") + 1 :])
        raise RuntimeError(f"{words}: {done.stderr.strip()}")


def rank_environment(hosts: Sequence[Host], ranks_per_host: int, rank: int) -> dict[str, str]:
    """What a launcher would set for `rank`: the first ranks on the first host."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks_per_host * len(hosts)),
        "MASTER_ADDR": hosts[0].address,
        "MASTER_PORT": str(_PORT),
        # One boot id and one host name: only we know that these are two hosts.
        "HVDTORCH_HOST_ID": f"host-{rank // ranks_per_host}",
        "HVDTORCH_INTERFACE": INTERFACE,
        "GLOO_SOCKET_IFNAME": INTERFACE,  # torch's own groups
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # it warns that these hosts have no names
    }
