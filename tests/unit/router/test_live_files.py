"""Files that are read again: whatever reading them raises, the next change is seen."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from router.live_files import LiveFile, LiveFiles
from tandem.errors import ConfigError


@pytest.mark.parametrize("error", [ConfigError("no"), FileNotFoundError("gone"), ValueError("a-secret")])
async def test_what_makes_no_sense_changes_nothing_and_the_next_change_is_taken(
    tmp_path: Path, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    path, applied = tmp_path / "file", list[str]()
    path.write_text("first")

    def load() -> str:
        if (text := path.read_text()) == "bad":
            raise error
        return text

    file = LiveFile(what="keys", paths=[path], load=load, apply=applied.append)
    async with LiveFiles([file], look_s=3600.0) as live:
        path.write_text("bad")
        await live.look()
        path.write_text("the third")
        await live.look()
        counts = {tuple(one.labels.values()): one.value for one in counted(live)}
    assert applied == ["first", "the third"]
    assert counts == {("keys", "taken"): 1, ("keys", "refused"): 1}
    assert "a-secret" not in caplog.text


async def test_who_is_told_of_a_change_looks_at_once(tmp_path: Path) -> None:
    path, applied = tmp_path / "file", asyncio.Queue[str]()
    path.write_text("first")
    file = LiveFile(what="keys", paths=[path], load=path.read_text, apply=applied.put_nowait)
    async with LiveFiles([file], look_s=3600.0) as live:
        assert await applied.get() == "first"
        for text in ("the second", "third"):
            path.write_text(text)
            live.look_now()
            assert await applied.get() == text


def counted(live: LiveFiles) -> list[Any]:
    (family,) = live.collect()
    return list(family.samples)
