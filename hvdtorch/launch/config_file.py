"""`--config-file FILE`: flags written down in YAML, with the sections and keys of horovodrun.

Every key stands for a flag, or, if its value is true or false, for one of two; a flag on the
command line wins over the file. Keys without a value count as absent.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hvdtorch.config import SETTINGS
from hvdtorch.launch.horovodrun_flags import UNUSED

# section -> key -> the flag, or the flags for true and for false
KEYS: Mapping[str, Mapping[str, str | tuple[str, str]]] = {
    "params": {
        "fusion_threshold_mb": "--fusion-threshold-mb",
        "cycle_time_ms": "--cycle-time-ms",
        "cache_capacity": "--cache-capacity",
        "hierarchical_allreduce": ("--hierarchical-allreduce", "--no-hierarchical-allreduce"),
        "hierarchical_allgather": ("--hierarchical-allgather", "--no-hierarchical-allgather"),
        "torus_allreduce": ("--torus-allreduce", "--no-torus-allreduce"),
    },
    "autotune": {
        "enabled": ("--autotune", "--no-autotune"),
        "log_file": "--autotune-log-file",
        "warmup_samples": "--autotune-warmup-samples",
        "steps_per_sample": "--autotune-steps-per-sample",
        "bayes_opt_max_samples": "--autotune-bayes-opt-max-samples",
        "gaussian_process_noise": "--autotune-gaussian-process-noise",
    },
    "timeline": {
        "filename": "--timeline-filename",
        "mark_cycles": ("--timeline-mark-cycles", "--no-timeline-mark-cycles"),
    },
    "stall_check": {
        "enabled": ("--stall-check", "--no-stall-check"),
        "warning_time_seconds": "--stall-check-warning-time-seconds",
        "shutdown_time_seconds": "--stall-check-shutdown-time-seconds",
    },
    "library_options": {
        "mpi_threads_disable": ("--mpi-threads-disable", "--no-mpi-threads-disable"),
        "num_nccl_streams": "--num-nccl-streams",
        "thread_affinity": "--thread-affinity",
        "gloo_timeout_seconds": "--gloo-timeout-seconds",
    },
    "logging": {
        "level": "--log-level",
        "with_timestamp": ("--log-with-timestamp", "--log-without-timestamp"),
    },
}


@dataclass
class ConfigFile:
    """What a file says: variables for the ranks, and what of it has no effect."""

    settings: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


def read_config_file(path: str) -> ConfigFile:
    """The settings in the file at `path`.

    Raises:
        ValueError: naming the file and, where there is one, the key and the line: the file cannot
            be read, is no YAML, has another shape, or has a value that is not legal.
        ModuleNotFoundError: PyYAML is not installed; the text says how to get it.
    """
    result = ConfigFile()
    for section, keys in _load(path).items():
        where = f"{path}: {section}"
        if keys is None:
            continue
        if section == "controller":
            _controller(str(keys), where, result)
        elif section not in KEYS:
            result.warnings.append(_unknown(where, section, [*KEYS, "controller"]))
        elif not isinstance(keys, dict):
            raise ValueError(f"{where} must be a mapping of keys to values")
        else:
            _section(section, keys, where, result)
    return result


def _load(path: str) -> dict[str, Any]:
    try:
        import yaml
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "--config-file needs PyYAML, which is not installed: pip install pyyaml"
        ) from None
    try:
        content = yaml.safe_load(Path(path).read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read the configuration file {path}: {error}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark is not None else path
        raise ValueError(f"{where}: not YAML ({getattr(error, 'problem', error)})") from None
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise ValueError(f"{path} must be a mapping of sections: {', '.join(KEYS)}")
    return content


def _controller(name: str, where: str, result: ConfigFile) -> None:
    if name.lower() == "mpi":
        _apply("--mpi", "", where, result)
    elif name.lower() != "gloo":
        raise ValueError(f"{where}: {name!r} must be gloo")


def _section(section: str, keys: dict[str, Any], where: str, result: ConfigFile) -> None:
    known = KEYS[section]
    if section == "autotune" and not keys.get("enabled"):
        keys = {}  # the others have a meaning only when it is on
    if section == "stall_check" and keys.get("enabled") is None:
        keys = {**keys, "enabled": True}
    for key, value in keys.items():
        source = f"{where}.{key}"
        flag = known.get(key)
        if flag is None:
            result.warnings.append(_unknown(source, str(key), known))
        elif value is None:
            continue
        elif isinstance(flag, tuple):
            if not isinstance(value, bool):
                raise ValueError(f"{source}: {value!r} must be true or false")
            _apply(flag[0] if value else flag[1], "", source, result)
        elif isinstance(value, bool | dict):
            raise ValueError(f"{source}: {value!r} must be a number or a text")
        else:
            text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
            _apply(flag, text, source, result)


def _apply(flag: str, text: str, source: str, result: ConfigFile) -> None:
    """Add what `flag text` on the command line would do."""
    for unused in UNUSED:
        if unused.flag == flag:
            if unused.why:
                result.warnings.append(f"{source} has no effect: {unused.why}")
            return
    for row in SETTINGS:
        if flag in row.flags:
            result.settings |= row.from_flag(text, source)
            return
        if flag in row.switches:
            result.settings |= dict.fromkeys(row.variables, row.switches[flag])
            return
    raise AssertionError(f"{flag} is no flag of hvdrun")


def _unknown(source: str, key: str, known: Any) -> str:
    close = difflib.get_close_matches(key, list(known), n=1)
    hint = f" (did you mean {close[0]}?)" if close else ""
    return f"{source} has no effect: the key is not known{hint}"
