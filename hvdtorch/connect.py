"""Control connections: made, and both ends proved to know the job's key, before C++ gets them.

Rank 0 listens on a port the system chose and publishes its addresses through the store; every other
rank connects to the first address that answers. Then each side sends a random challenge and
answers the other's with an HMAC over the job's key. All messages have fixed lengths, so nothing a
stranger sends is ever parsed; who fails is dropped and the port goes on waiting for the real rank.
A dead host is noticed by the kernel's keep-alive probes, so no process has to wake up for it.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import hashlib
import hmac
import secrets
import socket
import struct
import threading
import time

from hvdtorch.log import logger

_MAGIC = b"hvdtorch control 1\n"
_NONCE = 32
_RANK = struct.Struct("!I")
_HELLO = len(_MAGIC) + _NONCE
_HANDSHAKE_LIMIT = 5.0  # seconds for one peer's handshake: strangers cannot hold a place for long


def _proof(key: bytes, side: bytes, rank: int, server_nonce: bytes, client_nonce: bytes) -> bytes:
    message = side + _RANK.pack(rank) + server_nonce + client_nonce
    return hmac.new(key, message, hashlib.sha256).digest()


def _receive(connection: socket.socket, length: int) -> bytes:
    data = b""
    while len(data) < length:
        part = connection.recv(length - len(data))
        if not part:
            raise ConnectionError("the other side closed the connection during the handshake")
        data += part
    return data


def _watch_for_death(connection: socket.socket) -> None:
    """A peer whose host vanished (power, network) is reported as a broken connection in ~5 s."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = (("TCP_KEEPIDLE", 2), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 3))
    for name, value in (*options, ("TCP_USER_TIMEOUT", 5000)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class Listener:
    """Rank 0's end. `host` is the address to bind; "" binds every interface."""

    def __init__(self, host: str) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, 0), family=family, backlog=1024)
        self.port: int = self._socket.getsockname()[1]

    def close(self) -> None:
        self._socket.close()

    def accept_all(self, size: int, key: bytes, deadline: float) -> list[int]:
        """File descriptors by rank, -1 for rank 0. `deadline` by time.monotonic().

        Raises TimeoutError naming the ranks that did not connect.
        """
        connections: dict[int, socket.socket] = {}
        lock = threading.Lock()

        def admit(connection: socket.socket, address: object) -> None:
            try:
                connection.settimeout(_HANDSHAKE_LIMIT)
                server_nonce = secrets.token_bytes(_NONCE)
                connection.sendall(_MAGIC + server_nonce)
                answer = _receive(connection, _RANK.size + _NONCE + 32)
                (rank,) = _RANK.unpack(answer[: _RANK.size])
                client_nonce = answer[_RANK.size : _RANK.size + _NONCE]
                expected = _proof(key, b"client", rank, server_nonce, client_nonce)
                if not hmac.compare_digest(expected, answer[_RANK.size + _NONCE :]):
                    raise ConnectionError("it does not know the job's key")
                with lock:
                    if not 0 < rank < size or rank in connections:
                        raise ConnectionError(f"rank {rank} is not awaited")
                    connections[rank] = connection
                connection.sendall(_proof(key, b"server", rank, server_nonce, client_nonce))
            except (OSError, ConnectionError) as error:
                logger.warning(
                    "dropped a connection from %s to the control port: %s", address, error
                )
                with lock:
                    for rank, known in list(connections.items()):
                        if known is connection:
                            del connections[rank]
                connection.close()

        with concurrent.futures.ThreadPoolExecutor(max_workers=min(32, size)) as pool:
            while True:
                with lock:
                    if len(connections) == size - 1:
                        break
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                # Wakes up now and then because admissions finish on other threads.
                self._socket.settimeout(min(left, 0.05))
                with contextlib.suppress(TimeoutError):
                    pool.submit(admit, *self._socket.accept())
        missing = [rank for rank in range(1, size) if rank not in connections]
        if missing:
            for connection in connections.values():
                connection.close()
            raise TimeoutError(f"ranks {missing} did not connect to rank 0 in time")
        return [-1] + [_detach(connections[rank]) for rank in range(1, size)]


def _detach(connection: socket.socket) -> int:
    connection.settimeout(None)
    _watch_for_death(connection)
    return connection.detach()


def connect(addresses: list[str], port: int, rank: int, key: bytes, deadline: float) -> int:
    """A descriptor connected to rank 0 at the first of `addresses` that works.

    `deadline` by time.monotonic(). Raises TimeoutError that lists each address with its failure.
    """
    failures: dict[str, str] = {}
    while True:
        for address in addresses:
            left = deadline - time.monotonic()
            if left <= 0:
                break
            connection = None
            try:
                connection = socket.create_connection((address, port), timeout=min(left, 2.0))
                connection.settimeout(min(left, _HANDSHAKE_LIMIT))
                hello = _receive(connection, _HELLO)
                if not hello.startswith(_MAGIC):
                    raise ConnectionError("something else than hvdtorch answers there")
                server_nonce, client_nonce = hello[len(_MAGIC) :], secrets.token_bytes(_NONCE)
                proof = _proof(key, b"client", rank, server_nonce, client_nonce)
                connection.sendall(_RANK.pack(rank) + client_nonce + proof)
                expected = _proof(key, b"server", rank, server_nonce, client_nonce)
                if not hmac.compare_digest(expected, _receive(connection, 32)):
                    raise ConnectionError("it does not know the job's key")
                logger.info("rank %d reached rank 0 at %s:%d", rank, address, port)
                return _detach(connection)
            except OSError as error:
                failures[address] = str(error) or type(error).__name__
                logger.debug("rank %d: %s:%d: %s", rank, address, port, failures[address])
                if connection is not None:
                    connection.close()
        if time.monotonic() >= deadline:
            tried = "; ".join(f"{address}:{port}: {why}" for address, why in failures.items())
            raise TimeoutError(f"rank {rank} cannot reach rank 0 ({tried or 'out of time'})")
        time.sleep(0.1)
