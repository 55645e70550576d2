"""Every setting of hvdtorch. One field of `Config` is one setting; nothing else reads them.

A field states everything there is to know about its setting: the environment variable
(`HVDTORCH_X`), the Horovod variables that mean the same (the first that is set wins, `HVDTORCH_X`
before all), the flags of hvdrun, how text becomes a value, what is legal, the default, the unit and
one sentence of help. The environment, `hvdrun --help` and the documentation are all derived from
`SETTINGS`. To add a setting, add a field. Horovod's variables that are no setting here are in
horovod_variables.py.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import warnings
from collections.abc import Callable, Mapping
from typing import Any

PREFIX = "HVDTORCH_"

# What else may start like this: switches of the build (setup.py), and the tests' own marks.
_NO_SETTINGS = ("HVDTORCH_WITH_CUDA", "HVDTORCH_WERROR", "HVDTORCH_DEBUG", "HVDTORCH_TEST_")


@dataclasses.dataclass(frozen=True)
class Kind:
    """How the text of a variable becomes a value.

    `parse` raises ValueError for what is not legal. `legal` completes "... must be".
    """

    parse: Callable[[str], Any]
    legal: str
    metavar: str = "N"


@dataclasses.dataclass(frozen=True)
class Setting:
    """One row of the table."""

    variable: str  # HVDTORCH_X
    aliases: tuple[str, ...]  # HOROVOD_*, in order of precedence
    kind: Kind
    default: Any
    help: str
    unit: str = ""
    flags: tuple[str, ...] = ()  # flags of hvdrun that take a value
    flag_unit: str = ""  # where it differs from `unit`
    flag_scale: int = 1  # variable = flag * flag_scale
    switches: Mapping[str, str] = dataclasses.field(default_factory=dict)  # flag -> variable's text
    repeatable: bool = False  # the flag may be given several times: a comma list
    secret: bool = False  # the value is never shown
    forgiving: bool = False  # an illegal variable means the default, with a warning
    attribute: str = ""  # the name in Config

    @property
    def variables(self) -> tuple[str, ...]:
        """All variables that carry this setting, in order of precedence."""
        return (self.variable, *self.aliases)

    def parse(self, text: str, source: str) -> Any:
        """The value `text` stands for.

        Args:
            text: what the user wrote.
            source: the variable or flag it was written in, for the error.

        Raises:
            ValueError: naming source, text and what is legal.
        """
        try:
            return self.kind.parse(text.strip())
        except ValueError as error:
            shown = "its value" if self.secret else repr(text)
            reason = f" ({error})" if isinstance(error, _Refusal) else ""
            raise ValueError(f"{source}: {shown} must be {self.kind.legal}{reason}") from None

    def from_flag(self, text: str, flag: str) -> dict[str, str]:
        """The variables that `flag text` on hvdrun's command line sets for the workers.

        All names of the setting are set: scripts may read any of them, and the flag must win
        over each.
        """
        if self.flag_scale != 1:
            try:
                scaled = float(text) * self.flag_scale
            except ValueError:
                raise ValueError(f"{flag}: {text!r} must be a number") from None
            if not math.isfinite(scaled) or scaled < 0:
                raise ValueError(f"{flag}: {text!r} must be a number >= 0")
            text = str(int(scaled))
        self.parse(text, flag)
        return dict.fromkeys(self.variables, text)


class _Refusal(ValueError):
    """A ValueError whose text tells the user more than the list of legal values does."""


def _integer(minimum: int) -> Kind:
    def parse(text: str) -> int:
        value = int(text)
        if value < minimum:
            raise ValueError
        return value

    return Kind(parse, f"an integer >= {minimum}")


def _number(minimum: float) -> Kind:
    def parse(text: str) -> float:
        value = float(text)
        if not math.isfinite(value) or value < minimum:
            raise ValueError
        return value

    return Kind(parse, f"a number >= {minimum:g}", "X")


def _choice(*names: str, refused: Mapping[str, str] | None = None) -> Kind:
    """One of `names`, in any case; `refused` says why names known elsewhere are not here."""

    def parse(text: str) -> str:
        name = text.lower()
        if name in names:
            return name
        raise _Refusal((refused or {})[name]) if name in (refused or {}) else ValueError()

    return Kind(parse, " or ".join(names), "NAME")


def _boolean(text: str) -> bool:
    words = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
    return words[text.lower()] if text.lower() in words else int(text) > 0


def _core_ids(text: str) -> tuple[int, ...]:
    cores = tuple(int(part) for part in text.split(","))
    if any(core < 0 for core in cores):
        raise ValueError
    return cores


def _key(text: str) -> str:
    if len(bytes.fromhex(text)) < 16:
        raise ValueError
    return text


LOG_LEVELS = ("trace", "debug", "info", "warning", "error", "fatal")


BOOLEAN = Kind(_boolean, "an integer (> 0 is true), or true/yes/on/false/no/off", "0|1")
TEXT = Kind(str, "text", "TEXT")
COUNT = _integer(0)
DURATION = _number(0.0)
KEY = Kind(_key, "at least 16 bytes in hexadecimal", "HEX")
CORE_IDS = Kind(_core_ids, "a comma list of core numbers, one for each local rank", "N[,N...]")


def setting(
    name: str,
    *aliases: str,
    kind: Kind,
    default: Any,
    help: str,
    **more: Any,
) -> Any:
    """A field of `Config`: the setting HVDTORCH_<name>, also known by its `aliases`."""
    row = Setting(PREFIX + name, aliases, kind, default, help, **more)
    return dataclasses.field(
        default=default, repr=not row.secret, metadata={"setting": row}, kw_only=True
    )


_EARLY_SHUTDOWN = (
    "ignoring HVDTORCH_STALL_SHUTDOWN_TIME_SECONDS: {0.stall_shutdown_time_seconds:g} s are less "
    "than the {0.stall_check_time_seconds:g} s of HVDTORCH_STALL_CHECK_TIME_SECONDS, after which a "
    "stall is first looked for"
)
_NO_MPI = "hvdtorch works without MPI: unset it or set it to gloo"


@dataclasses.dataclass(frozen=True)
class Config:
    """The settings of one job, read once when it starts. Durations in the unit of their help."""

    fusion_threshold: int = setting(
        "FUSION_THRESHOLD",
        "HOROVOD_FUSION_THRESHOLD",
        kind=COUNT,
        default=128 << 20,
        unit="bytes",
        flags=("--fusion-threshold-mb",),
        flag_unit="MiB",
        flag_scale=1 << 20,
        help="Most data that small tensors are packed into for one transfer; 0 turns packing off.",
    )
    bucket_size: int = setting(
        "BUCKET_SIZE",
        kind=COUNT,
        default=1 << 20,
        unit="bytes",
        help="Size of the buckets in which DistributedOptimizer reduces gradients; those that are "
        "as large, alone; 0 = each alone.",
    )
    cycle_time: float = setting(
        "CYCLE_TIME",
        "HOROVOD_CYCLE_TIME",
        kind=DURATION,
        default=1.0,
        unit="ms",
        flags=("--cycle-time-ms",),
        help="Longest a ready tensor waits for company while an earlier transfer is running.",
    )
    cache_capacity: int = setting(
        "CACHE_CAPACITY",
        "HOROVOD_CACHE_CAPACITY",
        kind=COUNT,
        default=1024,
        unit="tensors",
        flags=("--cache-capacity",),
        help="How many tensors' descriptions are remembered, so that they travel once; 0 = none.",
    )
    inline_limit: int = setting(
        "INLINE_LIMIT",
        kind=COUNT,
        default=1024,
        unit="bytes",
        help="Operations up to this size travel inside the control messages.",
    )
    lone_inline_limit: int = setting(
        "LONE_INLINE_LIMIT",
        kind=COUNT,
        default=131072,
        unit="bytes",
        help="The same for an operation that has no other beside it on its rank.",
    )
    thread_affinity: tuple[int, ...] = setting(
        "THREAD_AFFINITY",
        "HOROVOD_THREAD_AFFINITY",
        kind=CORE_IDS,
        default=(),
        unit="core numbers",
        flags=("--thread-affinity",),
        help="The core that hvdtorch's threads of each local rank run on; default: any.",
    )
    shared_memory: bool = setting(
        "SHARED_MEMORY",
        kind=BOOLEAN,
        default=True,
        switches={"--shared-memory": "1", "--no-shared-memory": "0"},
        help="Ranks of one host exchange data through shared memory, not through sockets.",
    )
    start_timeout: float = setting(
        "START_TIMEOUT",
        "HOROVOD_START_TIMEOUT",
        "HOROVOD_GLOO_TIMEOUT_SECONDS",
        kind=DURATION,
        default=30.0,
        unit="s",
        flags=("--start-timeout", "--gloo-timeout-seconds"),
        help="How long init() waits for the other ranks.",
    )
    disable_group_fusion: bool = setting(
        "DISABLE_GROUP_FUSION",
        "HOROVOD_DISABLE_GROUP_FUSION",
        kind=BOOLEAN,
        default=False,
        help="Pack the tensors of a grouped call only with each other, and never with others.",
    )
    join_divisor: str = setting(
        "JOIN_DIVISOR",
        kind=_choice("size", "active"),
        default="size",
        help="What Average divides by while ranks have joined: size, all ranks of the process set; "
        "active, those that still take part.",
    )
    stall_check_disable: bool = setting(
        "STALL_CHECK_DISABLE",
        "HOROVOD_STALL_CHECK_DISABLE",
        kind=BOOLEAN,
        default=False,
        switches={"--stall-check": "0", "--no-stall-check": "1"},
        help="Do not report operations that some ranks wait for and others have not submitted.",
    )
    stall_check_time_seconds: float = setting(
        "STALL_CHECK_TIME_SECONDS",
        "HOROVOD_STALL_CHECK_TIME_SECONDS",
        kind=DURATION,
        default=60.0,
        unit="s",
        flags=("--stall-check-warning-time-seconds",),
        help="How long an operation waits for a rank before that is reported.",
    )
    stall_shutdown_time_seconds: float = setting(
        "STALL_SHUTDOWN_TIME_SECONDS",
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
        kind=DURATION,
        default=0.0,
        unit="s",
        flags=("--stall-check-shutdown-time-seconds",),
        help="How long an operation waits for a rank before the job ends; 0 = for ever.",
    )
    operation_timeout: float = setting(
        "OPERATION_TIMEOUT",
        kind=DURATION,
        default=0.0,
        unit="s",
        help="How long a running transfer may make no progress before it fails; 0 = for ever.",
    )
    log_level: str = setting(
        "LOG_LEVEL",
        "HOROVOD_LOG_LEVEL",
        kind=_choice(*LOG_LEVELS),
        forgiving=True,  # a typo in a log level is no reason to lose a job
        default="warning",
        flags=("--log-level",),
        help=f"Least severity that is logged: {' '.join(LOG_LEVELS)}.",
    )
    log_hide_time: bool = setting(
        "LOG_HIDE_TIME",
        "HOROVOD_LOG_HIDE_TIME",
        kind=BOOLEAN,
        default=False,
        switches={
            "--log-with-timestamp": "0",
            "--log-without-timestamp": "1",
            "--no-log-hide-timestamp": "0",
            "--log-hide-timestamp": "1",
        },
        help="Leave the time out of log lines.",
    )
    controller: str = setting(
        "CONTROLLER",
        "HOROVOD_CONTROLLER",
        kind=_choice("gloo", refused={"mpi": _NO_MPI}),
        default="gloo",
        help="What coordinates the ranks.",
    )
    cpu_operations: str = setting(
        "CPU_OPERATIONS",
        "HOROVOD_CPU_OPERATIONS",
        kind=_choice(
            "gloo",
            refused={"mpi": _NO_MPI, "ccl": "hvdtorch has no oneCCL: unset it or set it to gloo"},
        ),
        default="gloo",
        help="What moves tensors that are in host memory.",
    )
    interface: str = setting(
        "INTERFACE",
        "HOROVOD_GLOO_IFACE",
        kind=TEXT,
        default="",
        unit="names",
        flags=("--network-interfaces", "--network-interface"),
        repeatable=True,
        help="Network interfaces to use, a comma list; default: chosen by the system.",
    )
    host_id: str = setting(
        "HOST_ID",
        kind=TEXT,
        default="",
        help="Ranks with equal ids count as being on one host; default: found from the system.",
    )
    hostname: str = setting(
        "HOSTNAME",
        "HOROVOD_HOSTNAME",
        kind=TEXT,
        default="",
        help="This host's name in messages; default: the system's.",
    )
    job_key: str = setting(
        "JOB_KEY",
        kind=KEY,
        default="",
        secret=True,
        help="What the ranks of a job prove to each other that they know; hvdrun makes one up.",
    )
    echo_fd: int = setting(
        "ECHO_FD",
        kind=COUNT,
        default=-1,
        help="Set by hvdrun: where a rank that fails because another rank failed says so.",
    )

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Config:
        """Read every setting; a variable that is empty counts as not set.

        Warns once about HVDTORCH_ variables that are no setting.

        Args:
            environ: the variables; default: this process's environment.

        Raises:
            ValueError: naming the variable, its value and what is legal.
        """
        environ = os.environ if environ is None else environ
        unknown = unknown_variables(environ)
        if unknown:
            warnings.warn(unknown, stacklevel=2)
        values: dict[str, Any] = {}
        for row in SETTINGS:
            for variable in row.variables:
                if environ.get(variable, "").strip():
                    try:
                        values[row.attribute] = row.parse(environ[variable], variable)
                    except ValueError as error:
                        if not row.forgiving:
                            raise
                        warnings.warn(f"{error}; using {row.default}", stacklevel=2)
                    break
        config = cls(**values)
        if 0 < config.stall_shutdown_time_seconds < config.stall_check_time_seconds:
            warnings.warn(_EARLY_SHUTDOWN.format(config), stacklevel=2)
            config = dataclasses.replace(config, stall_shutdown_time_seconds=0.0)
        return config


SETTINGS: tuple[Setting, ...] = tuple(
    dataclasses.replace(field.metadata["setting"], attribute=field.name)
    for field in dataclasses.fields(Config)
)


def unknown_variables(environ: Mapping[str, str]) -> str:
    """One warning that names every HVDTORCH_ variable that is no setting; "" if there is none."""
    known = [row.variable.removeprefix(PREFIX) for row in SETTINGS]
    parts = []
    for variable in sorted(environ):
        name = variable.removeprefix(PREFIX)
        if name == variable or name in known or variable.startswith(_NO_SETTINGS):
            continue
        close = difflib.get_close_matches(name, known, n=1)
        parts.append(f"{variable} (did you mean {PREFIX}{close[0]}?)" if close else variable)
    return f"ignoring unknown settings: {', '.join(parts)}" if parts else ""
