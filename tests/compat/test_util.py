"""The helpers of `horovod.common.util`."""

import os

import pytest
import torch

from hvdtorch import buildinfo
from hvdtorch.compat import util

NAME, OTHER = "HVDTORCH_TEST_A", "HVDTORCH_TEST_B"


def test_env_sets_variables_and_puts_them_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAME, "before")
    monkeypatch.delenv(OTHER, raising=False)
    with pytest.raises(KeyError), util.env(**{NAME: "inside", OTHER: "new"}):
        assert (os.environ[NAME], os.environ[OTHER]) == ("inside", "new")
        raise KeyError
    assert os.environ[NAME] == "before"
    assert OTHER not in os.environ


def test_env_ignores_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAME, "before")
    with util.env(**{NAME: None, OTHER: None}):
        assert os.environ[NAME] == "before"
        assert OTHER not in os.environ
        os.environ[NAME] = "changed inside"
    assert os.environ[NAME] == "changed inside"


@pytest.mark.parametrize("length", [0, 1, 5, 12])
@pytest.mark.parametrize("n", [1, 2, 3, 5, 7])
def test_split_list_cuts_evenly_and_in_order(length: int, n: int) -> None:
    items = list(range(length))
    parts = util.split_list(items, n)
    assert len(parts) == n
    assert [item for part in parts for item in part] == items
    lengths = [len(part) for part in parts]
    assert max(lengths) - min(lengths) <= 1
    assert lengths == sorted(lengths, reverse=True)


def test_split_list_needs_a_part() -> None:
    with pytest.raises(ValueError, match="must be positive, not 0"):
        util.split_list([1], 0)


def test_is_iterable() -> None:
    assert all(map(util.is_iterable, ([], "", {}, range(0), iter([]))))
    assert not any(map(util.is_iterable, (1, None, object())))


def test_num_rank_is_power_2() -> None:
    powers = [n for n in range(-2, 70) if util.num_rank_is_power_2(n)]
    assert powers == [1, 2, 4, 8, 16, 32, 64]


def test_cache_calls_once_for_each_arguments() -> None:
    calls = []

    @util._cache
    def function(a: int, b: int = 0) -> int:
        calls.append((a, b))
        return a + b

    assert [function(1), function(1), function(1, b=2), function(1, b=2)] == [1, 1, 3, 3]
    assert calls == [(1, 0), (1, 2)]


@pytest.mark.parametrize("kind", ["mpi", "gloo", "nccl", "ddl", "ccl"])
def test_what_is_built_is_what_the_package_says(
    kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    built = getattr(util, f"{kind}_built")
    answer = getattr(buildinfo, f"{kind}_built")()
    assert built() == answer
    assert capsys.readouterr().out == "", "silent unless asked"
    assert built(verbose=True) == answer
    assert bool(capsys.readouterr().out) == (not answer), "why not, and only then"


def test_extension_available(capsys: pytest.CaptureFixture[str]) -> None:
    assert util.extension_available("torch", verbose=True)
    assert capsys.readouterr().out == ""
    assert not util.extension_available("tensorflow", verbose=True)
    assert capsys.readouterr().out == "hvdtorch has nothing for 'tensorflow', only for torch\n"


def test_gpu_available_needs_a_gpu_and_a_build_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not util.gpu_available("mxnet")
    for built in (False, True):
        for found in (False, True):
            monkeypatch.setattr(buildinfo, "cuda_built", lambda built=built: built)
            monkeypatch.setattr(torch.cuda, "is_available", lambda found=found: found)
            assert util.gpu_available("torch") == (built and found)
