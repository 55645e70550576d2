"""Horovod's variables that are no setting: what is said about them, how loudly, and how often."""

import logging
import re

import pytest

from hvdtorch import log
from hvdtorch.config import SETTINGS, Config
from hvdtorch.horovod_variables import PLACE, VARIABLES, remarks, report

INFO, WARNING = logging.INFO, logging.WARNING

# What Horovod reads at run time, apart from what other programs set.
HOROVOD = """
    FUSION_THRESHOLD CYCLE_TIME CACHE_CAPACITY HIERARCHICAL_ALLREDUCE HIERARCHICAL_ALLGATHER
    TORUS_ALLREDUCE BATCH_D2D_MEMCOPIES NUM_NCCL_STREAMS ENABLE_ASYNC_COMPLETION
    DISABLE_GROUP_FUSION DYNAMIC_PROCESS_SETS TIMELINE TIMELINE_MARK_CYCLES DISABLE_NVTX_RANGES
    AUTOTUNE AUTOTUNE_LOG AUTOTUNE_WARMUP_SAMPLES AUTOTUNE_STEPS_PER_SAMPLE
    AUTOTUNE_BAYES_OPT_MAX_SAMPLES AUTOTUNE_GAUSSIAN_PROCESS_NOISE STALL_CHECK_DISABLE
    STALL_CHECK_TIME_SECONDS STALL_SHUTDOWN_TIME_SECONDS LOG_LEVEL LOG_HIDE_TIME THREAD_AFFINITY
    CONTROLLER CPU_OPERATIONS MPI_THREADS_DISABLE ADASUM_MPI_CHUNK_SIZE GLOO_IFACE
    GLOO_TIMEOUT_SECONDS GLOO_RENDEZVOUS_ADDR GLOO_RENDEZVOUS_PORT RANK SIZE LOCAL_RANK LOCAL_SIZE
    CROSS_RANK CROSS_SIZE HOSTNAME ELASTIC START_TIMEOUT ELASTIC_TIMEOUT SPARK_START_TIMEOUT
    SPARK_USE_LOCAL_RANK_GPU_INDEX SPARK_PYTHONPATH SPARK_WORK_DIR CCL_CACHE ENABLE_XLA_OPS TEST_GPU
"""


def test_every_variable_of_horovod_is_a_setting_or_explained_but_not_both() -> None:
    settings = [name for row in SETTINGS for name in row.aliases]
    named = [*settings, *PLACE, *(variable.name for variable in VARIABLES)]
    assert len(named) == len(set(named))
    assert {f"HOROVOD_{name}" for name in HOROVOD.split()} <= set(named)


@pytest.mark.parametrize("variable", VARIABLES, ids=lambda variable: variable.name)
def test_each_is_accepted_and_explained(variable) -> None:
    environ = {variable.name: "1"}
    assert Config.from_env(environ) == Config()
    [(level, text)] = remarks(environ)
    assert level == (WARNING if variable.missed else INFO)
    assert text == f"{variable.name} has no effect: {variable.why}"


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("HOROVOD_TIMELINE", "/tmp/t.json", [(WARNING, "no timeline is written")]),
        ("HOROVOD_TIMELINE", "", []),
        ("HOROVOD_AUTOTUNE", "1", [(WARNING, "autotuning is not available yet")]),
        ("HOROVOD_AUTOTUNE", "0", []),
        ("HOROVOD_HIERARCHICAL_ALLREDUCE", "false", []),
        ("HOROVOD_DYNAMIC_PROCESS_SETS", "1", [(INFO, "process sets can be added at any time")]),
        ("HOROVOD_BATCH_D2D_MEMCOPIES", "0", [(INFO, "how tensors are packed")]),
        ("HOROVOD_WITH_PYTORCH", "1", [(INFO, "Horovod's build")]),
        ("HOROVOD_NCCL_HOME", "/usr", [(INFO, "Horovod's build")]),
        (
            "HOROVOD_FUSION_TRESHOLD",
            "1",
            [(WARNING, "HOROVOD_FUSION_TRESHOLD: did you mean HOROVOD_FUSION_THRESHOLD?")],
        ),
        ("HOROVOD_TIMELIN", "t", [(WARNING, "did you mean HOROVOD_TIMELINE?")]),
        ("HOROVOD_MY_OWN_SWITCH", "1", [(INFO, "hvdtorch does not know it")]),
        ("HOROVOD_RANK", "0", []),
        ("HOROVOD_CYCLE_TIME", "2", []),
        ("MY_HOROVOD", "1", []),
    ],
)
def test_how_loudly(name: str, text: str, said: list[tuple[int, str]]) -> None:
    found = remarks({name: text})
    assert [level for level, _ in found] == [level for level, _ in said]
    for (_, sentence), (_, part) in zip(found, said, strict=True):
        assert name in sentence and part in sentence


def test_reported_at_the_users_log_level(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log.logger, "handlers", [])
    monkeypatch.setattr(log.logger, "level", log.logger.level)
    monkeypatch.setattr(log.logger, "propagate", False)
    environ = {"HOROVOD_TIMELINE": "t", "HOROVOD_DYNAMIC_PROCESS_SETS": "1"}
    log.configure("warning", hide_time=True)
    report(environ)
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(r"\[W \S+\] HOROVOD_TIMELINE has no effect: no timeline [^\n]+\n", err)
    log.configure("info", hide_time=True)
    report(environ)
    assert "[I " in (out := capsys.readouterr().out) and "HOROVOD_DYNAMIC_PROCESS_SETS" in out
