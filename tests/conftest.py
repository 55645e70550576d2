"""Fixtures shared by all tests: `cluster`, the running ranks a test uses (see support/cluster.py).

A test that takes `cluster` runs once at each of np = 1, 2, 3, 4, or at the sizes it asks for:
`@pytest.mark.np(2)`, `@pytest.mark.np(2, 4)`.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

for directory in (Path(__file__).parent, Path(__file__).parent.parent):
    if str(directory) not in sys.path:
        sys.path.insert(0, str(directory))

from support.cluster import Cluster, Clusters, clusters  # noqa: E402

DEFAULT_SIZES = (1, 2, 3, 4)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "np(*sizes): numbers of ranks the test runs at (default 1 to 4)"
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "cluster" in metafunc.fixturenames:
        marker = metafunc.definition.get_closest_marker("np")
        sizes = marker.args if marker else DEFAULT_SIZES
        metafunc.parametrize("cluster", sizes, indirect=True, ids=[f"np{size}" for size in sizes])


@pytest.fixture(scope="session")
def all_clusters() -> Iterator[Clusters]:
    with clusters() as session:
        yield session


@pytest.fixture
def cluster(request: pytest.FixtureRequest, all_clusters: Clusters) -> Cluster:
    return all_clusters.get(request.param)
