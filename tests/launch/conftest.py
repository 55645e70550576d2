"""`hvdrun`, the fixture of the launcher's tests."""

from collections.abc import Iterator
from contextlib import suppress

import pytest
from hvdrun_runner import Hvdrun
from support.processes import kill_tagged


@pytest.fixture
def hvdrun() -> Iterator[Hvdrun]:
    runner = Hvdrun()
    yield runner
    for process in runner.started:
        with suppress(ProcessLookupError):
            process.kill()
        process.wait()
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
    left = runner.left()
    kill_tagged(runner.tag)
    assert left == [], f"processes {left} outlived their job"
