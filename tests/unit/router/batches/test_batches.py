"""Batches: answered like any request, after all others, once each, through restarts; per tenant, bounded, cancelled."""

import asyncio
import time
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from router.batches.files.store import BatchStore
from router.batches.files.types import BatchStatus, StoredBatch
from router.http.app import create_app
from router.process.batch_setup import make_batches
from router.types.requests import MAX_PRIORITY
from tandem.config.cluster import RouterConfig
from tandem.errors import ConfigError, Overloaded
from tests.support.router.servers import fakes
from tests.support.router.servers.batch_server import Room, running
from tests.support.router.servers.openapi_check import Described

KEYS = [{"key": "one", "tenant": "acme"}, {"key": "two", "tenant": "other-company"}]
TEXT = "hello"


@pytest.fixture
def parts() -> fakes.Servers:
    made = fakes.make_servers(fakes.make_tokenizer(), RouterConfig(api_keys=KEYS))
    made.say(TEXT)
    return made


def line(name: str, url: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    return {"custom_id": name, "method": "POST", "url": url, "body": {"prompt": "a", **body}}


async def test_batch_runs_from_upload_to_results(parts: fakes.Servers, tmp_path: Path) -> None:
    async with running(parts, tmp_path) as world:
        file_id = await world.upload(line("a"), line("b", temperature=3.0), line("c", n=2), line("d", stream=True))
        made = await world.create(file_id, metadata={"mine": "yes"})
        assert (made["status"], made["metadata"], made["object"]) == ("validating", {"mine": "yes"}, "batch")
        batch = await world.ended(made["id"])
        assert batch["status"] == "completed"
        assert batch["request_counts"] == {"total": 4, "completed": 2, "failed": 2}
        answers = {one["custom_id"]: one["response"] for one in await world.lines(batch["output_file_id"])}
        assert {name: len(response["body"]["choices"]) for name, response in answers.items()} == {"a": 1, "c": 2}
        assert answers["a"]["status_code"] == 200
        assert answers["a"]["body"]["choices"][0]["text"] == TEXT
        wrong = {one["custom_id"]: one["response"] for one in await world.lines(batch["error_file_id"])}
        params = {
            name: (response["status_code"], response["body"]["error"]["param"]) for name, response in wrong.items()
        }
        assert params == {"b": (400, "temperature"), "d": (400, "stream")}
        assert {request.priority for request in parts.generator.requests} == {MAX_PRIORITY}
        assert {request.tenant for request in parts.generator.requests} == {"acme"}
        files = (await world.http.get("/v1/files")).json()["data"]
        assert {file["purpose"] for file in files} == {"batch", "batch_output"}
        assert (await world.http.delete(f"/v1/files/{file_id}")).json()["deleted"]
        assert (await world.http.get(f"/v1/files/{file_id}")).status_code == 404


async def test_batch_of_chats_is_listed_by_page(parts: fakes.Servers, tmp_path: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    async with running(parts, tmp_path) as world:
        request = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": chat}
        names = []
        for _ in range(3):
            made = await world.create(await world.upload(request), endpoint="/v1/chat/completions")
            names.append(made["id"])
            batch = await world.ended(made["id"])
            (result,) = await world.lines(batch["output_file_id"])
            assert result["response"]["body"]["choices"][0]["message"]["content"] == TEXT
        first = (await world.http.get("/v1/batches", params={"limit": 2})).json()
        rest = (await world.http.get("/v1/batches", params={"after": first["last_id"]})).json()
        assert (first["has_more"], rest["has_more"]) == (True, False)
        assert sorted(one["id"] for page in (first, rest) for one in page["data"]) == sorted(names)
        assert (await world.http.get("/v1/batches", params={"limit": "0"})).json()["error"]["param"] == "limit"


async def test_batch_waits_while_cluster_is_busy(parts: fakes.Servers, tmp_path: Path) -> None:
    async with running(parts, tmp_path) as world:
        world.room.is_there = False
        made = await world.create(await world.upload(line("a"), line("b")))
        await world.comes_to(made["id"], "in_progress")
        for _ in range(3):
            world.runner.wake()
            await asyncio.sleep(0)
        assert not parts.generator.requests
        world.room.is_there = True
        assert (await world.ended(made["id"]))["request_counts"]["completed"] == 2


async def test_batch_runs_at_most_configured_requests(parts: fakes.Servers, tmp_path: Path) -> None:
    parts.say(TEXT, hang_after=1)
    async with running(parts, tmp_path, max_concurrent=2) as world:
        made = await world.create(await world.upload(*(line(str(i)) for i in range(6))))
        await world.until(lambda: parts.generator.open_streams == 2)
        for _ in range(5):
            world.runner.wake()
            await asyncio.sleep(0.01)
        assert parts.generator.open_streams == len(parts.generator.requests) == 2
        assert (await world.http.post(f"/v1/batches/{made['id']}/cancel")).json()["status"] == "cancelling"
        batch = await world.ended(made["id"])
        assert batch["status"] == "cancelled"
        assert parts.generator.open_streams == 0
        errors = {one["custom_id"]: one["error"]["code"] for one in await world.lines(batch["error_file_id"])}
        assert errors == {str(i): "batch_cancelled" for i in range(6)}
        again = await world.http.post(f"/v1/batches/{made['id']}/cancel")
        assert again.json()["error"]["param"] == "batch_id"


async def test_batch_after_restart_neither_loses_nor_repeats_requests(parts: fakes.Servers, tmp_path: Path) -> None:
    """The first process stops mid-batch."""
    names = [str(i) for i in range(8)]
    async with running(parts, tmp_path, max_concurrent=1) as world:
        made = await world.create(await world.upload(*map(line, names)))
        await world.until(lambda: len(parts.generator.requests) >= 4)
    store = stored(tmp_path)
    before = len(store.results(store.live()[0]).done)
    assert 0 < before < len(names)
    num_requests = len(parts.generator.requests)
    async with running(parts, tmp_path) as world:
        batch = await world.ended(made["id"])
        assert batch["request_counts"] == {"total": 8, "completed": 8, "failed": 0}
        results = await world.lines(batch["output_file_id"])
    assert sorted(one["custom_id"] for one in results) == names
    assert len({one["id"] for one in results}) == len(names)
    assert len(parts.generator.requests) - num_requests == len(names) - before


def stored(folder: Path) -> BatchStore:
    store = BatchStore(folder, max_tenant_bytes=1 << 20, keep_s=1000.0)
    store.open()
    return store


async def test_batch_restart_during_publishing_completes(parts: fakes.Servers, tmp_path: Path) -> None:
    """The result files exist, and the batch does not list them yet."""
    store, name = stored(tmp_path), f"batch_{'0' * 32}"
    made = StoredBatch(
        id=name,
        tenant="acme",
        endpoint="/v1/completions",
        input_file_id="file-gone",
        created_s=int(time.time()),
        expires_s=int(time.time()),
        status=BatchStatus.FINALIZING,
        ends_as="completed",
        total=1,
        completed=1,
    )
    store.save(made)
    store.results(made).add([(0, f'{{"id":"batch_req_{"0" * 32}_0"}}\n'.encode())], is_error=False)
    store.publish(made, time.time())
    async with running(parts, tmp_path) as world:
        batch = await world.ended(name)
        assert (batch["status"], batch["request_counts"]["completed"]) == ("completed", 1)
        assert len(await world.lines(batch["output_file_id"])) == 1
        assert not parts.generator.requests


async def test_batch_invalid_input_is_reported_by_line(parts: fakes.Servers, tmp_path: Path) -> None:
    async with running(parts, tmp_path, max_requests=4) as world:
        bad = [line("a"), b"{", line("a"), {"custom_id": "b"}, line("c", url="/v1/embeddings"), [1]]
        batch = await world.ended((await world.create(await world.upload(*bad)))["id"])
        assert batch["status"] == "failed"
        errors = [(error["line"], error["param"]) for error in batch["errors"]["data"]]
        assert errors == [(2, None), (3, "custom_id"), (4, "method"), (5, "url"), (6, None)]
        many = await world.create(await world.upload(*(line(str(i)) for i in range(5))))
        assert (await world.ended(many["id"]))["errors"]["data"][0]["line"] == 5
        empty = await world.create(await world.upload(b"\n\n"))
        assert (await world.ended(empty["id"]))["status"] == "failed"
        assert not parts.generator.requests


async def test_batch_request_refused_by_full_cluster_is_retried(parts: fakes.Servers, tmp_path: Path) -> None:
    parts.generator.script = fakes.Script(error=Overloaded("full", retry_after_s=0.01))
    async with running(parts, tmp_path) as world:
        made = await world.create(await world.upload(line("a")))
        await world.until(lambda: len(parts.generator.requests) >= 1)
        parts.say(TEXT)
        batch = await world.ended(made["id"])
        assert batch["request_counts"] == {"total": 1, "completed": 1, "failed": 0}


async def test_batch_beyond_its_window_expires(
    parts: fakes.Servers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts.say(TEXT, hang_after=1)
    async with running(parts, tmp_path) as world:
        made = await world.create(await world.upload(line("a"), line("b")))
        await world.until(lambda: parts.generator.open_streams == 2)
        monkeypatch.setattr(world.runner, "_now", lambda: made["expires_at"] + 1.0)
        world.runner.wake()
        batch = await world.ended(made["id"])
        assert (batch["status"], batch["expired_at"]) == ("expired", made["expires_at"] + 1)
        assert [one["error"]["code"] for one in await world.lines(batch["error_file_id"])] == ["batch_expired"] * 2


def test_expired_files_and_batches_are_deleted(tmp_path: Path) -> None:
    store, content = stored(tmp_path), tmp_path / "content"
    content.write_bytes(b"x")
    file = store.add_file("acme", content, filename="f", purpose="batch", now_s=100.0)
    ended = StoredBatch(
        id=f"batch_{'1' * 32}",
        tenant="acme",
        endpoint="/v1/completions",
        input_file_id=file.id,
        created_s=100,
        expires_s=200,
        status=BatchStatus.COMPLETED,
    )
    store.save(ended)
    store.sweep(1099.0)
    assert store.files("acme") == [file]
    assert store.batches("acme") == [ended]
    store.sweep(1100.0)
    assert not store.files("acme")
    assert not store.batches("acme")
    content.write_bytes(b"x" * (1 << 20))
    store.add_file("acme", content, filename="f", purpose="batch", now_s=100.0)
    content.write_bytes(b"x")
    with pytest.raises(Overloaded):
        store.add_file("acme", content, filename="f", purpose="batch", now_s=100.0)


def test_batch_folder_is_run_by_one_process(tmp_path: Path) -> None:
    first, second = stored(tmp_path), stored(tmp_path)
    assert (first.may_run(), second.may_run(), first.may_run()) == (True, False, True)
    first.close()
    assert second.may_run()
    second.close()


async def test_batches_and_files_are_visible_only_to_their_tenant(parts: fakes.Servers, tmp_path: Path) -> None:
    async with running(parts, tmp_path) as world:
        file_id = await world.upload(line("a"))
        made = await world.create(file_id)
        await world.ended(made["id"])
        theirs = {"Authorization": "Bearer two"}
        for path in (f"/v1/files/{file_id}", f"/v1/files/{file_id}/content", f"/v1/batches/{made['id']}"):
            assert (await world.http.get(path, headers=theirs)).status_code == 404
        for path in ("/v1/files", "/v1/batches"):
            assert (await world.http.get(path, headers=theirs)).json()["data"] == []
        body = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"}
        assert (await world.http.post("/v1/batches", json=body, headers=theirs)).status_code == 404
        assert (await world.http.get("/v1/files", headers={"Authorization": ""})).status_code == 401


@pytest.mark.parametrize("name", ["../../lock", "file-" + "0" * 32, "file-%2e%2e", "batch.json", ""])
async def test_file_names_cannot_escape_the_folder(parts: fakes.Servers, tmp_path: Path, name: str) -> None:
    async with running(parts, tmp_path) as world:
        for path in (f"/v1/files/{name}", f"/v1/batches/{name}"):
            assert (await world.http.get(path)).status_code in (404, 405)


@pytest.mark.parametrize(
    ("changed", "param"),
    [
        ({"endpoint": "/v1/embeddings"}, "endpoint"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 3600}}, "output_expires_after"),
        ({"colour": "red"}, "colour"),
        ({"metadata": {"a": 1}}, "metadata"),
    ],
)
async def test_batch_invalid_field_is_named(
    parts: fakes.Servers, tmp_path: Path, changed: dict[str, Any], param: str
) -> None:
    async with running(parts, tmp_path) as world:
        body = {"input_file_id": "file-x", "endpoint": "/v1/completions", "completion_window": "24h", **changed}
        answer = await world.http.post("/v1/batches", json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    ("files", "data", "status", "param"),
    [
        ({"file": ("a", b"x")}, {"purpose": "fine-tune"}, 400, "purpose"),
        ({"file": ("a", b"x")}, {}, 400, "purpose"),
        ({"other": ("a", b"x")}, {"purpose": "batch"}, 400, "file"),
        ({"file": ("a", b"x")}, {"purpose": "batch", "expires_after[seconds]": "60"}, 400, "expires_after[seconds]"),
        ({"file": ("a", b"x" * 2000)}, {"purpose": "batch"}, 413, "file"),
        ({"file": ("a", b"x" * 100_000)}, {"purpose": "batch"}, 413, "file"),
    ],
)
async def test_invalid_uploads_are_refused(
    parts: fakes.Servers, tmp_path: Path, files: Any, data: Any, status: int, param: str
) -> None:
    async with running(parts, tmp_path, max_file_bytes=1000) as world:
        answer = await world.http.post("/v1/files", files=files, data=data)
        assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)
        assert not list((tmp_path / "incoming").iterdir())


