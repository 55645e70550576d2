"""The log: levels, format, destinations, and an application's own handler."""

import logging
import re

import pytest

from hvdtorch import log


@pytest.fixture(autouse=True)
def untouched():
    before = log.logger.handlers[:], log.logger.propagate, log.logger.level
    log.logger.handlers.clear()
    yield
    log.logger.handlers[:], log.logger.propagate, log.logger.level = before


def test_lines_and_destinations(capsys):
    log.configure("info", hide_time=False)
    log.logger.debug("too little")
    log.logger.info("rank %d", 3)
    log.logger.warning("careful")
    said = capsys.readouterr()
    stamp = r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{6}: "
    assert re.fullmatch(stamp + r"I test_log\.py:\d+\] rank 3\n", said.out)
    assert re.fullmatch(stamp + r"W test_log\.py:\d+\] careful\n", said.err)


def test_without_time_and_at_the_lowest_level(capsys):
    log.configure("warning", hide_time=False)
    log.configure("trace", hide_time=True)
    log.logger.log(log.TRACE, "all of it")
    assert re.fullmatch(r"\[T test_log\.py:\d+\] all of it\n", capsys.readouterr().out)


def test_an_applications_handler_is_left_alone(capsys):
    records = []
    handler = logging.Handler()
    handler.emit = records.append
    log.logger.addHandler(handler)
    log.configure("info", hide_time=True)
    log.logger.warning("mine")
    assert [record.getMessage() for record in records] == ["mine"]
    assert capsys.readouterr() == ("", "")
