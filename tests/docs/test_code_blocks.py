"""The Python in the documentation runs, and its assertions hold."""

from pathlib import Path

import pytest
from pages import PAGES, ROOT, Example, examples
from setups import SETUPS
from support.scripts import run_script


def scripts() -> list[tuple[str, list[Example]]]:
    """The examples, grouped into jobs."""
    jobs: dict[str, list[Example]] = {}
    for page in PAGES:
        for example in examples(page):
            name = f"{page.relative_to(ROOT)}-np{example.np}-{example.setup}"
            if example.alone:
                name += f"-line{example.line}"
            jobs.setdefault(name, []).append(example)
    return list(jobs.items())


def test_every_example_says_how_it_is_run() -> None:
    found = [example for page in PAGES for example in examples(page)]
    assert len(found) >= 15
    assert [f"{e.page}:{e.line}" for e in found if e.np == 0] == []
    for page in PAGES:
        marks = page.read_text().count("<!-- run:")
        assert marks == sum(example.np > 0 for example in examples(page)), page


@pytest.mark.parametrize(
    "job", [pytest.param(job, id=name) for name, job in scripts() if job[0].np > 0]
)
def test_example(job: list[Example], tmp_path: Path) -> None:
    first = job[0]
    parts = [] if first.alone else [SETUPS[first.setup]]
    for example in job:
        # Compiled under the page's name and lines, so that a traceback points there.
        code = "\n" * (example.line - 1) + example.code
        parts.append(f"exec(compile({code!r}, {str(example.page)!r}, 'exec'))")
    script = tmp_path / "example.py"
    script.write_text("\n".join([f"import os; os.chdir({str(tmp_path)!r})", *parts]))
    result = run_script(first.np, script)
    assert result.returncodes == [0] * first.np, result.stdout