@pytest.mark.parametrize("kind", ["text/plain", "multipart/form-data", "multipart/form-data; boundary=y"])
async def test_malformed_multipart_is_refused(parts: fakes.Servers, tmp_path: Path, kind: str) -> None:
    async with running(parts, tmp_path) as world:
        for body in (b"", b"--x\r\n", b"--y\r\n\r\n", b"--y--"):
            answer = await world.http.post("/v1/files", content=body, headers={"Content-Type": kind})
            assert answer.status_code == 400, answer.text


async def test_file_content_is_returned_unchanged(parts: fakes.Servers, tmp_path: Path) -> None:
    content = b"\r\n--not-the-end\r\n" + bytes(range(256)) + b"\r\n\r\n"
    async with running(parts, tmp_path) as world:
        file_id = await world.upload(content)
        assert (await world.http.get(f"/v1/files/{file_id}/content")).content == content


async def test_batch_routes_without_folder_are_absent(parts: fakes.Servers) -> None:
    assert make_batches(parts.frontend, parts.generator, Room(), parts.config, parts.metrics) is None
    app = create_app(parts.frontend, parts.generator, parts.ready, parts.config, parts.metrics)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
        for path in ("/v1/files", "/v1/batches", "/v1/batches/batch_1/cancel"):
            answer = await client.post(path, headers={"Authorization": "Bearer one"})
            assert answer.status_code == 404
            assert "setting router.batches.path enables it" in answer.json()["error"]["message"]
            assert (await client.post(path)).status_code == 401
        answer = await client.post("/v1/filesystems", headers={"Authorization": "Bearer one"})
        assert answer.json()["error"]["message"] == "no route POST /v1/filesystems"


