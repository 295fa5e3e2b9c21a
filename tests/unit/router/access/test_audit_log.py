"""The audit log: a line for each request with a key or refused, without content, and without harm to requests."""

import errno
import json
import os
import threading
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
import pytest

from router.access.access_files import AccessControl
from router.access.audit_file import AuditFile
from router.access.audit_log import AuditEntry
from router.grpc.server import GrpcServer, build_server
from router.http.app import create_app
from tandem.config.access import AuditConfig
from tandem.config.cluster import RouterConfig
from tandem.errors import ConfigError
from tandem.v1 import inference_pb2 as pb
from tandem.v1.inference_pb2_grpc import InferenceStub
from tests.support.router.servers import fakes

SECRET_WORDS = "the quick brown fox"
WAIT_S = 20.0


def entry(route: str = "r") -> AuditEntry:
    return AuditEntry(server="http", request_id="x", client="c", began_s=0.0, route=route, status="200")


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines() if line]


async def test_audit_log_entry_has_caller_and_no_content(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    config = RouterConfig(api_keys=({"key": "a-key", "tenant": "acme"},), audit_log={"path": str(path)})
    parts = fakes.make_servers(fakes.make_tokenizer(), config)
    ids = parts.say("hello")
    ask = {"prompt": SECRET_WORDS}
    async with AccessControl(config) as keeper:
        app = create_app(parts.frontend, parts.generator, parts.ready, config, parts.metrics, access=keeper)
        transport = httpx.ASGITransport(app, client=("10.1.2.3", 5))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            good = {"authorization": "Bearer a-key", "x-request-id": "mine"}
            assert (await client.post("/v1/completions", json=ask, headers=good)).status_code == 200
            stream = await client.post("/v1/completions", json=ask | {"stream": True}, headers=good)
            assert stream.text.endswith("data: [DONE]\n\n")
            forged = {"authorization": "Bearer no-key", "x-forwarded-for": "6.6.6.6"}
            assert (await client.post("/v1/completions", json=ask, headers=forged)).status_code == 401
            assert (await client.get("/nowhere/secret-path", headers=good)).status_code == 404
            assert (await client.get("/v1/models", headers=good | {"x-request-id": "two words"})).status_code == 400
            assert (await client.get("/health")).status_code == 200
    found = lines(path)
    assert [(one["route"], one["status"], one["tenant"]) for one in found] == [
        ("POST /v1/completions", "200", "acme"),
        ("POST /v1/completions", "200", "acme"),
        ("POST /v1/completions", "401", None),
        ("GET unknown", "404", "acme"),
        ("GET unknown", "400", None),
    ]
    for one in found[:2]:
        assert (one["request_id"], one["client"], len(one["key_id"])) == ("mine", "10.1.2.3", 12)
        assert one["prompt_tokens"] == len(parts.tokenizer.encode(SECRET_WORDS))
        assert one["completion_tokens"] == len(ids)
    assert found[2]["client"] == "10.1.2.3"
    assert len(found[4]["request_id"]) == 32
    text = path.read_text()
    assert not [word for word in ("a-key", "no-key", "fox", "hello", "secret-path", "two words") if word in text]
    assert path.stat().st_mode & 0o777 == 0o600


async def test_audit_log_records_grpc_calls(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    config = RouterConfig(api_keys=({"key": "a-key", "tenant": "acme"},), audit_log={"path": str(path)})
    parts = fakes.make_servers(fakes.make_tokenizer(), config)
    ids = parts.say("hello")
    async with AccessControl(config) as keeper:
        server = build_server(parts.frontend, parts.generator, config, parts.metrics, keeper=keeper)
        grpc_server = GrpcServer(server, host="127.0.0.1", port=0, grace_s=1.0)
        async with grpc_server, grpc.aio.insecure_channel(f"127.0.0.1:{grpc_server.port}") as channel:
            stub = InferenceStub(channel)
            call = stub.Generate(pb.GenerateRequest(prompt="abc"), metadata=(("authorization", "Bearer a-key"),))
            assert len([one async for one in call]) >= 1
            with pytest.raises(grpc.aio.AioRpcError):
                await stub.ListModels(pb.ListModelsRequest())
    records = {one["route"]: one for one in lines(path)}
    assert records["Generate"]["status"] == "OK"
    assert records["Generate"]["completion_tokens"] == len(ids)
    assert (records["Generate"]["tenant"], records["Generate"]["client"]) == ("acme", "127.0.0.1")
    assert (records["ListModels"]["status"], records["ListModels"]["tenant"]) == ("UNAUTHENTICATED", None)


def test_audit_file_full_or_renamed_is_reopened(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    for route in "abcdefg":
        log = AuditFile(AuditConfig(path=str(path), max_bytes=300, keep=2))
        log.keep(entry(route))
        log.close()
    kept = [
        one["route"] for name in ("audit.jsonl.2", "audit.jsonl.1", "audit.jsonl") for one in lines(tmp_path / name)
    ]
    assert kept == sorted(kept)
    assert kept[-1] == "g"
    assert not (tmp_path / "audit.jsonl.3").exists()
    first, second = (AuditFile(AuditConfig(path=str(path))) for _ in range(2))
    path.rename(tmp_path / "moved")
    first.keep(entry("first"))
    first.close()
    second.keep(entry("second"))
    second.close()
    assert [one["route"] for one in lines(path)] == ["first", "second"]


def test_audit_file_full_disk_loses_and_counts_lines(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    disk = {"room": 1}

    def write(fd: int, data: bytes) -> int:
        if not disk["room"]:
            raise OSError(errno.ENOSPC, "No space left on device")
        disk["room"] -= 1
        # The last that fits is cut in the middle.
        return os.write(fd, data if disk["room"] else data[: len(data) // 2])

    of_another_process = AuditFile(AuditConfig(path=str(path)))
    log = AuditFile(AuditConfig(path=str(path)), write=write)
    for route in "abc":
        log.keep(entry(route))
    log.close()
    assert (log.num_written, log.num_lost) == (0, 3)
    of_another_process.keep(entry("d"))
    of_another_process.close()
    again = AuditFile(AuditConfig(path=str(path)))
    again.keep(entry("e"))
    again.close()
    assert [json.loads(line)["route"] for line in path.read_bytes().splitlines()[1:]] == ["d", "e"]
    (family,) = log.collect()
    assert {sample.labels["result"]: sample.value for sample in family.samples} == {"written": 0.0, "lost": 3.0}


def test_audit_file_hanging_disk_delays_no_request(tmp_path: Path) -> None:
    hangs, let_go = threading.Event(), threading.Event()

    def write(fd: int, data: bytes) -> int:
        hangs.set()
        assert let_go.wait(WAIT_S)
        return os.write(fd, data)

    log = AuditFile(AuditConfig(path=str(tmp_path / "a")), write=write)
    log.keep(entry())
    assert hangs.wait(WAIT_S)
    for _ in range(10_000):
        log.keep(entry())
    assert log.num_lost > 0
    lost = log.num_lost
    let_go.set()
    log.close()
    assert log.num_written == 10_001 - lost


def test_audit_file_unwritable_at_start_is_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"router\.audit_log\.path"):
        AuditFile(AuditConfig(path=str(tmp_path / "absent" / "log")))
