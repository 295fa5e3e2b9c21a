"""The demo's conversation, with a cluster of fake processes whose router is a canned listener."""

import io

from rich.console import Console

from cluster.cli.demo import NEEDLE, QUESTION, talk
from cluster.processes.local_cluster import LocalCluster
from tests.support.cluster.fake_cluster import fake_command, fake_config
from tests.support.cluster.fake_router import answer_events, fake_router


def console():
    return Console(width=200, record=True, file=io.StringIO(), highlight=False)


async def run(tmp_path, reply, **settings):
    out, err = console(), console()
    async with fake_router(reply, **settings) as router:
        command = fake_command(tmp_path / "journal", {"router": router.url})
        async with LocalCluster(fake_config(), command=command) as cluster:
            assert cluster.http_url == router.url
            code = await talk(cluster, out, err)
    return code, out.export_text(), err.export_text(), router.requests


async def test_demo_sends_two_requests_and_shows_timings(tmp_path):
    code, out, _, requests = await run(tmp_path, lambda _: answer_events("4821"))
    assert code == 0
    assert out.count("\n4821\n") == 2
    assert out.count("transfer 3.0 ms") == 2
    assert "w-prefill-0 pid " in out
    assert requests[0] == requests[1]
    assert requests[0]["model"] == "fake"
    assert NEEDLE in requests[0]["messages"][0]["content"]
    assert requests[0]["messages"][0]["content"].endswith(QUESTION)


async def test_demo_refusal_sets_exit_code(tmp_path):
    code, _, err, _ = await run(tmp_path, lambda _: [b'{"error": {"message": "too busy"}}'], status="503 Busy")
    assert code == 1
    assert "503: too busy" in err
