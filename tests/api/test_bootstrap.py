"""Where a rank stands: the launcher's environment, and placement from all ranks' introductions."""

import pytest

from hvdtorch.bootstrap import Introduction, Launch, Placement, find_launch, place

FULL = {
    "RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "1234",
    "GROUP_RANK": "0",
}


def test_alone_without_a_launcher():
    assert find_launch({}) == Launch(0, 1)


def test_torchrun_environment():
    assert find_launch(FULL) == Launch(1, 4, 1, 2, "0", "127.0.0.1")


def test_local_variables_are_optional():
    environ = {k: v for k, v in FULL.items() if not k.startswith(("LOCAL", "GROUP"))}
    assert find_launch(environ) == Launch(1, 4, master="127.0.0.1")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"RANK": None}, "RANK is not set"),
        ({"WORLD_SIZE": None}, "WORLD_SIZE is not set"),
        ({"RANK": "4"}, "RANK=4 is not below WORLD_SIZE=4"),
        ({"RANK": "one"}, "RANK='one'"),
        ({"RANK": "-1"}, "RANK='-1'"),
        ({"MASTER_PORT": None}, "MASTER_PORT is not set"),
        ({"MASTER_ADDR": ""}, "MASTER_ADDR is not set"),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK=2 is not below LOCAL_WORLD_SIZE=2"),
    ],
)
def test_contradictions_name_the_variable(change, words):
    environ = {k: v for k, v in {**FULL, **change}.items() if v is not None}
    with pytest.raises(ValueError, match=words):
        find_launch(environ)


@pytest.mark.parametrize(
    "variable", ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS", "HOROVOD_SIZE"]
)
def test_ranks_of_an_unknown_launcher_do_not_train_apart(variable):
    with pytest.raises(ValueError, match="start the script with hvdrun or torchrun"):
        find_launch({variable: "2"})
    assert find_launch({variable: "1"}) == Launch(0, 1)


def introduction(host, local_rank=None, local_size=None, version="v"):
    return Introduction(host, f"name-{host}", local_rank, local_size, version)


def test_place_trusts_the_launcher():
    ranks = [introduction("a", 0, 2), introduction("a", 1, 2), introduction("b", 0, 1)]
    assert place(ranks) == [
        Placement(0, 3, 0, 2, 0, 2),
        Placement(1, 3, 1, 2, 0, 1),
        Placement(2, 3, 0, 1, 1, 2),
    ]


def test_place_groups_by_host_otherwise():
    ranks = [introduction("a"), introduction("b"), introduction("a"), introduction("b")]
    assert place(ranks) == [
        Placement(0, 4, 0, 2, 0, 2),
        Placement(1, 4, 0, 2, 1, 2),
        Placement(2, 4, 1, 2, 0, 2),
        Placement(3, 4, 1, 2, 1, 2),
    ]


def test_two_ranks_in_one_place_are_refused():
    with pytest.raises(ValueError, match="ranks 0 and 2 both have local rank 0 on host name-a"):
        place([introduction("a", 0, 3), introduction("a", 1, 3), introduction("a", 0, 3)])


def test_different_versions_are_refused():
    with pytest.raises(ValueError, match=r"v1 on ranks \[0, 2\]; v2 on ranks \[1\]"):
        place([introduction("a", version=v) for v in ("v1", "v2", "v1")])
