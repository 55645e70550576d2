"""Host lists and hostfiles, and which hosts are this machine."""

import socket
from pathlib import Path

import pytest

from hvdtorch.launch.hosts import (
    Host,
    check_hosts,
    is_this_machine,
    parse_hosts,
    read_hostfile,
)


def test_host_lists() -> None:
    assert parse_hosts("localhost:4") == [Host("localhost", 4)]
    assert parse_hosts("localhost") == [Host("localhost", None)]
    assert parse_hosts("my_host:2, b-1.example.com:1") == [
        Host("my_host", 2),
        Host("b-1.example.com", 1),
    ]
    assert parse_hosts("[::1]:2,[fe80::1%eth0]:3") == [Host("[::1]", 2), Host("[fe80::1%eth0]", 3)]


@pytest.mark.parametrize("text", ["", "a:", ":2", "a:x", "a:2:3", "::1:2", "a b:1", "a:0", "a,,b"])
def test_what_is_no_host_is_named(text: str) -> None:
    with pytest.raises(ValueError, match="-H: '"):
        parse_hosts(text)


def test_hostfiles_may_have_comments_and_further_keys(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("# all of them\n\nlocalhost slots=3 max_slots=4  # big\nmy_host:2\nother\n")
    hosts = [Host("localhost", 3), Host("my_host", 2), Host("other", None)]
    assert read_hostfile(str(path)) == hosts


@pytest.mark.parametrize("line", ["a slots=x", "a 3", "a slots=0", "a:2 slots=3", "/ slots=1"])
def test_a_bad_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "hosts"
    path.write_text(f"localhost slots=1\n{line}\n")
    with pytest.raises(ValueError, match=f"{path}:2: "):
        read_hostfile(str(path))


def test_a_hostfile_without_hosts_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("# none\n")
    with pytest.raises(ValueError, match="names no host"):
        read_hostfile(str(path))
    with pytest.raises(ValueError, match="cannot read the hostfile"):
        read_hostfile(str(tmp_path / "missing"))


def test_this_machine() -> None:
    for name in ("localhost", "127.0.0.1", "[::1]", socket.gethostname()):
        assert is_this_machine(name), name
    # 192.0.2.0/24 is set aside for documentation: nobody has such an address.
    for name in ("192.0.2.1", "no-such-host.invalid", "-", "a" * 300):
        assert not is_this_machine(name), name


def test_room() -> None:
    assert check_hosts([Host("127.0.0.1", 2), Host("localhost", 1)], 3) == "127.0.0.1"
    assert check_hosts([Host("localhost", None)], 99) == "localhost"
    with pytest.raises(ValueError, match="-np 4 needs 4 slots, but the hosts have only 3"):
        check_hosts([Host("127.0.0.1", 2), Host("localhost", 1)], 4)
    with pytest.raises(ValueError, match=r"host '192.0.2.1' is not this machine"):
        check_hosts([Host("localhost", 2), Host("192.0.2.1", 2)], 4)
