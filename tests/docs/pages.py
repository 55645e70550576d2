"""Reading the documentation's sources: its pages, and the examples in them."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]

_MARK = re.compile(r"<!-- run: np=(\d)(?: setup=(\w+))?( alone)? -->")


@dataclass(frozen=True)
class Example:
    """A block of Python. A comment before it says how it is run: `<!-- run: np=2 setup=model -->`.

    np
        The number of ranks; 0 if there is no such comment.
    setup
        Which of `SETUPS` comes before it.
    alone
        It is a whole script. Else the page's examples with the same np and setup are one script.
    """

    page: Path
    line: int  # of its first line, from 1
    code: str
    np: int
    setup: str
    alone: bool


def examples(page: Path) -> list[Example]:
    """The fenced blocks of Python on a page."""
    found = []
    lines = page.read_text().splitlines()
    start = None
    for number, line in enumerate(lines):
        if start is None and line.startswith("```python"):
            start = number + 1
        elif start is not None and line.startswith("```"):
            before = lines[start - 2] if start >= 2 else ""
            mark = _MARK.fullmatch(before)
            np, setup, alone = mark.groups() if mark else ("0", None, None)
            code = "\n".join(lines[start:number])
            found.append(
                Example(page, start + 1, code, int(np), setup or "init", alone is not None)
            )
            start = None
    return found
