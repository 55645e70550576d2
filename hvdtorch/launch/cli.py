"""The command line: `hvdrun -np 4 [flags] program arguments...`.

Flags come first. The first word that is no flag, and everything after it, is the command: it is
kept as a list of words from end to end, and no shell ever sees it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import secrets
import socket
import sys
from collections.abc import Sequence
from typing import Any

from hvdtorch.buildinfo import build_text, check_build
from hvdtorch.config import SETTINGS, Setting
from hvdtorch.launch import hosts, processes
from hvdtorch.launch.config_file import ConfigFile, read_config_file
from hvdtorch.launch.environ import JobSpec, rank_environment
from hvdtorch.launch.horovodrun_flags import REFUSED, UNUSED
from hvdtorch.launch.job import SETTLE_TIME, Job, Options
from hvdtorch.launch.output import Console, Sink, open_rank_files
from hvdtorch.version import __version__

_MOST_RANKS = 1 << 16  # far beyond what a host can run, but a slip of the finger ends in an error


class _Refuse(argparse.Action):
    """A flag that ends hvdrun with one sentence (`const`)."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        parser.error(f"{option_string}: {self.const}")


class _Unused(argparse.Action):
    """A flag that has no effect; `const`, unless empty, is the reason to tell the user."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        if self.const:
            warning = f"{option_string} has no effect: {self.const}"
            namespace.warnings = [*namespace.warnings, warning]


class _Set(argparse.Action):
    """A flag of a setting (`setting`): adds the variables it stands for to `settings`."""

    def __init__(self, *args: Any, setting: Setting, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.setting = setting

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        if self.nargs == 0:
            text = self.setting.switches[option_string]
            variables = dict.fromkeys(self.setting.variables, text)
        else:
            before = namespace.settings.get(self.setting.variable)
            if self.setting.repeatable and before is not None:
                values = f"{before},{values}"
            try:
                variables = self.setting.from_flag(values, option_string)
            except ValueError as error:
                parser.error(str(error))
        namespace.settings = {**namespace.settings, **variables}


def _count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= _MOST_RANKS:
        raise argparse.ArgumentTypeError(f"{text!r} must be an integer from 1 to {_MOST_RANKS}")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        raise argparse.ArgumentTypeError(f"{text!r} must be a number of seconds >= 0")
    return value


def make_parser() -> argparse.ArgumentParser:
    """The parser of everything that stands before the command."""
    parser = argparse.ArgumentParser(
        prog="hvdrun",
        usage="hvdrun -np N [flags] program arguments...",
        description="Start N ranks of a program on this host, forward their output line by line, "
        "and end them together.",
        epilog="A flag that is not given sets no variable. Settings without a flag, and their "
        "defaults, are variables that start with HVDTORCH_: see the documentation.",
        allow_abbrev=False,
    )
    parser.set_defaults(settings={}, warnings=[])
    add = parser.add_argument
    add("-v", "--version", action="store_true", help="print the version and exit")
    add("-np", "--num-proc", type=_count, metavar="N", help="number of ranks")
    add("-cb", "--check-build", action="store_true", help="say what this build can do, and exit")
    add("--json", action="store_true", help="with --check-build: as JSON")
    add("--verbose", action="store_true", help="tell what is being done")
    add(
        "--config-file",
        metavar="FILE",
        help="settings in YAML, with the keys of horovodrun's; flags win over them",
    )
    add(
        "--as-horovod",
        action="store_true",
        help="in the ranks `import horovod.torch` means hvdtorch: for scripts written for Horovod",
    )
    where = parser.add_argument_group("where").add_mutually_exclusive_group()
    where.add_argument("-H", "--hosts", metavar="HOST:SLOTS", help="default: localhost:N")
    where.add_argument(
        "-hostfile", "--hostfile", metavar="FILE", help="a file of lines `name slots=N`"
    )
    group = parser.add_argument_group("output")
    group.add_argument(
        *("--output-filename", "--output-dir"),
        metavar="DIR",
        help="also write the output to DIR/rank.<rank>/stdout and stderr",
    )
    group.add_argument(
        *("-prefix-timestamp", "--prefix-output-with-timestamp"),
        action="store_true",
        help="write the time before each line",
    )
    group = parser.add_argument_group("ending")
    group.add_argument(
        "--grace-time",
        type=_seconds,
        default=Options.grace_time,
        metavar="S",
        help="time from asking the ranks to end to killing them (default: %(default)g s); when one "
        f"has failed, the others are asked after {SETTLE_TIME:g} s",
    )
    _add_settings(parser.add_argument_group("settings of the ranks"))
    group = parser.add_argument_group(
        "accepted for compatibility",
        "Flags of horovodrun that have no effect here, with a warning; the documentation lists "
        "them.",
    )
    for unused in UNUSED:
        group.add_argument(
            unused.flag,
            action=_Unused,
            nargs=None if unused.takes_value else 0,
            const=unused.why,
            dest="warnings",
            default=argparse.SUPPRESS,
            help=argparse.SUPPRESS,
        )
    for flag, sentence in REFUSED.items():
        add(flag, action=_Refuse, nargs="?", const=sentence, help=argparse.SUPPRESS)
    return parser


def _add_settings(group: argparse._ArgumentGroup) -> None:
    for row in SETTINGS:
        default = f", default {_default(row)}" if row.default else ""
        text = f"{row.help} Sets {row.variable}{default}.".replace("%", "%%")
        if row.flags:
            group.add_argument(
                *row.flags,
                action=_Set,
                setting=row,
                metavar=row.kind.metavar,
                dest="settings",
                default=argparse.SUPPRESS,
                help=text,
            )
        for flag, value in row.switches.items():
            group.add_argument(
                flag,
                action=_Set,
                setting=row,
                nargs=0,
                dest="settings",
                default=argparse.SUPPRESS,
                help=f"{row.help if value == '1' else ''} Sets {row.variable}={value}.".strip(),
            )


def _default(row: Setting) -> str:
    value = row.default / row.flag_scale if row.flag_scale != 1 else row.default
    shown = f"{value:g}" if isinstance(value, float) else str(value)
    return f"{shown} {row.flag_unit or row.unit}".strip()


def split_command(
    parser: argparse.ArgumentParser, argv: Sequence[str]
) -> tuple[list[str], list[str]]:
    """hvdrun's own flags, and the command: from the first word on that is no flag or flag's value.

    argparse's own REMAINDER is not used: it re-reads words of the command as flags in some orders.
    """
    takes_value = {
        flag: action.nargs != 0 for action in parser._actions for flag in action.option_strings
    }
    index = 0
    while index < len(argv):
        word = argv[index]
        if word == "--":
            return list(argv[:index]), list(argv[index + 1 :])
        if not word.startswith("-"):
            break
        index += 2 if takes_value.get(word, False) else 1
    return list(argv[:index]), list(argv[index:])


def main(argv: Sequence[str] | None = None) -> int:
    """Run hvdrun.

    Args:
        argv: the words after the program's name; default: this process's.

    Returns:
        The exit status: 0, that of the first rank that failed, 128 + the number of the signal that
        killed it or that hvdrun was sent, 126 or 127 for a command that cannot be run.
        A command line that makes no sense ends with SystemExit(2).
    """
    processes.open_standard_files()
    parser = make_parser()
    flags, command = split_command(parser, sys.argv[1:] if argv is None else argv)
    args = parser.parse_args(flags)
    if args.version:
        print(__version__)
        return 0
    if args.check_build:
        build = check_build()
        print(json.dumps(build, indent=2) if args.json else build_text(build))
        return 0
    if args.json:
        parser.error("--json goes with --check-build")
    if args.num_proc is None:
        parser.error("-np is missing: the number of ranks")
    if not command:
        parser.error("the command is missing: hvdrun -np N [flags] program arguments...")
    if not command[0]:
        parser.error("the command's first word is empty")
    try:
        hostname = _hostname(args)
        file = read_config_file(args.config_file) if args.config_file else ConfigFile()
        files = _open_files(args)
    except (ValueError, OSError, ModuleNotFoundError) as error:
        parser.error(str(error))
    args.settings = {**file.settings, **args.settings}
    for warning in file.warnings + args.warnings:
        print(f"hvdrun: warning: {warning}", file=sys.stderr, flush=True)
    return _run(args, command, hostname, files)


def _hostname(args: argparse.Namespace) -> str:
    found = [hosts.Host("localhost", args.num_proc)]
    if args.hosts is not None:
        found = hosts.parse_hosts(args.hosts)
    elif args.hostfile is not None:
        found = hosts.read_hostfile(args.hostfile)
    return hosts.check_hosts(found, args.num_proc)


def _open_files(args: argparse.Namespace) -> list[list[Sink]]:
    if args.output_filename is None:
        return []
    return [
        open_rank_files(args.output_filename, rank, args.num_proc) for rank in range(args.num_proc)
    ]


def _run(
    args: argparse.Namespace, command: list[str], hostname: str, files: list[list[Sink]]
) -> int:
    listener = socket.create_server(("127.0.0.1", 0), backlog=socket.SOMAXCONN)
    job = JobSpec(
        size=args.num_proc,
        hostname=hostname,
        port=listener.getsockname()[1],
        key=secrets.token_hex(32),
        settings=args.settings,
        as_horovod=args.as_horovod,
    )
    environments = [rank_environment(os.environ, job, rank) for rank in range(job.size)]
    options = Options(
        grace_time=args.grace_time,
        timestamps=args.prefix_output_with_timestamp,
        verbose=args.verbose
        or args.settings.get("HVDTORCH_LOG_LEVEL", "").lower() in ("trace", "debug", "info"),
    )
    return Job(command, environments, listener, Console(), files, options).run()
