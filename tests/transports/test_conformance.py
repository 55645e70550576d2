"""One matrix for every transport: each kind of operation, dtype, op, layout, number of ranks and
process set gives exactly what the reference gives.

To add a transport: a row of `TRANSPORTS`, with the settings that choose it.
"""

from collections.abc import Iterable
from itertools import product

import pytest
import run_cases
from matrix import KINDS
from support.cluster import Clusters

# Small operations travel inside the log unless that is turned off.
_NOTHING_IN_THE_LOG = {"HVDTORCH_INLINE_LIMIT": "0", "HVDTORCH_LONE_INLINE_LIMIT": "0"}
TRANSPORTS: dict[str, dict[str, str]] = {
    "log": {},
    "shared_memory": _NOTHING_IN_THE_LOG,
    "gloo": {**_NOTHING_IN_THE_LOG, "HVDTORCH_SHARED_MEMORY": "0"},
    # Ranks 0 and 2 on one host, 1 and 3 on another.
    "hierarchical": {**_NOTHING_IN_THE_LOG, "HVDTORCH_HOST_ID": "host-{parity}"},
}
FEWEST_RANKS = {"log": 2, "hierarchical": 3}  # with less it is another transport
NEVER_IN_THE_LOG = ("alltoall", "reducescatter")
SUBSETS = {2: [1], 3: [0, 2], 4: [1, 2, 3]}


def _combinations(sizes: Iterable[int]) -> list[tuple[str, int, str]]:
    return [
        (transport, size, kind)
        for transport, size, kind in product(TRANSPORTS, sizes, KINDS)
        if size >= FEWEST_RANKS.get(transport, 1)
        and (transport != "log" or kind not in NEVER_IN_THE_LOG)
    ]


def _hosts(transport: str, size: int) -> list[int]:
    return [rank % 2 if transport == "hierarchical" else 0 for rank in range(size)]


@pytest.mark.parametrize(("transport", "size", "kind"), _combinations([1, 2, 3, 4]))
def test_all_ranks(all_clusters: Clusters, transport: str, size: int, kind: str) -> None:
    cluster = all_clusters.get(size, TRANSPORTS[transport])
    compared = cluster.run(run_cases.run, kind, None, _hosts(transport, size), timeout=120.0)
    assert min(compared) > 300 and len(set(compared)) == 1, compared


@pytest.mark.parametrize(("transport", "size", "kind"), _combinations(SUBSETS))
def test_a_process_set(all_clusters: Clusters, transport: str, size: int, kind: str) -> None:
    members = SUBSETS[size]
    cluster = all_clusters.get(size, TRANSPORTS[transport])
    compared = cluster.run(run_cases.run, kind, members, _hosts(transport, size), timeout=120.0)
    for rank, count in enumerate(compared):
        assert count > 300 if rank in members else count == 0, compared
