"""The YAML of `hvdrun --config-file`: what each key does, and what is wrong with a file."""

import sys
from pathlib import Path

import pytest

from hvdtorch.launch.cli import main, make_parser
from hvdtorch.launch.config_file import KEYS, ConfigFile, read_config_file

WHOLE = """
controller: gloo
params:
  fusion_threshold_mb: 32
  cycle_time_ms: 3.5
  cache_capacity: 0
  hierarchical_allreduce: false
autotune:
  warmup_samples: 5    # without `enabled` it is off
stall_check:
  warning_time_seconds: 90
library_options:
  thread_affinity: [0, 1]
  gloo_timeout_seconds: 40
  num_nccl_streams:
logging:
  level: INFO
  with_timestamp: false
"""


def read(tmp_path: Path, text: str) -> ConfigFile:
    path = tmp_path / "job.yaml"
    path.write_text(text)
    return read_config_file(str(path))


def test_keys_become_variables_under_all_names(tmp_path: Path) -> None:
    expected = {
        "FUSION_THRESHOLD": "33554432",
        "CYCLE_TIME": "3.5",
        "CACHE_CAPACITY": "0",
        "STALL_CHECK_DISABLE": "0",
        "STALL_CHECK_TIME_SECONDS": "90",
        "THREAD_AFFINITY": "0,1",
        "START_TIMEOUT": "40",
        "LOG_LEVEL": "INFO",
        "LOG_HIDE_TIME": "1",
    }
    variables = {
        f"{prefix}_{name}": text
        for name, text in expected.items()
        for prefix in ("HVDTORCH", "HOROVOD")
    }
    found = read(tmp_path, WHOLE)
    assert found.settings == variables | {"HOROVOD_GLOO_TIMEOUT_SECONDS": "40"}
    assert found.warnings == []


def test_every_key_is_a_flag_of_hvdrun() -> None:
    flags = [flag for action in make_parser()._actions for flag in action.option_strings]
    for keys in KEYS.values():
        for key, meant in keys.items():
            for flag in (meant,) if isinstance(meant, str) else meant:
                assert flag in flags, key


@pytest.mark.parametrize("text", ["", "# nothing\n", "params:\n", "logging: {level: }"])
def test_a_file_may_say_nothing(tmp_path: Path, text: str) -> None:
    assert read(tmp_path, text) == ConfigFile()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("controller: mpi", "controller has no effect: hvdtorch works without MPI"),
        ("timeline: {filename: t}", "timeline.filename has no effect: no timeline is written"),
        ("autotune: {enabled: true}", "autotune.enabled has no effect: autotuning is not"),
        ("params: {cycle_time: 1}", "params.cycle_time has no effect: the key is not known (did"),
        ("parms: {cycle_time_ms: 1}", "not known (did you mean params?)"),
    ],
)
def test_what_has_no_effect_is_said(tmp_path: Path, text: str, says: str) -> None:
    found = read(tmp_path, text)
    assert found.settings == {}
    [warning] = found.warnings
    assert says in warning
    assert str(tmp_path / "job.yaml") in warning


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("controller: nccl", "job.yaml: controller: 'nccl' must be gloo"),
        ("params: {cycle_time_ms: -3}", "params.cycle_time_ms: '-3' must be a number >= 0"),
        ("params: {cache_capacity: 1.5}", "params.cache_capacity: '1.5' must be an integer"),
        ("params: {cache_capacity: true}", "True must be a number or a text"),
        ("stall_check: {enabled: 1}", "stall_check.enabled: 1 must be true or false"),
        ("logging: {level: loud}", "logging.level: 'loud' must be trace or debug"),
        ("params: 3", "job.yaml: params must be a mapping"),
        ("- params", "must be a mapping of sections: params, autotune"),
        ("params: {\n]", "job.yaml:2: not YAML"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ValueError) as caught:
        read(tmp_path, text)
    assert says in str(caught.value)


def test_without_pyyaml_one_sentence_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(SystemExit) as caught:
        main(["-np", "1", "--config-file", str(tmp_path / "x"), "true"])
    assert caught.value.code == 2
    assert "needs PyYAML, which is not installed: pip install pyyaml" in capsys.readouterr().err
