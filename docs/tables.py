"""Fills the documentation's tables from the tables of the code. A hook of mkdocs.

A line `<!-- table: NAME -->` of a page is replaced by the table of that name in `TABLES`. What is
imported here needs neither torch nor the native module.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from hvdtorch.config import SETTINGS, Setting
from hvdtorch.horovod_variables import BUILD_PREFIXES, BUILD_WHY, VARIABLES
from hvdtorch.launch.config_file import KEYS
from hvdtorch.launch.horovodrun_flags import REFUSED, UNUSED

_MARK = re.compile(r"^<!-- table: (\S+) -->$", re.MULTILINE)


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """A Markdown table."""
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join(
        f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines
    )


def code(words: Iterable[str]) -> str:
    return "<br>".join(f"`{word}`" for word in words)


def default_of(row: Setting) -> str:
    """The default, as the user would write it, and its unit."""
    value: Any = row.default
    if value in ("", (), -1):
        return "not set"
    if isinstance(value, bool):
        value = int(value)
    shown = f"{value:g}" if isinstance(value, float) else str(value)
    return f"`{shown}` {row.unit}".strip()


def settings() -> str:
    """A section for each setting."""
    parts = []
    for row in SETTINGS:
        facts = [("Legal", row.kind.legal), ("Default", default_of(row))]
        if row.unit:
            facts.insert(0, ("Unit", row.unit))
        if row.aliases:
            facts.append(("Also read", code(row.aliases)))
        flags = list(row.flags)
        if flags:
            unit = f" ({row.flag_unit})" if row.flag_unit else ""
            facts.append(("hvdrun", code(f"{flag} {row.kind.metavar}" for flag in flags) + unit))
        if row.switches:
            switches = (f"`{flag}` sets `{text}`" for flag, text in row.switches.items())
            facts.append(("hvdrun", "<br>".join(switches)))
        parts.append(f"### `{row.variable}`\n\n{row.help}\n\n" + table(("", ""), facts))
    return "\n\n".join(parts)


def overview() -> str:
    """All settings, one a line."""
    return table(
        ("variable", "default", "meaning"),
        (
            (f"[`{row.variable}`](#{row.variable.lower()})", default_of(row), row.help)
            for row in SETTINGS
        ),
    )


def horovod_variables() -> str:
    rows = [(f"`{v.name}`", v.why, "warning" if v.missed else "info") for v in VARIABLES]
    rows.append((code(f"{prefix}*" for prefix in BUILD_PREFIXES), BUILD_WHY, "info"))
    return table(("variable", "why it has no effect", "said at level"), rows)


def unused_flags() -> str:
    return table(
        ("flag", "why it has no effect"),
        ((f"`{u.flag}`", u.why or "it asks for what happens anyway; not a word") for u in UNUSED),
    )


def refused_flags() -> str:
    return table(("flag", "hvdrun ends with"), ((f"`{f}`", why) for f, why in REFUSED.items()))


def config_file() -> str:
    rows = []
    for section, keys in KEYS.items():
        for key, flag in keys.items():
            meant = (flag,) if isinstance(flag, str) else flag
            rows.append((f"`{section}`", f"`{key}`", " or ".join(f"`{word}`" for word in meant)))
    return table(("section", "key", "stands for"), rows)


TABLES: dict[str, Callable[[], str]] = {
    "settings": settings,
    "settings-overview": overview,
    "horovod-variables": horovod_variables,
    "unused-flags": unused_flags,
    "refused-flags": refused_flags,
    "config-file": config_file,
}


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by mkdocs for each page. Raises KeyError for a table that does not exist."""
    return _MARK.sub(lambda mark: TABLES[mark.group(1)](), markdown)