async def test_batch_routes_are_in_openapi_document(parts: fakes.Servers, tmp_path: Path) -> None:
    async with running(parts, tmp_path) as world:
        document = (await world.http.get("/openapi.json")).json()
    paths = document["paths"]
    assert paths["/v1/batches"]["post"]["requestBody"]["content"].keys() == {"application/json"}
    assert paths["/v1/files"]["post"]["requestBody"]["content"].keys() == {"multipart/form-data"}
    assert paths["/v1/files/{file_id}"].keys() == {"get", "delete"}
    assert paths["/v1/batches/{batch_id}"].keys() == {"get"}
    assert paths["/v1/batches/{batch_id}/cancel"].keys() == {"post"}
    assert "requestBody" not in paths["/v1/batches"]["get"]
    assert "BatchBody" in document["components"]["schemas"]
    operations = [operation for one in paths.values() for operation in one.values()]
    links = [link for one in operations for link in one["responses"]["200"].get("links", {}).values()]
    assert links
    assert {link["operationId"] for link in links} <= {operation["operationId"] for operation in operations}


def test_batch_folder_not_creatable_is_config_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    store = BatchStore(tmp_path / "file" / "batches", max_tenant_bytes=1, keep_s=1.0)
    with pytest.raises(ConfigError, match=r"^router\.batches\.path: .*/batches: Not a directory$"):
        store.open()


