"""Where the ranks run: `-H host:slots,...` and hostfiles.

A host is a name or an address; an IPv6 address is written in brackets, `[::1]:4`.
"""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass
from pathlib import Path

_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+(?:%[\w.-]+)?\]|[\w.-]+)(?::([0-9]+))?")


@dataclass(frozen=True)
class Host:
    """A host and how many ranks it has room for; None: as many as are asked for."""

    name: str
    slots: int | None


def parse_hosts(text: str) -> list[Host]:
    """The hosts in a comma list `name[:slots],...`.

    Raises:
        ValueError: naming the item that is none.
    """
    return [_host(item.strip(), "-H") for item in text.split(",")]


def read_hostfile(path: str) -> list[Host]:
    """The hosts in a file of lines `name slots=N` or `name:N`.

    Further `key=value` words, blank lines and what follows a `#` are skipped.

    Raises:
        ValueError: naming file and line of what cannot be understood, or the file if it cannot be
            read or names no host.
    """
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read the hostfile {path}: {error}") from None
    hosts = []
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        where = f"{path}:{number}"
        name, *rest = words
        keys = dict(word.partition("=")[::2] for word in rest)
        if not all("=" in word for word in rest):
            raise ValueError(f"{where}: {line.strip()!r} must be `name slots=N`")
        hosts.append(_host(f"{name}:{keys['slots']}" if "slots" in keys else name, where))
    if not hosts:
        raise ValueError(f"the hostfile {path} names no host")
    return hosts


def _host(item: str, where: str) -> Host:
    match = _HOST.fullmatch(item)
    if match is None:
        raise ValueError(f"{where}: {item!r} must be host:slots, such as localhost:4 or [::1]:4")
    name, slots = match.groups()
    if slots is not None and int(slots) < 1:
        raise ValueError(f"{where}: {item!r} has no slot, the number must be at least 1")
    return Host(name, None if slots is None else int(slots))


def check_hosts(hosts: list[Host], ranks: int) -> str:
    """The name of this machine in `hosts`, after checking that they have room for `ranks`.

    Raises:
        ValueError: for a host that is another machine, or too few slots.
    """
    for host in hosts:
        if not is_this_machine(host.name):
            raise ValueError(
                f"host {host.name!r} is not this machine, and starting ranks on other hosts is "
                "not available yet: start on one host, or use torchrun on each"
            )
    if all(host.slots is not None for host in hosts):
        slots = sum(host.slots or 0 for host in hosts)
        if slots < ranks:
            raise ValueError(f"-np {ranks} needs {ranks} slots, but the hosts have only {slots}")
    return hosts[0].name


def is_this_machine(name: str) -> bool:
    """Whether a host name or address means the machine this runs on."""
    if name in ("localhost", socket.gethostname()):
        return True
    try:
        found = socket.getaddrinfo(name.strip("[]"), 0, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # unknown to the resolver, or no legal name
        return False
    return any(_is_own_address(family, address) for family, _, _, _, address in found)


def _is_own_address(family: int, address: tuple) -> bool:
    # A socket can be bound to the addresses of this machine only.
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True
