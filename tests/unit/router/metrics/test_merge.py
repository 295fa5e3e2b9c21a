"""Merged metrics of several processes: counts add up, shared facts do not."""

import asyncio
import os
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from router.host_peers.exchange import HostPeerExchange
from router.metrics.merge import merge
from router.metrics.router_metrics import RouterMetrics

MODEL = {"model_name": "m", "engine": "router"}


def counted(requests: int, *, ttft_s: float) -> RouterMetrics:
    metrics = RouterMetrics("m")
    for _ in range(requests):
        metrics.succeeded("stop")
        metrics.ttft.observe(ttft_s)
        metrics.running.inc()
    metrics.workers("decode", "live", 2)
    return metrics


def samples(text: bytes) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (s.name, tuple(sorted(s.labels.items()))): s.value
        for family in text_string_to_metric_families(text.decode())
        for s in family.samples
    }


def value(text: bytes, name: str, **labels: str) -> float:
    return samples(text)[name, tuple(sorted(labels.items()))]


def test_merge_adds_counts_but_not_worker_reports() -> None:
    text = merge([counted(2, ttft_s=0.03).render(), counted(5, ttft_s=3.0).render()])
    assert value(text, "vllm:request_success_total", **MODEL, finished_reason="stop") == 7
    assert value(text, "vllm:num_requests_running", **MODEL) == 7
    assert value(text, "vllm:time_to_first_token_seconds_count", **MODEL) == 7
    assert value(text, "vllm:time_to_first_token_seconds_bucket", **MODEL, le="0.04") == 2
    assert value(text, "vllm:time_to_first_token_seconds_sum", **MODEL) == pytest.approx(15.06)
    assert value(text, "tandem_workers", role="decode", state="live") == 2


def test_merge_worker_totals_use_maximum() -> None:
    lines = b'# TYPE tandem_worker_fetched_tokens_total counter\ntandem_worker_fetched_tokens_total{worker="d"} %d\n'
    assert value(merge([lines % 40, lines % 42]), "tandem_worker_fetched_tokens_total", worker="d") == 42
    of_drafts = ("drafts", "draft_tokens", "accepted_tokens", "accepted_tokens_per_pos")
    for name in ("vllm:num_preemptions_total", *(f"vllm:spec_decode_num_{what}_total" for what in of_drafts)):
        lines = f'# TYPE {name} counter\n{name}{{engine="d"}} 3\n'.encode()
        assert value(merge([lines, lines]), name, engine="d") == 3


def test_merge_redis_up_uses_minimum() -> None:
    lines = b'# TYPE tandem_redis_up gauge\ntandem_redis_up{use="poll"} %d\n'
    assert value(merge([lines % 1, lines % 0, lines % 1]), "tandem_redis_up", use="poll") == 0


def test_merge_single_process_is_unchanged() -> None:
    text = counted(3, ttft_s=0.5).render()
    assert merge([text]) == text


@pytest.mark.parametrize(
    "text",
    [
        b"requests_total 3\n",
        b"# TYPE requests_total counter\nanswers_total 3\n",
        b"# TYPE requests_total counter\nrequests_total three\n",
        b"# TYPE requests_total counter\nrequests_total\n",
        b"# TYPE requests_total secret\nrequests_total 3\n",
        b"\xff",
    ],
)
async def test_merge_malformed_exposition_is_left_out(
    tmp_path: Path, text: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ValueError, match=r"requests|answers|utf-8|convert"):
        merge([counted(1, ttft_s=0.5).render(), text])
    own = counted(4, ttft_s=0.1).render()
    async with (
        HostPeerExchange(tmp_path, index=0, render=lambda: own) as one,
        HostPeerExchange(tmp_path, index=1, render=lambda: text),
    ):
        assert await one.figures() == own
    assert "cannot parse the metrics of another router process" in caplog.text


def test_merge_labels_with_separators_are_kept() -> None:
    text = b'# TYPE a_total counter\na_total{tenant="x} 7 {y=\\"z\\""} 2.0\n'
    assert merge([text, text]) == text.replace(b" 2.0", b" 4.0")


async def test_scrape_of_any_process_covers_all(tmp_path: Path) -> None:
    rendered = [counted(number, ttft_s=0.1).render() for number in (1, 2, 3)]
    (tmp_path / "router-9.sock").touch()  # of one that has died
    async with (
        HostPeerExchange(tmp_path, index=0, render=lambda: rendered[0]) as first,
        HostPeerExchange(tmp_path, index=1, render=lambda: rendered[1]),
        HostPeerExchange(tmp_path, index=2, render=lambda: rendered[2]) as third,
    ):
        for one in (first, third):
            text = await one.figures()
            assert value(text, "vllm:request_success_total", **MODEL, finished_reason="stop") == 6
        assert (tmp_path / "router-0.sock").stat().st_mode & 0o077 == 0
    assert os.listdir(tmp_path) == ["router-9.sock"]


async def test_scrape_skips_silent_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.host_peers.exchange.ANSWER_S", 0.05)
    left = asyncio.Event()

    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()
        left.set()

    silent = await asyncio.start_unix_server(say_nothing, tmp_path / "router-1.sock")
    async with HostPeerExchange(tmp_path, index=0, render=counted(4, ttft_s=0.1).render) as one:
        text = await one.figures()
    assert value(text, "vllm:request_success_total", **MODEL, finished_reason="stop") == 4
    await left.wait()
    silent.close()
