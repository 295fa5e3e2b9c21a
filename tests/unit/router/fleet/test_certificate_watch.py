"""Expiry of this router's and its workers' certificates."""

import asyncio
import ssl
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from router.fleet.certificate_watch import CertificateWatch
from router.types.worker_view import WorkerKey
from tandem.rpc import mutual_tls
from tandem.rpc.cluster_credentials import ClusterCredentials
from tandem.rpc.cluster_grpc import ClusterAuth, make_server, open_port
from tandem.rpc.mutual_tls import MEMBER_NAME
from tandem.values.ids import Incarnation, WorkerId
from tests.support.certificates import Authority

PERIOD_S = 600.0
KEY = WorkerKey(WorkerId("decode-0"), Incarnation(1))


def valid(authority: Authority, folder: Path, days: int) -> tuple[ClusterCredentials, float]:
    folder.mkdir(exist_ok=True)
    until = datetime.now(UTC).replace(microsecond=0) + timedelta(days=days)
    return ClusterCredentials(authority.issue(folder, name=MEMBER_NAME, not_after=until)), until.timestamp()


def exported(watch: CertificateWatch) -> dict[str, float]:
    [family] = watch.collect()
    return {sample.labels["member"]: sample.value for sample in family.samples}


async def test_certificate_watch_reports_expiry_of_each_member(tmp_path: Path) -> None:
    authority, now_s = Authority(), 0.0
    (own, own_s), (worker, worker_s) = valid(authority, tmp_path / "own", 30), valid(authority, tmp_path / "worker", 3)
    addresses: dict[WorkerKey, str] = {}
    watch = CertificateWatch(own, lambda: addresses, period_s=PERIOD_S, clock=lambda: now_s)
    await watch.check_due_workers()
    assert exported(watch) == {"router": own_s}
    async with AsyncExitStack() as stack:
        server = make_server(ClusterAuth(b"s" * 16))
        addresses[KEY] = f"127.0.0.1:{await open_port(stack, server, '127.0.0.1', 0, worker)}"
        await server.start()
        stack.push_async_callback(server.stop, None)
        await watch.check_due_workers()
        assert exported(watch) == {"router": own_s, "decode-0": worker_s}
        _, renewed_s = valid(authority, tmp_path / "worker", 90)
        await watch.check_due_workers()
        assert exported(watch)["decode-0"] == worker_s, "not due yet"
        now_s = PERIOD_S
        await watch.check_due_workers()
        assert exported(watch)["decode-0"] == renewed_s
    now_s = 2 * PERIOD_S
    await watch.check_due_workers()
    assert exported(watch)["decode-0"] == renewed_s, "out of reach: as it was last"
    addresses.clear()
    await watch.check_due_workers()
    assert exported(watch) == {"router": own_s}


async def test_certificate_watch_reports_own_expiry_at_start(tmp_path: Path) -> None:
    own, own_s = valid(Authority(), tmp_path / "own", 30)
    async with CertificateWatch(own, dict) as watch:
        assert exported(watch) == {"router": own_s}


async def test_watch_goes_on_after_a_bug_and_logs_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    own, _ = valid(Authority(), tmp_path / "own", 30)
    asked_again, num_asked = asyncio.Event(), 0

    def addresses() -> dict[WorkerKey, str]:
        nonlocal num_asked
        num_asked += 1
        if num_asked == 1:
            raise LookupError("a bug")
        asked_again.set()
        return {}

    async with CertificateWatch(own, addresses, period_s=0.01):
        await asked_again.wait()
    [record] = caplog.records
    assert "cannot find out when the workers' certificates expire" in record.message
    assert record.exc_info


async def test_watch_survives_files_that_vanish_while_they_are_loaded(tmp_path: Path, monkeypatch) -> None:
    (own, own_s), addresses = valid(Authority(), tmp_path / "own", 30), {KEY: "127.0.0.1:1"}

    def vanishes(context: ssl.SSLContext, cert: Path, key: Path, _setting: str) -> None:
        context.load_cert_chain(cert.with_name("gone"), key)

    monkeypatch.setattr(mutual_tls, "load_certificate", vanishes)
    own.files.cert.touch()
    watch = CertificateWatch(own, lambda: addresses)
    await watch.check_due_workers()
    assert exported(watch) == {"router": own_s}
