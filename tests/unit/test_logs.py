"""Lines for collectors: one JSON object each, with the request's id where there is one."""

import json
import logging
import sys

import pytest

from tandem.logs import REQUEST_ID, JsonLines, configure, configured_style


def line(record: logging.LogRecord) -> dict[str, str]:
    text = JsonLines("decode-0").format(record)
    assert "\n" not in text
    told: dict[str, str] = json.loads(text)
    assert told.pop("time").endswith("+00:00")
    return told


def record(**extra: str) -> logging.LogRecord:
    made = logging.LogRecord("a.b", logging.WARNING, __file__, 1, "said %s\n%d", ("ü", 3), None)
    made.__dict__.update(extra)
    return made


def test_a_line_says_who_and_what() -> None:
    expected = {"level": "warning", "process": "decode-0", "logger": "a.b", "message": "said ü\n3"}
    assert line(record()) == expected
    assert line(record(request_id="r1")) == expected | {"request_id": "r1"}


def test_the_request_that_a_task_serves_is_named() -> None:
    token = REQUEST_ID.set("r2")
    try:
        assert line(record())["request_id"] == "r2"
        assert line(record(request_id="r1"))["request_id"] == "r1"
    finally:
        REQUEST_ID.reset(token)


def test_an_exception_is_within_its_line() -> None:
    try:
        raise ValueError("wrong")
    except ValueError:
        logged = logging.LogRecord("a", logging.ERROR, __file__, 1, "failed", (), sys.exc_info())
    assert "ValueError: wrong" in line(logged)["exception"]


@pytest.mark.parametrize("style", ["text", "json"])
def test_a_process_logs_as_it_is_told(style: str, monkeypatch: pytest.MonkeyPatch) -> None:
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    level = root.level
    try:
        configure("warning", "router", style)
        assert configured_style() == style
    finally:
        root.setLevel(level)
