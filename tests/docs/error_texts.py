"""Finds what hvdtorch may say when something is wrong: the texts of its errors and warnings.

Python is parsed: the arguments of exceptions that are raised, of `warnings.warn`, and of the other
functions in `TELLING`. C++ is searched for string literals that read like a sentence.
Run as a script it prints them, one a line, `...` for what varies.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TELLING = ("warn", "warning", "error", "fail", "_Refusal")  # functions and methods
GAP = "..."

# C++ of which users see nothing by itself: a frame or a log that cannot be decoded ends up in "sent
# a control message that makes no sense (...)", the other files are in no installed module.
_INTERNAL = re.compile(r"DecodeError|static_assert|length_error|system_error|unraisable|WithDoc")
_NOT_INSTALLED = ("channel/local", "transport/memory_link")
_LITERAL = re.compile(r'"((?:[^"\\\n]|\\.)*)"')


@dataclass(frozen=True)
class Text:
    where: str  # file:line
    text: str  # with GAP in the place of what varies

    @property
    def longest(self) -> str:
        """The longest part that does not vary."""
        return max((part.strip(" ,;:.'()") for part in self.text.split(GAP)), key=len)


def all_texts() -> list[Text]:
    """Every text of the package and of its build."""
    python = [ROOT / "setup.py", *sorted((ROOT / "hvdtorch").rglob("*.py"))]
    native = sorted([*(ROOT / "csrc").rglob("*.cc"), *(ROOT / "csrc").rglob("*.h")])
    texts = [text for path in python for text in python_texts(path)]
    for path in native:
        if not any(part in str(path) for part in _NOT_INSTALLED):
            texts += native_texts(path)
    return texts


def python_texts(path: Path) -> Iterator[Text]:
    for node in ast.walk(ast.parse(path.read_text())):
        call = node.exc if isinstance(node, ast.Raise) else node
        if not isinstance(call, ast.Call) or not call.args:
            continue
        name = getattr(call.func, "attr", getattr(call.func, "id", ""))
        if name == "AssertionError":  # for developers
            continue
        if isinstance(node, ast.Raise) or name in TELLING:
            yield Text(f"{path.relative_to(ROOT)}:{call.lineno}", _joined(call.args[0]))


def _joined(node: ast.expr) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value.replace("%s", GAP)
    if isinstance(node, ast.JoinedStr):
        return "".join(_joined(value) for value in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _joined(node.left) + _joined(node.right)
    return GAP


def native_texts(path: Path) -> Iterator[Text]:
    source = re.sub(r"//[^\n]*", "", path.read_text())
    source = re.sub(r'"\s*\n\s*"', "", source)  # one literal over several lines
    for statement in re.split(r"[;{}]\s*\n", source):
        if _INTERNAL.search(statement) or "def(" in statement:
            continue
        for literal in _LITERAL.findall(statement):
            if literal.count(" ") >= 3:
                yield Text(str(path.relative_to(ROOT)), literal.replace(r"\n", GAP))


if __name__ == "__main__":
    for found in all_texts():
        print(f"{found.where}: {found.text}")
