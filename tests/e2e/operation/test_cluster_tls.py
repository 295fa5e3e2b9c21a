"""Clusters with mutual TLS: hand-offs over tcp, a kill, rotation, and a migration to TLS."""

import asyncio
import signal

import pytest
import pytest_asyncio

from cluster.cli.cert import make_certificate
from tandem.rpc.cluster_credentials import ClusterCredentials
from tandem.rpc.mutual_tls import TlsFiles
from tandem.rpc.tls_check import check_peer
from tests.previous.release import Release
from tests.support.e2e.emitted import unknown, uses_certificate_metrics
from tests.support.monitoring_files import expressions
from tests.support.running_cluster import running

pytestmark = pytest.mark.asyncio(loop_scope="module")
SHORT_DAYS, LONG_DAYS = 3, 30
MEMBER = "tandem_member_certificate_not_after_seconds"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("certs")
    make_certificate(made, "member", days=SHORT_DAYS)
    return made


def tls(folder, **more):
    return {"cert": f"{folder}/member.pem", "key": f"{folder}/member.key", "ca": f"{folder}/ca.pem", **more}


def credentials(folder):
    files = TlsFiles(cert=folder / "member.pem", key=folder / "member.key", ca=folder / "ca.pem", setting="cluster.tls")
    return ClusterCredentials(files)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def cluster(folder, fork_servers):
    settings = {"cluster__tls": tls(folder), "transfer__transport": "tcp", "decode__replicas": 2}
    async with running(command=fork_servers.command, **settings) as made:
        yield made


async def test_cluster_tls_serves_over_both_pools_and_refuses_plain_peers(cluster, folder, oracle):
    prompt = oracle.story(7100, 200)
    assert await cluster.tokens(prompt, 40) == oracle.tokens(prompt, 40)
    assert await cluster.disaggregated() > 0
    assert await cluster.figure("tandem_worker_transfers_total", transport="tcp", outcome="committed") > 0
    assert set((await cluster.figures("tandem_worker_session_direct")).values()) == {1.0}
    for worker in cluster.local.workers:
        found = await check_peer(worker.address, None)
        assert found.mismatch == "the peer accepts only TLS, and this process has no certificates (cluster.tls)"
        assert (await check_peer(worker.address, credentials(folder))).not_after_s is not None

    async def watched():
        return set(await cluster.figures(MEMBER)) == {
            ("router",),
            *((worker.name,) for worker in cluster.local.workers),
        }

    await cluster.until(watched)
    of_certificates = [one for one in expressions() if uses_certificate_metrics(one)]
    assert of_certificates
    assert unknown(of_certificates, (await cluster.http.get("/metrics")).text) == []


async def test_tls_stream_survives_worker_loss_and_certificate_renewal(cluster, folder, oracle):
    prompt = oracle.story(7200, 200)
    reading = asyncio.create_task(cluster.stream(prompt, 300))
    before = {worker.name: await check_peer(worker.address, credentials(folder)) for worker in cluster.local.workers}
    make_certificate(folder, "member", days=LONG_DAYS, renew=True)
    name, pid = await cluster.kill_the_busiest(signal.SIGKILL)
    assert (await reading).token_ids == oracle.tokens(prompt, 300)
    await cluster.comes_back(name, pid)
    for worker in cluster.local.workers:
        now = await check_peer(worker.address, credentials(folder))
        assert now.not_after_s > before[worker.name].not_after_s, "also those that went on"
    other = oracle.story(7300, 200)
    assert await cluster.tokens(other, 40) == oracle.tokens(other, 40)


@pytest.mark.turn(2)
async def test_previous_version_works_with_permissive_tls(tmp_path, folder, fork_servers, oracle):
    command = Release(tmp_path).among({"prefill-0", "decode-1"}, fork_servers.command)
    settings = {"cluster__tls": tls(folder, mode="permissive"), "transfer__transport": "tcp", "decode__replicas": 2}
    async with running(command=command, **settings) as cluster:
        addresses = {worker.name: worker.address for worker in cluster.local.workers}
        speaks = {name: (await check_peer(at, credentials(folder))).speaks_tls for name, at in addresses.items()}
        assert speaks == {"prefill-0": False, "decode-0": True, "decode-1": False}
        for number in range(4):
            prompt = oracle.story(7400 + number, 200)
            assert await cluster.tokens(prompt, 20, cache_salt=f"{number}") == oracle.tokens(prompt, 20)
        assert await cluster.disaggregated() > 0
        reading = asyncio.create_task(cluster.stream(prompt, 300))
        await cluster.kill_the_busiest(signal.SIGKILL)
        assert (await reading).token_ids == oracle.tokens(prompt, 300)
