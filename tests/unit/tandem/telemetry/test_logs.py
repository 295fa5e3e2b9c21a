"""JSON log lines for collectors, with the request's id where there is one."""

import json
import logging
import sys

import pytest

from tandem.telemetry.logs import REQUEST_ID, X_REQUEST_ID, JsonLines, about, configure, configured_style


def line(record: logging.LogRecord) -> dict[str, str]:
    text = JsonLines("decode-0").format(record)
    assert "\n" not in text
    fields: dict[str, str] = json.loads(text)
    assert fields.pop("time").endswith("+00:00")
    return fields


def record(**extra: str) -> logging.LogRecord:
    made = logging.LogRecord("a.b", logging.WARNING, __file__, 1, "said %s\n%d", ("ü", 3), None)
    made.__dict__.update(extra)
    return made


def test_log_line_has_process_and_message() -> None:
    expected = {"level": "warning", "process": "decode-0", "logger": "a.b", "message": "said ü\n3"}
    assert line(record()) == expected
    assert line(record(request_id="r1")) == expected | {"request_id": "r1"}


def test_log_line_names_request_of_task() -> None:
    token = REQUEST_ID.set("r2")
    try:
        assert line(record())["request_id"] == "r2"
        assert line(record(request_id="r1"))["request_id"] == "r1"
    finally:
        REQUEST_ID.reset(token)


def test_log_line_has_client_request_id_if_different() -> None:
    shown, own = X_REQUEST_ID.set("mine"), REQUEST_ID.set("r3")
    try:
        assert {key: line(record())[key] for key in ("request_id", "x_request_id")} == {
            "request_id": "r3",
            "x_request_id": "mine",
        }
        X_REQUEST_ID.set("r3")
        assert "x_request_id" not in line(record())
    finally:
        X_REQUEST_ID.reset(shown)
        REQUEST_ID.reset(own)


@pytest.mark.parametrize("name", ["{}", "{}-0", "7:{}-3", "{}-0.1.9f3", "7:{}-0/2", "score 4:{}/prompt", "{}/12.3-0"])
@pytest.mark.parametrize("request_id", ["0123456789abcdef" * 2, "canary-17", "quality-2"])
def test_about_finds_request_id_in_name(name: str, request_id: str) -> None:
    assert about(name.format(request_id)) == {"request_id": request_id}


@pytest.mark.parametrize("name", ["", "fetch/p-0-1/3", "0123456789abcdef" * 3, "7:", "-0"])
def test_about_other_names_have_no_request_id(name: str) -> None:
    assert about(name) == {}


def test_log_line_contains_exception() -> None:
    try:
        raise ValueError("wrong")
    except ValueError:
        logged = logging.LogRecord("a", logging.ERROR, __file__, 1, "failed", (), sys.exc_info())
    assert "ValueError: wrong" in line(logged)["exception"]


@pytest.mark.parametrize("style", ["text", "json"])
def test_logs_follow_configured_format_and_level(style: str, monkeypatch: pytest.MonkeyPatch) -> None:
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    level = root.level
    try:
        configure("warning", "router", style)
        assert configured_style() == style
    finally:
        root.setLevel(level)
