"""Finds what hvdtorch may say when something is wrong: the texts of its errors and warnings.

That is taken to be every string that reads like a sentence. Python is parsed, and docstrings and
the help of command lines are left out; C++ is searched for literals.
Run as a script it prints them, one a line, `...` for what varies.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GAP = "..."

# C++ of which users see nothing by itself: a frame or a log that cannot be decoded ends up in "sent
# a control message that makes no sense (...)", the other files are in no installed module.
_INTERNAL = re.compile(
    r"DecodeError|static_assert|logic_error|length_error|system_error|unraisable|WithDoc"
)
_NOT_INSTALLED = ("channel/local", "transport/memory_link")
# What is said of a build in order, and parts of texts that are found whole elsewhere.
_NOTHING_WRONG = (
    *("GCC 11 or newer", "#include", "... files in csrc", "hvdtorch build summary"),
    *("built for PyTorch", "none in this PyTorch", "the ... optimizer at 0x"),
    "DistributedOptimizer with op=",
)
_LITERAL = re.compile(r'"((?:[^"\\\n]|\\.)*)"')


@dataclass(frozen=True)
class Text:
    where: str  # file:line
    text: str  # with GAP in the place of what varies

    @property
    def longest(self) -> str:
        """The longest part that does not vary."""
        return max((part.strip(" ,;:.'()") for part in self.text.split(GAP)), key=len)


def all_texts(words: int = 3) -> list[Text]:
    """The texts of the package and of its build that have so many words in a row."""
    python = [ROOT / "setup.py", *sorted((ROOT / "hvdtorch").rglob("*.py"))]
    native = sorted([*(ROOT / "csrc").rglob("*.cc"), *(ROOT / "csrc").rglob("*.h")])
    texts = [text for path in python for text in python_texts(path)]
    for path in native:
        if not any(part in str(path) for part in _NOT_INSTALLED):
            texts += native_texts(path)
    return [
        text
        for text in texts
        if text.longest.count(" ") + 1 >= words and not text.text.startswith(_NOTHING_WRONG)
    ]


def python_texts(path: Path) -> Iterator[Text]:
    tree = ast.parse(path.read_text())
    silent: set[ast.AST] = set()
    for node in ast.walk(tree):
        is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        is_help = isinstance(node, ast.keyword) and node.arg in ("help", "description", "epilog")
        if is_docstring or is_help:
            silent.add(node.value)
        elif isinstance(node, ast.Call) and _name(node.func) in _TALK:
            silent.update(node.args)
    yield from _sentences(tree, silent, str(path.relative_to(ROOT)))


# What they are given is for developers, or for those who asked for it; not about something wrong.
_TALK = ("AssertionError", "print", "info", "debug", "_tell", "add_argument_group")


def _name(function: ast.expr) -> str:
    return str(getattr(function, "attr", getattr(function, "id", "")))


def _sentences(node: ast.AST, silent: set[ast.AST], where: str) -> Iterator[Text]:
    if node in silent:
        return
    is_sum = isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add)
    if is_sum or isinstance(node, ast.Constant | ast.JoinedStr):
        text = Text(f"{where}:{node.lineno}", _joined(node))
        if " " in text.longest:
            yield text
            return
    for child in ast.iter_child_nodes(node):
        yield from _sentences(child, silent, where)


def _joined(node: ast.AST) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.sub(r"%s|\{[^{} ]+\}|\n", GAP, node.value)
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
            yield Text(str(path.relative_to(ROOT)), literal.replace(r"\n", GAP))


if __name__ == "__main__":
    for found in all_texts():
        print(f"{found.where}: {found.text}")
