"""`tandem chat` in a terminal: streamed answers, and a history of its own."""

from pathlib import Path

from tests.support.cluster.fake_router import answer_events, fake_router
from tests.support.cluster.terminal import terminal

ASKS = "\x1b[?2004h"
"""What a line's editor says when it has the terminal: keys pressed before may be lost."""
HISTORY = Path(".local") / "state" / "tandem" / "chat_history"


async def test_chat_answers_and_keeps_private_history(tmp_path: Path) -> None:
    path = tmp_path / HISTORY
    path.parent.mkdir(parents=True)
    path.touch()
    path.chmod(0o666)  # made by somebody careless
    async with fake_router(lambda _: answer_events("forty-two", "let me see")) as router:
        async with terminal("chat", "--url", router.url, HOME=str(tmp_path)) as shown:
            await shown.shows("fake-model at")
            await shown.shows(ASKS)
            shown.press("what is it?\r")
            await shown.shows("let me see")
            await shown.shows("forty-two")
            await shown.shows("tokens in")
            await shown.shows(ASKS)
            shown.press("\x04")
            await shown.ends(0)
        assert path.stat().st_mode & 0o777 == 0o600
        assert "+what is it?" in path.read_text()
        async with terminal("chat", "--url", router.url, HOME=str(tmp_path)) as shown:
            await shown.shows("fake-model at")
            await shown.shows(ASKS)
            shown.press("\x1b[A")
            await shown.shows("what is it?")
            shown.press("\r")
            await shown.shows("forty-two")
            await shown.shows(ASKS)
            shown.press("/exit\r")
            await shown.ends(0)
    assert [one["messages"][-1]["content"] for one in router.requests] == ["what is it?"] * 2


async def test_chat_history_symlink_is_not_followed(tmp_path: Path) -> None:
    other, path = tmp_path / "other", tmp_path / HISTORY
    other.write_text("not ours")
    path.parent.mkdir(parents=True)
    path.symlink_to(other)
    async with (
        fake_router(lambda _: answer_events("yes")) as router,
        terminal("chat", "--url", router.url, HOME=str(tmp_path)) as shown,
    ):
        await shown.shows("fake-model at")
        await shown.shows(ASKS)
        shown.press("hello\r")
        await shown.shows("yes")
        await shown.shows(ASKS)
        shown.press("/exit\r")
        await shown.ends(0)
    assert other.read_text() == "not ours"


async def test_chat_unknown_slash_command_is_not_sent(tmp_path: Path) -> None:
    async with (
        fake_router(lambda _: answer_events("yes")) as router,
        terminal("chat", "--url", router.url, HOME=str(tmp_path)) as shown,
    ):
        await shown.shows("fake-model at")
        await shown.shows(ASKS)
        shown.press("/foo bar\r")
        await shown.shows("unknown command /foo")
        await shown.shows(ASKS)
        shown.press("/exit\r")
        await shown.ends(0)
    assert router.requests == []


async def test_chat_with_an_adapter_asks_for_it_by_name(tmp_path: Path) -> None:
    async with fake_router(lambda _: answer_events("yes")) as router:
        router.adapters = ("sql", "legal")
        async with terminal("chat", "--url", router.url, "--model", "sql", HOME=str(tmp_path)) as shown:
            await shown.shows("sql at")
            await shown.shows(ASKS)
            shown.press("hello\r")
            await shown.shows("yes")
            await shown.shows(ASKS)
            shown.press("/exit\r")
            await shown.ends(0)
        async with terminal("chat", "--url", router.url, "--model", "other", HOME=str(tmp_path)) as shown:
            await shown.shows("--model: other is not served here; fake-model, sql, legal can be named")
            await shown.ends(1)
    assert [one["model"] for one in router.requests] == ["sql"]
