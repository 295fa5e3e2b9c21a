"""Watched files: after any error of reading, the next change is noticed."""

import asyncio
import os
import threading
from pathlib import Path

import pytest

from router.access.file_trust import QUIET_S
from router.access.watched_files import FileWatcher, WatchedFile
from tandem.config.source.regular_file import read_regular_text
from tandem.errors import ConfigError, UnreadableFile


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    "error", [ConfigError("no"), FileNotFoundError("gone"), ValueError("a-secret"), RuntimeError("a-secret")]
)
async def test_watched_file_invalid_content_is_skipped_until_next_change(
    tmp_path: Path, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    path, applied = tmp_path / "file", list[str]()
    path.write_text("first")

    def load() -> str:
        if (text := path.read_text()) == "bad":
            raise error
        return text

    file = WatchedFile(what="keys", paths=[path], load=load, apply=applied.append)
    async with FileWatcher([file], check_s=3600.0) as live:
        path.write_text("bad")
        await live.check()
        path.write_text("the third")
        await live.check()
        counts = reloads(live)
    assert applied == ["first", "the third"]
    assert counts == {"taken": 1, "refused": 1}
    assert "a-secret" not in caplog.text


async def test_file_watcher_notified_checks_at_once(tmp_path: Path) -> None:
    path, applied = tmp_path / "file", asyncio.Queue[str]()
    path.write_text("first")
    file = WatchedFile(what="keys", paths=[path], load=path.read_text, apply=applied.put_nowait)
    async with FileWatcher([file], check_s=3600.0) as live:
        assert await applied.get() == "first"
        for text in ("the second", "third"):
            path.write_text(text)
            live.check_now()
            assert await applied.get() == text


async def test_watched_file_unreadable_is_retried_without_change(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A disk that fails and recovers leaves every mtime unchanged."""
    path, applied, is_broken = tmp_path / "file", list[str](), True
    path.write_text("text")

    def load() -> str:
        if applied and is_broken:
            raise UnreadableFile("Input/output error")
        return path.read_text()

    clock = Clock()
    file = WatchedFile(what="keys", paths=[path], load=load, apply=applied.append, trust_s=300.0)
    async with FileWatcher([file], check_s=3600.0, clock=clock) as live:
        os.utime(path)
        for _ in range(3):
            clock.now += 100.0
            await live.check()
        assert (applied, reloads(live)) == (["text"], {"taken": 0, "refused": 1})
        assert stale_s(live) == 300.0
        assert live.distrust_reason("keys") == "not read for 300 s"
        is_broken = False
        await live.check()
        assert applied == ["text", "text"]
        assert live.distrust_reason("keys") is None
        assert stale_s(live) == 0.0
    assert caplog.text.count("Input/output error; what was read before stays in force for 300 s") == 1


async def test_watched_file_hanging_is_reported_and_delays_no_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, clock, released = tmp_path / "file", Clock(), threading.Event()
    path.write_text("first")
    loads, applied = list[str](), asyncio.Queue[str]()

    def load() -> str:
        loads.append("")
        if len(loads) > 1:
            released.wait()
        return "hung"

    files = [
        WatchedFile(what="hung", paths=[path], load=load, apply=lambda _text: None, trust_s=300.0),
        WatchedFile(what="other", paths=[path], load=path.read_text, apply=applied.put_nowait),
    ]
    try:
        async with FileWatcher(files, check_s=0.01, clock=clock) as live:
            assert await applied.get() == "first"
            for text in ("the second", "the third one"):
                path.write_text(text)
                while await applied.get() != text:
                    pass
            clock.now += QUIET_S
            while "hung: checking it takes longer than 10 s" not in caplog.text:  # noqa: ASYNC110 - a log tells nobody
                await asyncio.sleep(0)
            clock.now += 290.0
            while "hung: not read for 300 s; what was" not in caplog.text:  # noqa: ASYNC110 - as above
                await asyncio.sleep(0)
            assert live.distrust_reason("hung") == "not read for 300 s"
            assert live.distrust_reason("other") is None
            released.set()
            while live.distrust_reason("hung") is not None:  # noqa: ASYNC110 - nor does the trust
                await asyncio.sleep(0)
    finally:
        released.set()


async def test_watched_file_replaced_by_fifo_does_not_block(tmp_path: Path) -> None:
    path, applied, clock = tmp_path / "file", list[str](), Clock()
    path.write_text("first")
    load = lambda: read_regular_text(path)  # noqa: E731
    file = WatchedFile(what="keys", paths=[path], load=load, apply=applied.append, trust_s=300.0)
    async with FileWatcher([file], check_s=3600.0, clock=clock) as live:
        path.unlink()
        os.mkfifo(path)
        clock.now += 300.0
        await live.check()
        assert live.distrust_reason("keys") is not None
        path.unlink()
        path.write_text("first")
        await live.check()
        assert live.distrust_reason("keys") is None
    assert applied == ["first", "first"]


def reloads(live: FileWatcher) -> dict[str, float]:
    family, _ = live.collect()
    return {sample.labels["result"]: sample.value for sample in family.samples}


def stale_s(live: FileWatcher) -> float:
    _, family = live.collect()
    return float(family.samples[0].value)
