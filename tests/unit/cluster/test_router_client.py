"""The chat client and the terminal chat against a real socket."""

import asyncio
import signal
import sys
from pathlib import Path

import pytest

from cluster.cli.chat import Conversation
from cluster.router_client import ChatClient, ChatReply, ClientError, Timing
from cluster.terminal_text import without_controls
from tests.support.cluster.fake_router import answer_events, completion_events, event, fake_router

ROOT = Path(__file__).resolve().parents[3]
QUESTION = [{"role": "user", "content": "hello"}]


async def test_chat_client_streams_answer_with_timing():
    pieces = []
    async with fake_router(lambda _: answer_events("4821")) as router, ChatClient(f"{router.url}/v1") as client:
        assert await client.model() == ("fake-model", True)
        answer = await client.chat(QUESTION, pieces.append, model="fake-model", max_tokens=5)
    assert pieces == ["4", "8", "2", "1"]
    assert answer.text == "4821"
    assert answer.finish_reason == "stop"
    assert answer.timing == Timing(queue_s=0.002, prefill_s=0.02, transfer_s=0.003, decode_s=0.04)
    line = answer.time_line()
    assert line.startswith("queue 2.0 ms · prefill 20.0 ms · transfer 3.0 ms · decode 40.0 ms · first token ")
    assert line.endswith(" · cached 32 of 40 prompt tokens")
    assert router.timing_asked == [True]
    assert router.requests[0]["stream_options"] == {"include_usage": True}
    assert router.requests[0]["max_tokens"] == 5


async def test_chat_client_separates_reasoning_from_answer():
    thoughts, pieces = [], []
    async with fake_router(lambda _: answer_events("42", "hm")) as router, ChatClient(router.url) as client:
        answer = await client.chat(QUESTION, pieces.append, thoughts.append)
        assert (thoughts, pieces, answer.text) == (["hm"], ["4", "2"], "42")
        answer = await client.chat(QUESTION, pieces.append)
        assert answer.text == "42"
    async with fake_router(lambda _: answer_events("", "hm")) as router, ChatClient(router.url) as client:
        answer = await client.chat(QUESTION, pieces.append)
    assert answer.text == ""
    assert answer.first_token_s is not None


@pytest.mark.parametrize(
    ("status", "reply", "message"),
    [
        (
            "429 Too Many",
            [b'{"error": {"message": "the queue is full"}}'],
            r"429: the queue is full \(retry in 3 s\)",
        ),
        ("502 Bad Gateway", [b"<html>"], "502: <html>"),
        ("200 OK", [event({"error": {"message": "no worker is left"}}), event("[DONE]")], "no worker is left"),
        ("200 OK", [event({"choices": []})], "ended prematurely"),
        ("200 OK", [event("{")], "not JSON"),
        ("200 OK", [event([1])], "not consist of JSON objects"),
    ],
)
async def test_chat_client_reports_refusals_and_broken_streams(status, reply, message):
    async with fake_router(lambda _: reply, status=status) as router, ChatClient(router.url) as client:
        with pytest.raises(ClientError, match=message):
            await client.chat(QUESTION, lambda _: None)


async def test_chat_client_without_cluster_names_command():
    async with fake_router(lambda _: []) as router:
        url = router.url
    async with ChatClient(url) as client:
        with pytest.raises(ClientError, match="start one with `tandem up`"):
            await client.model()


async def test_chat_client_cancel_closes_connection():
    started = asyncio.Event()
    reply = answer_events("hello")[:3]
    async with fake_router(lambda _: reply, hang=True) as router, ChatClient(router.url) as client:
        task = asyncio.ensure_future(client.chat(QUESTION, lambda _: started.set()))
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await router.hung_up.wait()


def make_answer(text):
    return ChatReply(
        text=text,
        finish_reason="stop",
        prompt_tokens=10,
        completion_tokens=5,
        cached_tokens=4,
        first_token_s=None,
        total_s=0.5,
        timing=None,
    )


def test_conversation_grows_only_by_answered_questions():
    conversation = Conversation(system="Be brief.")
    assert [m["content"] for m in conversation.asking("a")] == ["Be brief.", "a"]
    assert conversation.stats() == "no answers yet"
    conversation.add("a", make_answer("b"))
    assert [m["content"] for m in conversation.asking("c")] == ["Be brief.", "a", "b", "c"]
    conversation.clear()
    assert [m["content"] for m in conversation.asking("d")] == ["Be brief.", "d"]
    expected = "1 answers · 10 prompt tokens, 4 from the cache · 5 tokens generated in 0.5 s, 10.0 tokens/s"
    assert conversation.stats() == expected


def test_control_characters_are_removed_from_output():
    assert without_controls("a\x1b[2Jb\r\x07\tc\n\x9bd") == "a\ufffd[2Jb\ufffd\ufffd\tc\n\ufffdd"


async def start_chat(url, system="Be brief."):
    options = ["--system", system] if system else []
    command = [sys.executable, "-m", "cluster.cli.main", "chat", "--url", url, *options]
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=pipe)


async def test_chat_reads_one_question_per_line_from_a_pipe():
    async with fake_router(lambda body: answer_events(f"{len(body['messages'])}!", "hm")) as router:
        process = await start_chat(router.url)
        out, err = await process.communicate(b"one\n\ntwo\n/stats\n/clear\nthree\n/exit\nfour\n")
    assert out == b"2!\n4!\n2!\n"
    assert process.returncode == 0, err
    assert b"2 answers" in err
    assert err.count(b"transfer 3.0 ms") == 3
    assert [len(request["messages"]) for request in router.requests] == [2, 4, 2]


async def test_chat_ctrl_c_stops_only_the_answer():
    reply = answer_events("hello")[:3]
    async with fake_router(lambda _: reply, hang=True) as router:
        process = await start_chat(router.url)
        process.stdin.write(b"one\n")
        assert await process.stdout.readexactly(1) == b"h"
        process.send_signal(signal.SIGINT)
        out, err = await process.communicate(b"/stats\n")
    assert process.returncode == 1, (out, err)
    assert b"stopped" in err
    assert b"no answers yet" in err
    assert b"Traceback" not in err


async def test_chat_without_cluster_reports_it():
    async with fake_router(lambda _: []) as router:
        url = router.url
    process = await start_chat(url)
    out, err = await process.communicate(b"one\n")
    assert process.returncode == 1
    assert err.decode().startswith(f"error: no cluster answers at {url}")
    assert b"Traceback" not in out + err


async def test_chat_without_chat_template_completes_text():
    async with fake_router(lambda _: completion_events(" named Lily"), card={"has_chat_template": False}) as router:
        process = await start_chat(router.url, system=None)
        out, err = await process.communicate(b"a fox\n/clear\nan owl\n")
        assert process.returncode == 0
        assert out.decode() == " named Lily\n named Lily\n"
        assert "fake-model has no chat template: it completes each text" in err.decode()
        assert router.paths == ["/v1/completions"] * 2
        assert [request["prompt"] for request in router.requests] == ["a fox", "an owl"]
        assert router.requests[0]["max_tokens"] == 128
        refused = await start_chat(router.url)
        _, err = await refused.communicate(b"a fox\n")
        assert refused.returncode == 1
        assert "--system: fake-model has no chat template" in err.decode()
