"""Control connections: who does not know the key gets nowhere, and does not disturb who does."""

import os
import socket
import threading
import time

import pytest

from hvdtorch.connect import Listener, connect

KEY = b"k" * 32


def accept_in_thread(listener, size, key=KEY, seconds=10.0):
    result = {}

    def run():
        try:
            result["fds"] = listener.accept_all(size, key, time.monotonic() + seconds)
        except Exception as error:
            result["error"] = error

    thread = threading.Thread(target=run)
    thread.start()
    return thread, result


@pytest.fixture
def listener():
    listener = Listener("127.0.0.1")
    yield listener
    listener.close()


def close(*fds):
    for fd in fds:
        if fd >= 0:
            os.close(fd)


def test_ranks_are_told_apart_and_bytes_flow(listener):
    thread, result = accept_in_thread(listener, 3)
    soon = time.monotonic() + 10
    two = connect(["127.0.0.1"], listener.port, 2, KEY, soon)
    one = connect(["127.0.0.1"], listener.port, 1, KEY, soon)
    thread.join()
    fds = result["fds"]
    assert fds[0] == -1
    os.write(one, b"from one")
    os.write(two, b"from two")
    assert (os.read(fds[1], 100), os.read(fds[2], 100)) == (b"from one", b"from two")
    assert all(not os.get_inheritable(fd) for fd in (one, two, *fds[1:]))
    close(one, two, *fds)


def test_an_unreachable_first_address_is_passed_over(listener):
    thread, result = accept_in_thread(listener, 2)
    fd = connect(["127.255.255.254", "127.0.0.1"], listener.port, 1, KEY, time.monotonic() + 10)
    thread.join()
    close(fd, *result["fds"])


def test_strangers_are_dropped_and_the_real_rank_still_gets_in(listener):
    thread, result = accept_in_thread(listener, 2)
    silent = socket.create_connection(("127.0.0.1", listener.port))
    rude = socket.create_connection(("127.0.0.1", listener.port))
    rude.sendall(b"GET / HTTP/1.1\r\n\r\n" * 20)
    with pytest.raises(TimeoutError, match="rank 1 cannot reach rank 0"):
        connect(["127.0.0.1"], listener.port, 1, b"x" * 32, time.monotonic() + 1)
    fd = connect(["127.0.0.1"], listener.port, 1, KEY, time.monotonic() + 10)
    silent.close()
    thread.join()
    close(fd, *result["fds"])
    rude.close()


def test_a_client_does_not_trust_a_server_without_the_key(listener):
    thread, result = accept_in_thread(listener, 2, key=b"y" * 32, seconds=2)
    with pytest.raises(TimeoutError, match=f"127.0.0.1:{listener.port}"):
        connect(["127.0.0.1"], listener.port, 1, KEY, time.monotonic() + 1)
    thread.join()
    assert str(result["error"]) == "ranks [1] did not connect to rank 0 in time"


def test_missing_ranks_are_named(listener):
    thread, result = accept_in_thread(listener, 4, seconds=1)
    fd = connect(["127.0.0.1"], listener.port, 2, KEY, time.monotonic() + 5)
    thread.join()
    assert str(result["error"]) == "ranks [1, 3] did not connect to rank 0 in time"
    close(fd)
