"""broadcast_parameters: what it takes, what it changes, and what the ranks must agree on."""

import collections

import pytest
import torch
from support.checks import same

import hvdtorch as hvd


def model(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    net = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Linear(2, 2).double()
    )
    net[1].num_batches_tracked.fill_(seed)  # a 0-dim integer buffer
    net[0].to(memory_format=torch.channels_last)
    return net


def every_way_of_passing(root: int) -> None:
    rank, size = hvd.rank(), hvd.size()
    wanted = model(100 + root).state_dict()
    for passed in (
        lambda net: net.state_dict(),
        lambda net: dict(net.named_parameters()) | dict(net.named_buffers()),
        lambda net: collections.OrderedDict(reversed(net.state_dict().items())),
        lambda net: list(net.state_dict().items()),
        lambda net: list(net.state_dict().values()),
        lambda net: iter(net.state_dict().items()),
        lambda net: (tensor for tensor in net.state_dict().values()),
        lambda net: [v if i % 2 else (k, v) for i, (k, v) in enumerate(net.state_dict().items())],
    ):
        net = model(100 + rank)
        before = list(net.parameters())
        assert hvd.broadcast_parameters(passed(net), root) is None
        for name, tensor in net.state_dict().items():
            same(tensor, wanted[name])
        assert all(
            a is b and a.requires_grad for a, b in zip(before, net.parameters(), strict=True)
        )
    net = model(100 + rank)
    hvd.broadcast_parameters(net.named_parameters(), root)
    for name, tensor in net.named_parameters():
        same(tensor, wanted[name])
    same(net[1].num_batches_tracked, torch.tensor(100 + rank))  # a buffer: not passed
    hvd.broadcast_parameters({}, root)
    hvd.broadcast_parameters([], size - 1)


def test_dicts_lists_and_iterators(cluster):
    for root in range(cluster.size):
        cluster.run(every_way_of_passing, root)


def refused_everywhere() -> None:
    one = torch.ones(1)
    for wrong, error, text in (
        ((one, one), ValueError, "tuple"),
        (one, ValueError, "Tensor"),
        (3, ValueError, "int"),
        ([("a", one, one)], ValueError, "pair"),
        (["a"], ValueError, "pair"),
        ([("a", one), ("a", one)], ValueError, "twice"),
        ({"a": 1.5}, TypeError, "'a'"),
        ({"a": None}, TypeError, "'a'"),
        ([("a", [1.0])], TypeError, "'a'"),
        ({1: one}, TypeError, "strings"),
        ({"a": one.to_sparse()}, ValueError, "'a'"),
        ({"a": one.expand(3)}, ValueError, "'a'"),
    ):
        with pytest.raises(error, match=text):
            hvd.broadcast_parameters(wrong, 0)
    same(hvd.allreduce(one), one)


def test_what_is_refused(cluster):
    cluster.run(refused_everywhere)


def differ(case: str) -> str:
    odd = hvd.rank() > 0
    params = {"same": torch.full((2,), float(hvd.rank()))}
    if case == "keys":
        params["right" if odd else "left"] = torch.ones(1)
    elif case == "more":
        params |= {"extra": torch.ones(1)} if odd else {}
    elif case == "shape":
        params["w"] = torch.ones((2, 3) if odd else (3, 2))
    elif case == "dtype":
        params["w"] = torch.ones(2, dtype=torch.float64 if odd else torch.float32)
    elif case == "order":
        params = [("a", torch.ones(1)), ("b", torch.ones(1))]
        params = params[::-1] if odd else params
    with pytest.raises(ValueError) as caught:
        hvd.broadcast_parameters(params, 0)
    if case != "order":
        same(params["same"], torch.full((2,), float(hvd.rank())))  # nothing was sent
    hvd.broadcast_parameters({"same": torch.ones(1)}, 0)
    return str(caught.value)


@pytest.mark.np(2, 3)
@pytest.mark.parametrize(
    ("case", "words"),
    {
        "keys": ("'left'", "'right'", "ranks [0]", "missing"),
        "more": ("'extra'", "missing on ranks [0]"),
        "shape": ("'w'", "[3, 2] on ranks [0]", "[2, 3] on ranks [1"),
        "dtype": ("'w'", "float32 [2] on ranks [0]", "float64 [2] on ranks [1"),
        "order": ("order",),
    }.items(),
)
def test_ranks_that_hold_different_tensors(cluster, case, words):
    texts = cluster.run(differ, case)
    assert len(set(texts)) == 1, texts
    for word in words:
        assert word in texts[0], texts[0]


def one_rank_raises() -> tuple[str, str]:
    params = {"w": "text" if hvd.rank() == 1 else torch.ones(1)}
    with pytest.raises((TypeError, ValueError)) as caught:
        hvd.broadcast_parameters(params, 0)
    hvd.broadcast_parameters({"w": torch.ones(1)}, 0)
    return type(caught.value).__name__, str(caught.value)


@pytest.mark.np(2, 3)
def test_a_wrong_value_on_one_rank_is_an_error_on_all(cluster):
    results = cluster.run(one_rank_raises)
    assert results[1][0] == "TypeError"
    for kind, text in results[:1] + results[2:]:
        assert kind == "ValueError" and "rank 1 raised TypeError" in text and "'w'" in text


def tied() -> None:
    shared = torch.full((3,), float(hvd.rank()))
    hvd.broadcast_parameters({"encoder": shared, "decoder": shared}, hvd.size() - 1)
    same(shared, torch.full((3,), hvd.size() - 1.0))


def test_tied_parameters(cluster):
    cluster.run(tied)
