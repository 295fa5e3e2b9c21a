"""Two router processes behind one locked port: TLS, keys from a file that changes, an audit log of both."""

import asyncio
import json
import ssl

import grpc
import grpc.aio
import httpx
import pytest
import pytest_asyncio

from tandem.v1 import inference_pb2 as pb
from tandem.v1.inference_pb2_grpc import InferenceStub
from tandem.values.api_key import entry_of
from tests.support.certificates import Authority
from tests.support.e2e.emitted import is_of_files, unknown
from tests.support.monitoring_files import expressions
from tests.support.running_cluster import WAIT_S, body, running

pytestmark = pytest.mark.asyncio(loop_scope="module")
ENOUGH = 8
"""New connections: so many, and both processes are among those that answer."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("access")
    Authority().issue(made, name="127.0.0.1")
    write_keys(made, "first-key")
    return made


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def cluster(folder, fork_servers):
    settings = {
        "router__processes": 2,
        "router__tls": {"cert": str(folder / "cert.pem"), "key": str(folder / "key.pem")},
        "router__api_keys_file": str(folder / "keys.yaml"),
        "router__audit_log": {"path": str(folder / "audit.jsonl")},
    }
    async with running(command=fork_servers.command, believes=trusting(folder), **settings) as made:
        yield made


def trusting(folder):
    return ssl.create_default_context(cafile=folder / "ca.pem")


def write_keys(folder, *keys):
    fresh = folder / "keys.new"
    fresh.touch(mode=0o600)
    fresh.write_text(json.dumps({"api_keys": [{"key": entry_of(key), "tenant": "acme"} for key in keys]}))
    fresh.replace(folder / "keys.yaml")


async def statuses(cluster, folder, key):
    """Statuses over separate connections: the kernel chooses the process."""
    found = set()
    for _ in range(ENOUGH):
        async with httpx.AsyncClient(
            base_url=cluster.local.http_url, verify=trusting(folder), timeout=WAIT_S, trust_env=False
        ) as http:
            found.add((await http.get("/v1/models", headers={"Authorization": f"Bearer {key}"})).status_code)
    return found


async def test_key_change_reaches_all_processes_and_spares_streams(cluster, folder, oracle):
    prompt = oracle.story(1, 60)
    expected = oracle.tokens(prompt, 400)
    cluster.http.headers["Authorization"] = "Bearer first-key"
    assert await statuses(cluster, folder, "second-key") == {401}
    stream = asyncio.create_task(cluster.stream(prompt, 400))
    write_keys(folder, "second-key")

    async def changed():
        return (await statuses(cluster, folder, "first-key"), await statuses(cluster, folder, "second-key")) == (
            {401},
            {200},
        )

    await cluster.until(changed)
    assert (await stream).token_ids == expected
    cluster.http.headers["Authorization"] = "Bearer second-key"
    assert await cluster.tokens(prompt, 8) == expected[:8]


async def test_grpc_without_key_is_refused(cluster, folder):
    write_keys(folder, "second-key")
    credentials = grpc.ssl_channel_credentials((folder / "ca.pem").read_bytes())
    async with grpc.aio.secure_channel(cluster.local.grpc_address, credentials) as channel:
        stub = InferenceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.ListModels(pb.ListModelsRequest(), timeout=WAIT_S)
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        metadata = (("authorization", "Bearer second-key"),)
        assert (await stub.ListModels(pb.ListModelsRequest(), metadata=metadata, timeout=WAIT_S)).models


async def test_renewed_certificate_is_used_by_all_processes(cluster, folder):
    other = Authority()
    before = trusting(folder)
    other.issue(folder, name="127.0.0.1")

    async def shown():
        for _ in range(ENOUGH):
            try:
                async with httpx.AsyncClient(
                    base_url=cluster.local.http_url, verify=trusting(folder), timeout=WAIT_S, trust_env=False
                ) as http:
                    await http.get("/health")
            except httpx.ConnectError:
                return False
        return True

    await cluster.until(shown)
    async with httpx.AsyncClient(base_url=cluster.local.http_url, verify=before, trust_env=False) as http:
        with pytest.raises(httpx.ConnectError):
            await http.get("/health")


async def test_alerts_on_files_use_metrics_of_a_router_with_files(cluster):
    of_files = [one for one in expressions() if is_of_files(one)]
    assert of_files
    answer = await cluster.http.get("/metrics", headers={"Authorization": "Bearer second-key"})
    assert unknown(of_files, answer.text) == []


async def test_audit_logs_of_all_processes_record_requests(cluster, folder):
    secret = "these words stand nowhere"
    async with httpx.AsyncClient(
        base_url=cluster.local.http_url, verify=trusting(folder), timeout=WAIT_S, trust_env=False
    ) as http:
        request = body([300], 4) | {"prompt": secret}
        headers = {"Authorization": "Bearer second-key", "X-Request-Id": "the-last-one"}
        assert (await http.post("/v1/completions", json=request, headers=headers)).status_code == 200

    async def written():
        return "the-last-one" in (folder / "audit.jsonl").read_text()

    await cluster.until(written)
    lines = [json.loads(line) for line in (folder / "audit.jsonl").read_text().splitlines()]
    last = next(line for line in lines if line["request_id"] == "the-last-one")
    assert (last["tenant"], last["route"], last["status"]) == ("acme", "POST /v1/completions", "200")
    assert (last["completion_tokens"], last["client"]) == (4, "127.0.0.1")
    assert {line["status"] for line in lines} >= {"200", "401", "OK", "UNAUTHENTICATED"}
    assert not [word for word in ("first-key", "second-key", secret) if word in (folder / "audit.jsonl").read_text()]
    assert not [line for line in cluster.logs.lines if secret in line or "Bearer" in line]
