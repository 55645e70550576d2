"""What the tests of the benchmarks share: a Horovod to put beside hvdtorch.

HVDTORCH_TEST_HOROVOD_PYTHON names an interpreter that has the real one; without it, tests that need
it are skipped. `fake_horovod` makes an interpreter with a stand-in that every machine can run.
"""

import os
import sys
from pathlib import Path

import pytest
from support.processes import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "benchmarks"))

# Does through torch.distributed what the companions ask of Horovod. They are ranks of a Gloo group.
_TORCH = """
import os
import torch
import torch.distributed as dist

Sum, Average = "sum", "average"
rank, size = (lambda: int(os.environ["HOROVOD_RANK"])), (lambda: int(os.environ["HOROVOD_SIZE"]))
barrier = dist.barrier

def init():
    assert os.environ["HOROVOD_CONTROLLER"] == os.environ["HOROVOD_CPU_OPERATIONS"] == "gloo"

def shutdown():
    pass

def allreduce_(tensor, name, op):
    dist.all_reduce(tensor)
    tensor += SPOILED * (rank() == 1)
    return tensor.div_(size()) if op == Average else tensor

allreduce_async_ = allreduce_

def synchronize(tensor):
    return tensor

def broadcast_parameters(state, root_rank):
    for tensor in state.values():
        dist.broadcast(tensor, root_rank)

def DistributedOptimizer(optimizer, named_parameters):
    bare = optimizer.step
    def step():
        for _, parameter in named_parameters:
            allreduce_(parameter.grad, "", Average)
        bare()
    optimizer.step = step
    return optimizer
"""
_SERVER = """
class RendezvousServer:
    def start(self):
        return 1
    def init(self, assignments):
        assert assignments == ("127.0.0.1:2", 2, 2)
    def stop(self):
        pass
"""
_HOSTS = """
def parse_hosts(text):
    return text
def get_host_assignments(*arguments):
    return arguments
"""


def _fake(directory: Path, spoiled: int) -> Path:
    files = {
        "__init__.py": "__version__ = 'fake'",
        "torch.py": f"SPOILED = {spoiled}\n{_TORCH}",
        "runner/__init__.py": "",
        "runner/http/__init__.py": "",
        "runner/http/http_server.py": _SERVER,
        "runner/common/__init__.py": "",
        "runner/common/util/__init__.py": "",
        "runner/common/util/hosts.py": _HOSTS,
    }
    for name, text in files.items():
        path = directory / "lib" / "horovod" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    python = directory / "python"
    python.write_text(
        f'#!/bin/sh\nexport PYTHONPATH="$PYTHONPATH:{directory}/lib"\nexec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    return python


@pytest.fixture
def fake_horovod(tmp_path: Path) -> Path:
    """An interpreter with a stand-in for Horovod over Gloo."""
    return _fake(tmp_path / "fake", spoiled=0)


@pytest.fixture
def wrong_horovod(tmp_path: Path) -> Path:
    """The same, but rank 1 gets wrong results."""
    return _fake(tmp_path / "wrong", spoiled=1)


@pytest.fixture
def horovod() -> Path:
    """An interpreter with the real one."""
    python = os.environ.get("HVDTORCH_TEST_HOROVOD_PYTHON")
    if not python:
        pytest.skip("HVDTORCH_TEST_HOROVOD_PYTHON names no interpreter that has Horovod")
    return Path(python)
