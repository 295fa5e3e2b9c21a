"""Hand-offs whose KV travels in TLS, from the cluster's configuration on."""

from pathlib import Path

import pytest

from kv_transfer.transports.catalogue import open_receivers, open_senders
from kv_transfer.transports.tcp.settings import PLAIN, TcpSettings
from tandem.config.cluster import TransferConfig
from tandem.errors import ConfigError
from tests.integration.handoff.test_failures import wait_for
from tests.support.certificates import Authority
from tests.support.kv_transfer.handoff_fakes import Pool, begin, decode_worker, make_job, prefill_worker
from worker.kv_exchange.config import tcp_settings

LOOPBACK = "127.0.0.1"


def configured(at: Path, authority: Authority | None = None) -> TransferConfig:
    files = (authority or Authority()).issue(at)
    return TransferConfig(tcp_streams=3, tls={"cert": str(files.cert), "key": str(files.key), "ca": str(files.ca)})


def sending(tcp: TcpSettings, **place: int):
    return prefill_worker(lambda region: open_senders(region, choice="tcp", tcp=tcp), pool=Pool(64), **place)


def receiving(tcp: TcpSettings):
    return decode_worker(lambda region: open_receivers(region, choice="tcp", tcp=tcp), pool=Pool(48))


async def test_handoff_tls_over_several_streams_commits(tmp_path: Path) -> None:
    tcp = tcp_settings(configured(tmp_path), LOOPBACK)
    assert tcp.streams == 3
    async with sending(tcp) as worker, receiving(tcp) as (hub, owner):
        for index in range(5):
            transfer = begin(hub, owner, make_job(f"r{index}", 40), worker.route(1))
            record = await owner.until(transfer, lambda r: r.committed or r.errors)
            assert record.committed
            assert not record.errors
        await hub.drain()


async def test_link_that_is_made_again_advertises_the_renewed_certificate(tmp_path: Path) -> None:
    for name in ("prefill", "decode"):
        (tmp_path / name).mkdir()
    authority, other = Authority(), Authority()
    sends, receives = (tcp_settings(configured(tmp_path / name, authority), LOOPBACK) for name in ("prefill", "decode"))
    async with receiving(receives) as (hub, owner):
        async with sending(sends) as worker:
            transfer = begin(hub, owner, make_job("before", 40), worker.route(1))
            assert (await owner.until(transfer, lambda r: r.committed or r.errors)).committed
        # Until the receiver has noticed, it would fail the next hand-off: its link is to the worker that has left.
        await wait_for(lambda: all(link.peer is None for link in hub._links.values()))
        for name in ("prefill", "decode"):
            configured(tmp_path / name, other)
        port = int(worker.address.rpartition(":")[2])
        async with sending(sends, port=port, incarnation=12) as worker:
            transfer = begin(hub, owner, make_job("after", 40), worker.route(1))
            record = await owner.until(transfer, lambda r: r.committed or r.errors)
            assert not record.errors
            assert record.committed
            await hub.drain()


@pytest.mark.parametrize("side", ["sender", "receiver"])
async def test_tls_on_one_side_only_fails_with_a_clear_error(tmp_path: Path, side: str) -> None:
    tls = tcp_settings(configured(tmp_path), LOOPBACK)
    async with (
        sending(tls if side == "sender" else PLAIN) as worker,
        receiving(tls if side == "receiver" else PLAIN) as (hub, owner),
    ):
        transfer = begin(hub, owner, make_job("r", 40), worker.route(1))
        record = await owner.until(transfer, lambda r: r.errors)
        assert "transfer.tls" in record.errors[0].message
        hub.cancel(transfer)
        await hub.drain()


def test_handoff_tls_with_bad_files_fails_at_start(tmp_path: Path) -> None:
    config = configured(tmp_path)
    Path(config.tls.key).unlink()
    with pytest.raises(ConfigError, match=r"transfer\.tls\.key: .*No such file"):
        tcp_settings(config, LOOPBACK)


def test_handoff_without_tls_is_plain() -> None:
    assert tcp_settings(TransferConfig(), LOOPBACK).tls is None
    assert tcp_settings(TransferConfig(), LOOPBACK) == PLAIN
