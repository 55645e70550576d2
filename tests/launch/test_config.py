"""The table of settings: defaults, aliases and precedence, units, bad values, unknown names."""

import dataclasses
import warnings

import pytest

from hvdtorch.config import SETTINGS, Config, unknown_variables


def test_defaults() -> None:
    config = Config.from_env({})
    assert config == Config()
    assert config.fusion_threshold == 128 * 2**20
    assert config.cycle_time == 1.0
    assert config.cache_capacity == 1024
    assert config.inline_limit == 1024
    assert config.thread_affinity == ()
    assert config.start_timeout == 30.0
    assert config.operation_timeout == 0.0
    assert config.log_level == "warning"
    assert config.log_hide_time is False
    assert config.disable_group_fusion is False
    assert config.join_divisor == "size"
    assert config.stall_check_disable is False
    assert config.stall_check_time_seconds == 60.0
    assert config.stall_shutdown_time_seconds == 0.0


@pytest.mark.parametrize(
    ("variable", "text", "attribute", "value"),
    [
        ("HVDTORCH_FUSION_THRESHOLD", "0", "fusion_threshold", 0),
        ("HOROVOD_FUSION_THRESHOLD", "33554432", "fusion_threshold", 32 * 2**20),
        ("HOROVOD_CYCLE_TIME", " 3.5 ", "cycle_time", 3.5),
        ("HOROVOD_CACHE_CAPACITY", "7", "cache_capacity", 7),
        ("HVDTORCH_INLINE_LIMIT", "64", "inline_limit", 64),
        ("HOROVOD_THREAD_AFFINITY", "3, 1", "thread_affinity", (3, 1)),
        ("HOROVOD_START_TIMEOUT", "12", "start_timeout", 12.0),
        ("HOROVOD_GLOO_TIMEOUT_SECONDS", "13", "start_timeout", 13.0),
        ("HVDTORCH_OPERATION_TIMEOUT", "1.5", "operation_timeout", 1.5),
        ("HOROVOD_LOG_LEVEL", "DEBUG", "log_level", "debug"),
        ("HOROVOD_LOG_HIDE_TIME", "1", "log_hide_time", True),
        ("HOROVOD_LOG_HIDE_TIME", "-1", "log_hide_time", False),
        ("HVDTORCH_LOG_HIDE_TIME", "Yes", "log_hide_time", True),
        ("HOROVOD_CONTROLLER", "GLOO", "controller", "gloo"),
        ("HOROVOD_CPU_OPERATIONS", "gloo", "cpu_operations", "gloo"),
        ("HOROVOD_GLOO_IFACE", "eth0", "interface", "eth0"),
        ("HVDTORCH_HOST_ID", "a", "host_id", "a"),
        ("HOROVOD_HOSTNAME", "node_1", "hostname", "node_1"),
        ("HVDTORCH_JOB_KEY", "ab" * 32, "job_key", "ab" * 32),
        ("HOROVOD_DISABLE_GROUP_FUSION", "1", "disable_group_fusion", True),
        ("HVDTORCH_JOIN_DIVISOR", "Active", "join_divisor", "active"),
        ("HOROVOD_STALL_CHECK_DISABLE", "1", "stall_check_disable", True),
        ("HOROVOD_STALL_CHECK_TIME_SECONDS", "2.5", "stall_check_time_seconds", 2.5),
        ("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "61", "stall_shutdown_time_seconds", 61.0),
    ],
)
def test_a_variable_sets_its_attribute_only(
    variable: str, text: str, attribute: str, value: object
) -> None:
    config = Config.from_env({variable: text})
    assert config == dataclasses.replace(Config(), **{attribute: value})


def test_own_names_win_over_aliases_in_their_order() -> None:
    environ = {
        "HVDTORCH_START_TIMEOUT": "1",
        "HOROVOD_START_TIMEOUT": "2",
        "HOROVOD_GLOO_TIMEOUT_SECONDS": "3",
    }
    for expected in (1.0, 2.0, 3.0):
        assert Config.from_env(environ).start_timeout == expected
        del environ[next(iter(environ))]


def test_an_empty_variable_is_not_set() -> None:
    environ = {"HVDTORCH_CYCLE_TIME": "", "HOROVOD_CYCLE_TIME": "2", "HOROVOD_CACHE_CAPACITY": " "}
    assert Config.from_env(environ) == Config(cycle_time=2.0)


@pytest.mark.parametrize(
    ("variable", "text", "says"),
    [
        ("HOROVOD_FUSION_THRESHOLD", "64MB", "an integer >= 0"),
        ("HVDTORCH_FUSION_THRESHOLD", "-1", "an integer >= 0"),
        ("HVDTORCH_CYCLE_TIME", "(None,)", "a number >= 0"),
        ("HVDTORCH_CYCLE_TIME", "nan", "a number >= 0"),
        ("HVDTORCH_START_TIMEOUT", "-3", "a number >= 0"),
        ("HOROVOD_THREAD_AFFINITY", "1,x", "comma list of core numbers"),
        ("HOROVOD_LOG_HIDE_TIME", "maybe", "an integer (> 0 is true)"),
        ("HOROVOD_CONTROLLER", "mpi", "without MPI"),
        ("HOROVOD_CONTROLLER", "nccl", "must be gloo"),
        ("HOROVOD_CPU_OPERATIONS", "CCL", "no oneCCL"),
        ("HOROVOD_CPU_OPERATIONS", "mpi", "without MPI"),
        ("HVDTORCH_JOIN_DIVISOR", "all", "must be size or active"),
        ("HOROVOD_STALL_CHECK_TIME_SECONDS", "soon", "a number >= 0"),
    ],
)
def test_a_bad_value_is_named(variable: str, text: str, says: str) -> None:
    with pytest.raises(ValueError) as caught:
        Config.from_env({variable: text})
    for part in (variable, repr(text), says):
        assert part in str(caught.value)


def test_an_unknown_log_level_is_the_default_with_a_warning() -> None:
    with pytest.warns(UserWarning, match=r"HOROVOD_LOG_LEVEL: 'loud' must be trace or debug"):
        assert Config.from_env({"HOROVOD_LOG_LEVEL": "loud"}).log_level == "warning"


def test_a_stall_cannot_end_a_job_before_it_is_looked_for() -> None:
    environ = {"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "30"}
    with pytest.warns(UserWarning, match=r"ignoring .*: 30 s are less than the 60 s of"):
        assert Config.from_env(environ) == Config()
    environ["HOROVOD_STALL_CHECK_TIME_SECONDS"] = "30"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Config.from_env(environ).stall_shutdown_time_seconds == 30.0


def test_the_key_is_never_shown() -> None:
    secret = "cd" * 32
    assert secret not in repr(Config.from_env({"HVDTORCH_JOB_KEY": secret}))
    with pytest.raises(ValueError, match="HVDTORCH_JOB_KEY: its value must be") as caught:
        Config.from_env({"HVDTORCH_JOB_KEY": secret + "?"})
    assert secret not in str(caught.value)


def test_unknown_names_are_one_warning_that_guesses() -> None:
    environ = {
        "HVDTORCH_FUSION_TRESHOLD": "1",
        "HVDTORCH_QQQQ": "1",
        "HVDTORCH_CYCLE_TIME": "1",
        "HVDTORCH_WITH_CUDA": "0",
        "HOROVOD_TIMELINE": "x",
        "PATH": "/bin",
    }
    text = (
        "ignoring unknown settings: HVDTORCH_FUSION_TRESHOLD "
        "(did you mean HVDTORCH_FUSION_THRESHOLD?), HVDTORCH_QQQQ"
    )
    assert unknown_variables(environ) == text
    with pytest.warns(UserWarning) as caught:
        Config.from_env(environ)
    assert [str(warning.message) for warning in caught] == [text]


def test_known_names_warn_of_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Config.from_env({row.variable: "" for row in SETTINGS})


def test_a_flag_sets_every_name_of_its_setting() -> None:
    rows = {row.attribute: row for row in SETTINGS}
    assert rows["fusion_threshold"].from_flag("32", "--fusion-threshold-mb") == {
        "HVDTORCH_FUSION_THRESHOLD": "33554432",
        "HOROVOD_FUSION_THRESHOLD": "33554432",
    }
    assert set(rows["start_timeout"].from_flag("9", "--start-timeout").values()) == {"9"}
    with pytest.raises(ValueError, match=r"--fusion-threshold-mb: '-1' must be a number >= 0"):
        rows["fusion_threshold"].from_flag("-1", "--fusion-threshold-mb")


def test_no_two_settings_share_a_name() -> None:
    names = [name for row in SETTINGS for name in (*row.variables, *row.flags, *row.switches)]
    assert len(names) == len(set(names))
    assert [row.attribute for row in SETTINGS] == [f.name for f in dataclasses.fields(Config)]