async def test_batch_and_file_answers_match_openapi_document(parts: fakes.Servers, tmp_path: Path) -> None:
    async with running(parts, tmp_path) as world:
        described, http = await Described.by(world.http), world.http
        file = ("in.jsonl", orjson.dumps(line("a")) + b"\n" + orjson.dumps(line("a")))
        uploaded = await http.post("/v1/files", files={"file": file}, data={"purpose": "batch"})
        described.check("POST", "/v1/files", uploaded)
        file_id = uploaded.json()["id"]
        failed = await world.ended((await world.create(file_id))["id"])
        assert failed["errors"]["data"], "the same name twice"
        good = await world.create(await world.upload(line("a")), metadata={"a": "b"})
        await world.ended(good["id"])
        for method, shown, path, body in (
            ("GET", "/v1/files", "/v1/files?limit=1", None),
            ("GET", "/v1/files", "/v1/files?after=nobody", None),
            ("GET", "/v1/files/{file_id}", f"/v1/files/{file_id}", None),
            ("GET", "/v1/batches", "/v1/batches", None),
            ("GET", "/v1/batches/{batch_id}", f"/v1/batches/{failed['id']}", None),
            ("GET", "/v1/batches/{batch_id}", f"/v1/batches/{good['id']}", None),
            ("GET", "/v1/batches/{batch_id}", "/v1/batches/nobody", None),
            ("POST", "/v1/batches", "/v1/batches", {"input_file_id": file_id, "endpoint": "/v1/completions"}),
            ("POST", "/v1/batches/{batch_id}/cancel", f"/v1/batches/{good['id']}/cancel", None),
            ("DELETE", "/v1/files/{file_id}", f"/v1/files/{file_id}", None),
            ("DELETE", "/v1/files/{file_id}", f"/v1/files/{file_id}", None),
        ):
            described.check(method, shown, await http.request(method, path, json=body))
        content = await http.get(f"/v1/files/{(await world.batch(good['id']))['output_file_id']}/content")
        documented = described.document["paths"]["/v1/files/{file_id}/content"]["get"]["responses"]["200"]["content"]
        assert content.headers["content-type"] in documented
