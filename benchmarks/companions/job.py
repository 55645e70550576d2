"""How companions become the ranks of one Horovod job, over Gloo or MPI, with Horovod's defaults.

They are ranks of a torch.distributed Gloo group as well, for barriers: so a sample starts in a
companion as it does in a rank of the benchmark.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

HOST = "127.0.0.1"


class Job:
    """This companion's part in the job of all of them."""

    def __init__(self, rank: int, size: int, kind: str) -> None:
        torch.set_num_threads(1)
        self._rank, self._size, self._kind = rank, size, kind
        self._store: Any = None
        self._server: Any = None

    def open_meeting(self) -> tuple[int, int]:
        """On rank 0: ports of a torch store and, for Gloo, of Horovod's rendezvous server."""
        self._store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
        if self._kind != "gloo":
            return self._store.port, 0
        from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
        from horovod.runner.http.http_server import RendezvousServer

        self._server = RendezvousServer()
        port = self._server.start()
        hosts = parse_hosts(f"{HOST}:{self._size}")
        self._server.init(get_host_assignments(hosts, self._size, self._size))
        return self._store.port, port

    def meet(self, ports: tuple[int, int]) -> None:
        """Become a rank of both."""
        store_port, server_port = ports
        store = self._store or dist.TCPStore(HOST, store_port, is_master=False)
        dist.init_process_group("gloo", store=store, rank=self._rank, world_size=self._size)
        os.environ |= self._environment(server_port)
        import horovod.torch as hvd

        hvd.init()
        if (hvd.rank(), hvd.size()) != (self._rank, self._size):
            raise RuntimeError(f"Horovod made this rank {hvd.rank()} of {hvd.size()}")
        hvd.barrier()
        if self._server is not None:
            self._server.stop()
            self._server = None

    def leave(self) -> None:
        """Part in good order."""
        import horovod.torch as hvd

        dist.barrier()
        hvd.shutdown()
        dist.destroy_process_group()

    def _environment(self, server_port: int) -> dict[str, str]:
        chosen = {"HOROVOD_CONTROLLER": self._kind, "HOROVOD_CPU_OPERATIONS": self._kind}
        if self._kind != "gloo":
            return chosen
        numbers = {
            "RANK": self._rank,
            "SIZE": self._size,
            "LOCAL_RANK": self._rank,
            "LOCAL_SIZE": self._size,
            "CROSS_RANK": 0,
            "CROSS_SIZE": 1,
            "GLOO_RENDEZVOUS_PORT": server_port,
            # A companion is stopped while others are measured; that is no failure.
            "GLOO_TIMEOUT_SECONDS": 3600,
        }
        chosen |= {f"HOROVOD_{name}": str(value) for name, value in numbers.items()}
        return chosen | {
            "HOROVOD_HOSTNAME": HOST,
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": HOST,
            "HOROVOD_GLOO_IFACE": "lo",
        }
