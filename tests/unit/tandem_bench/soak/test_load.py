"""The soak's requests, and what it counts as a failure."""

import asyncio
from contextlib import suppress
from random import Random

import httpx
import pytest

from tandem_bench.__main__ import parser
from tandem_bench.clusters import process_name
from tandem_bench.soak.load import SoakLoad
from tests.support.redis_server import free_port, until


async def test_soak_load_counts_failures_and_continues_without_server() -> None:
    load = SoakLoad(f"http://127.0.0.1:{free_port()}", rate=500.0, rng=Random(1))
    sending = asyncio.create_task(load.run())
    await until(lambda: sending.done() or load.failures.total() >= 2 * len(load._kinds), "two rounds of failures")
    sending.cancel()
    with suppress(asyncio.CancelledError):
        await sending
    assert {reason.partition(":")[0] for reason in load.failures} == load._kinds.keys()
    assert not load.served
    assert not load._running
    assert load.num_unaccounted == 0


@pytest.mark.parametrize("answer", ["", "{}", "nonsense", '{"choices": []}', "data: {}\n\n"])
async def test_soak_load_counts_unreadable_answers_as_failures(answer: str) -> None:
    load = SoakLoad("http://router", rate=500.0, rng=Random(1))
    await load._http.aclose()
    transport = httpx.MockTransport(lambda _: httpx.Response(200, text=answer))
    load._http = httpx.AsyncClient(transport=transport, base_url="http://router")
    sending = asyncio.create_task(load.run())
    # Whoever hangs up early, or only looks at the status, is content.
    content = {"cancelled stream", "scrape"}
    await until(lambda: sending.done() or load.failures.total() >= 20, "failures")
    sending.cancel()
    with suppress(asyncio.CancelledError):
        await sending
    assert {reason.partition(":")[0] for reason in load.failures} == load._kinds.keys() - content
    assert load.served.keys() <= content
    assert load.num_unaccounted == 0


def test_soak_process_names_include_module_and_index() -> None:
    worker = ["python", "-m", "decode_worker", "--config", "x.yaml", "--index", "1"]
    assert process_name(worker) == "decode_worker 1"
    assert process_name(["python", "-m", "cluster.cli.main", "up"]) == "tandem up"
    assert process_name(["python", "-m", "router.sandbox.grammar_worker"]) == "router.sandbox.grammar_worker 0"
    assert process_name(["cat"]) is process_name([]) is process_name(["python", "-c", "1"]) is None


@pytest.mark.parametrize(
    "arguments",
    [
        ["soak", "--minutes", "0"],
        ["soak", "--rate", "inf"],
        ["soak", "--kill-every", "-1"],
        ["isolation", "--probes", "7"],
        ["isolation", "--control", "0"],
    ],
)
def test_soak_invalid_options_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(arguments)
    assert f"got {arguments[-1]}" in capsys.readouterr().err
