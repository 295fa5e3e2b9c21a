"""Batches: bounds on the effect of many batches, broken files and a full disk."""

import asyncio
import os
import resource
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from router.batches.files import store as store_module
from router.batches.files.store import BatchStore, UploadSlots, acquire_all
from router.batches.files.types import BatchStatus, ObjectNotFound, StoredBatch
from router.batches.runner import MOST_AT_WORK, MOST_OF_TENANT, startable
from router.http.body.upload import FRAME_BYTES
from tandem.config.cluster import RouterConfig
from tandem.errors import ConfigError, Overloaded
from tests.support.router.servers import fakes
from tests.support.router.servers.batch_server import running

KEYS = [{"key": "one", "tenant": "acme"}, {"key": "two", "tenant": "other-company"}]


@pytest.fixture
def parts() -> fakes.Servers:
    made = fakes.make_servers(fakes.make_tokenizer(), RouterConfig(api_keys=KEYS))
    made.say("hello")
    return made


@pytest.fixture
def store(tmp_path: Path) -> BatchStore:
    made = BatchStore(tmp_path, max_tenant_bytes=1 << 20, keep_s=1000.0)
    made.open()
    return made


def batch(number: int, tenant: str = "acme", status: BatchStatus = BatchStatus.VALIDATING) -> StoredBatch:
    return StoredBatch(
        id=f"batch_{number:032x}",
        tenant=tenant,
        endpoint="/v1/completions",
        input_file_id="file-x",
        created_s=100 + number,
        expires_s=1000,
        status=status,
    )


def test_runner_starts_bounded_batches_oldest_first() -> None:
    live = [batch(i, tenant=str(i // 50)) for i in range(50 * MOST_AT_WORK)]
    begun = startable(live, {}, lambda _: False)
    assert len(begun) == MOST_AT_WORK
    assert [one.id for one in begun[:MOST_OF_TENANT]] == [one.id for one in live[:MOST_OF_TENANT]]
    assert begun[MOST_OF_TENANT].tenant == "1"
    at_work = {one.id: one.tenant for one in begun}
    assert not startable(live, at_work, lambda _: False)
    del at_work[live[0].id]
    assert startable(live[1:], at_work, lambda _: False) == [live[MOST_OF_TENANT]]
    over = live[40]
    assert startable(live, {**at_work, live[0].id: "0"}, lambda one: one is over) == [over]


def test_store_batch_of_other_version_is_skipped(
    store: BatchStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(3):
        store.save(batch(number))
    with sqlite3.connect(tmp_path / "batches.sqlite3") as other:
        for number, state in enumerate(("", '{"id": 5}')):
            other.execute("UPDATE batches SET state = ? WHERE id = ?", (state, batch(number).id))
    other.close()
    store.sweep(200.0)
    assert store.live() == store.batches("acme") == [batch(2)]
    assert "another version" in caplog.text


def test_store_file_with_missing_content_is_not_found(store: BatchStore, tmp_path: Path) -> None:
    content = tmp_path / "content"
    content.write_bytes(b"x")
    file = store.add_file("acme", content, filename="f", purpose="batch", now_s=100.0)
    store.content("acme", file.id).unlink()
    with pytest.raises(ObjectNotFound):
        store.file("acme", file.id)


def test_store_orphaned_content_is_deleted_once_old(store: BatchStore, tmp_path: Path) -> None:
    content = tmp_path / "content"
    content.write_bytes(b"x")
    file = store.add_file("acme", content, filename="f", purpose="batch", now_s=time.time())
    kept = store.content("acme", file.id)
    orphan = kept.with_name(f"file-{'0' * 32}.data")
    orphan.write_bytes(b"of a process that was killed")
    store.sweep(time.time())
    assert orphan.exists()
    for path in (kept, orphan):
        os.utime(path, (0.0, 0.0))
    store.sweep(time.time())
    assert (kept.exists(), orphan.exists()) == (True, False)


def test_store_database_of_a_newer_version_is_refused(store: BatchStore, tmp_path: Path) -> None:
    other = sqlite3.connect(tmp_path / "batches.sqlite3")
    other.execute("PRAGMA user_version = 2")
    other.close()
    with pytest.raises(ConfigError, match=r"router\.batches\.path: .* version 2, but at most 1 is supported"):
        BatchStore(tmp_path, max_tenant_bytes=1, keep_s=1.0).open()


def test_store_invalid_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / "batches.sqlite3").write_bytes(b"x" * 4096)
    with pytest.raises(ConfigError, match=r"router\.batches\.path: .*not a database"):
        BatchStore(tmp_path, max_tenant_bytes=1, keep_s=1.0).open()


def test_store_keeps_bounded_number_of_ended_batches(store: BatchStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "MAX_ENDED_BATCHES", 2)
    for number in range(5):
        store.save(batch(number, status=BatchStatus.FAILED))
    live, other = batch(0x10), batch(0x11, tenant="other-company", status=BatchStatus.FAILED)
    store.save(live)
    store.save(other)
    assert store.live() == store.live() == [live]
    store.sweep(200.0)
    assert [one.created_s for one in store.batches("acme") if one.status.is_final] == [104, 103]
    assert store.live() == [live]
    assert store.batches("other-company") == [other]


def test_store_bounds_number_of_files(store: BatchStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "MAX_FILES", 1)
    content = tmp_path / "content"
    content.write_bytes(b"x")
    store.add_file("acme", content, filename="f", purpose="batch", now_s=100.0)
    content.write_bytes(b"x")
    with pytest.raises(Overloaded, match="at most 1"):
        store.add_file("acme", content, filename="f", purpose="batch", now_s=100.0)


@contextmanager
def full_disk(most_bytes: int) -> Iterator[None]:
    """A limit on file size: a write beyond it is cut short, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_store_full_disk_leaves_no_partial_line(store: BatchStore, tmp_path: Path) -> None:
    made = batch(0)
    store.save(made)
    results = store.results(made)
    lines = [f"{number}{'x' * 100_000}\n".encode() for number in range(2)]
    results.add([(0, lines[0])], is_error=False)
    with full_disk((tmp_path / "batches.sqlite3-wal").stat().st_size + 50_000), pytest.raises(OSError):  # noqa: PT011
        results.add([(1, lines[1])], is_error=False)
    assert results.done == store.results(made).done == {0}
    results.add([(1, lines[1])], is_error=False)
    output, _ = store.publish(made, 100.0)
    assert output is not None
    assert store.content("acme", output).read_bytes() == b"".join(lines)


def test_results_first_result_of_line_is_kept(store: BatchStore) -> None:
    """Two processes may answer the same line, if one stops in its middle and another continues."""
    made = batch(0)
    store.save(made)
    first, second = store.results(made), store.results(made)
    first.add([(0, b"first\n")], is_error=False)
    second.add([(0, b"second\n"), (1, b"other\n")], is_error=True)
    assert (second.done, second.failed) == ({1}, {1})
    output, errors = store.publish(made, 100.0)
    assert output is not None
    assert errors is not None
    assert store.content("acme", output).read_bytes() == b"first\n"
    assert store.content("acme", errors).read_bytes() == b"other\n"
    assert store.publish(made, 100.0) == (output, errors)
    assert store.results(made).done == set()


def test_results_on_full_disk_are_published_later(store: BatchStore) -> None:
    made = batch(0)
    store.save(made)
    line = f'{{"id":"batch_req_{0:032x}_0"}}\n'.encode()
    store.results(made).add([(0, line)], is_error=False)
    with full_disk(0), pytest.raises(OSError, match="File too large"):
        store.publish(made, 100.0)
    assert store.files("acme") == []
    output, _ = store.publish(made, 100.0)
    assert output is not None
    assert store.content("acme", output).read_bytes() == line


def found_in(folder: Path) -> set[Path]:
    """All but the locks."""
    found = {*folder.glob("tenants/*/*/*"), *folder.glob("incoming/*")}
    return {path for path in found if path.name != "alone" and not path.name.isdigit()}


async def test_upload_on_full_disk_is_refused_without_leftovers(parts: fakes.Servers, tmp_path: Path) -> None:
    async with running(parts, tmp_path) as world:
        name = await world.upload({"custom_id": "a"})
        before = found_in(tmp_path)
        body = {"input_file_id": name, "endpoint": "/v1/completions", "completion_window": "24h"}
        with full_disk(0):
            refused = [
                await world.http.post("/v1/files", files={"file": ("f", b"x")}, data={"purpose": "batch"}),
                await world.http.post("/v1/batches", json=body),
            ]
        assert [(answer.status_code, answer.headers["retry-after"]) for answer in refused] == [(503, "30")] * 2
        assert found_in(tmp_path) == before
        assert (await world.http.post("/v1/batches", json=body)).status_code == 200


async def test_uploads_in_progress_are_bounded_per_tenant_over_processes(parts: fakes.Servers, tmp_path: Path) -> None:
    released = asyncio.Event()

    async def slowly() -> AsyncIterator[bytes]:
        yield b"--x\r\n"
        await released.wait()

    headers = {"Content-Type": "multipart/form-data; boundary=x"}
    async with running(parts, tmp_path) as world, running(parts, tmp_path) as other:
        doors_ = [world.http, other.http] * 2
        slow = [asyncio.create_task(http.post("/v1/files", content=slowly(), headers=headers)) for http in doors_]
        await world.until(lambda: len(list((tmp_path / "incoming").iterdir())) == len(slow))
        for http in (world.http, other.http):
            refused = await http.post("/v1/files", content=b"--x", headers=headers)
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        theirs = headers | {"Authorization": "Bearer two"}
        assert (await other.http.post("/v1/files", content=b"--x", headers=theirs)).status_code == 400
        released.set()
        assert [answer.status_code for answer in await asyncio.gather(*slow)] == [400] * 4
        assert await world.upload(b"{}")
        assert await other.upload(b"{}")


async def test_live_batches_are_bounded_over_processes(parts: fakes.Servers, tmp_path: Path) -> None:
    async with running(parts, tmp_path, max_batches=3) as world, running(parts, tmp_path, max_batches=3) as other:
        world.room.is_there = other.room.is_there = False
        line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a"}}
        body = {"input_file_id": await world.upload(line), "endpoint": "/v1/completions", "completion_window": "24h"}
        answers = await asyncio.gather(*(http.post("/v1/batches", json=body) for http in (world.http, other.http) * 4))
        assert Counter(answer.status_code for answer in answers) == {200: 3, 429: 5}


@pytest.mark.parametrize("what", ["file", "batch"])
def test_store_bounds_hold_for_concurrent_processes(tmp_path: Path, what: str) -> None:
    stores = [BatchStore(tmp_path, max_tenant_bytes=40, keep_s=1000.0) for _ in range(4)]
    for store in stores:
        store.open()

    def add(number: int) -> bool:
        store = stores[number % len(stores)]
        content = store.incoming()
        content.write_bytes(b"0123456789")
        try:
            if what == "batch":
                store.add_batch(batch(number), most=4)
            else:
                store.add_file("acme", content, filename="f", purpose="batch", now_s=100.0)
        except Overloaded:
            return False
        return True

    with ThreadPoolExecutor(len(stores)) as threads:
        assert sum(threads.map(add, range(32))) == 4
    assert len(stores[0].files("acme")) + len(stores[1].batches("acme")) == 4


ADDS_RESULTS = """
import sys, pathlib
from router.batches.files.store import BatchStore
from router.batches.files.types import StoredBatch
store = BatchStore(pathlib.Path(sys.argv[1]), max_tenant_bytes=1 << 20, keep_s=1000.0)
store.open()
[batch] = store.live()
results = store.results(batch)
for number in range(1_000_000):
    if number not in results.done:
        results.add([(number, b"%d\\n" % number)], is_error=False)
        print(number, flush=True)
"""


def test_store_process_killed_while_writing_loses_no_result(store: BatchStore) -> None:
    made = batch(0)
    store.save(made)
    reported: list[int] = []
    for _ in range(3):
        command = [sys.executable, "-c", ADDS_RESULTS, str(store._folder)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            reported += [int(process.stdout.readline()) for _ in range(20)]
            process.kill()
            reported += [int(line) for line in process.stdout if line.endswith("\n")]
    done = store.results(made).done
    assert set(reported) <= done <= set(range(max(reported) + 2)), "at most one was written and not reported"
    assert len(reported) == len(set(reported)), "nothing that was written is written again"
    output, _ = store.publish(made, 100.0)
    assert output is not None
    assert store.content("acme", output).read_bytes() == b"".join(b"%d\n" % number for number in sorted(done))


def test_upload_slots_of_killed_process_are_freed(tmp_path: Path) -> None:
    code = "import sys, pathlib; from router.batches.files.store import UploadSlots; "
    code += "held = UploadSlots(pathlib.Path(sys.argv[1]), 1).acquire(); print(held is not None, flush=True); input()"
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "True\n"
        assert acquire_all(UploadSlots(tmp_path / "b", 1), UploadSlots(tmp_path, 1)) is None
        process.kill()
    with acquire_all(UploadSlots(tmp_path / "b", 1), UploadSlots(tmp_path, 1)) or pytest.fail("not given back"):
        assert UploadSlots(tmp_path, 1).acquire() is None


@pytest.mark.parametrize("step", [1, 7, 64])
async def test_upload_in_any_pieces_gives_same_file(parts: fakes.Servers, tmp_path: Path, step: int) -> None:
    content = b"\r\n--not-the-end\r\n--x\r\n--xy-\r" + bytes(range(256))
    head = b'--xyz\r\nContent-Disposition: form-data; name="file"; filename="\xc3\xa4.jsonl"\r\n\r\n'
    purpose = b'\r\n--xyz\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--xyz--\r\n'
    body = head + content + purpose

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(body), step):
            yield body[start : start + step]

    async with running(parts, tmp_path) as world:
        headers = {"Content-Type": "multipart/form-data; boundary=xyz"}
        uploaded = await world.http.post("/v1/files", content=pieces(), headers=headers)
        assert uploaded.status_code == 200, uploaded.text
        assert uploaded.json()["filename"] == "ä.jsonl"
        assert (await world.http.get(f"/v1/files/{uploaded.json()['id']}/content")).content == content


PART = b'--x\r\nContent-Disposition: form-data; name="%s"\r\n\r\n%s\r\n'
FILE = b'--x\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n{}\r\n'


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (FILE + PART % (b"purpose", b"batch") + b"--x--", 200),
        (b"--x\r\n" + b"A: b\r\n" * 10_000, 400),
        (b"--x\r\nA: " + b"b" * FRAME_BYTES, 400),
        (b"--x\r\n\r\n{}\r\n--x--", 400),
        (FILE + FILE + b"--x--", 400),
        (PART % (b"purpose", b"batch") * 2 + FILE + b"--x--", 400),
        (b"".join(PART % (b"f%d" % number, b"") for number in range(17)) + FILE + b"--x--", 400),
        (PART % (b"purpose", b"b" * FRAME_BYTES) + FILE + b"--x--", 413),
        (FILE + b"--x--" + b" " * (FRAME_BYTES + 1), 413),
        (FILE.replace(b"{}", b"{" * 2048) + PART % (b"purpose", b"batch") + b"--x--", 413),
        (FILE + PART % (b"purpose", b"batch"), 400),
    ],
)
async def test_upload_beyond_bounds_is_refused_without_leftovers(
    parts: fakes.Servers, tmp_path: Path, body: bytes, status: int
) -> None:
    async with running(parts, tmp_path, max_file_bytes=1024) as world:
        headers = {"Content-Type": "multipart/form-data; boundary=x"}
        answer = await world.http.post("/v1/files", content=body, headers=headers)
    assert answer.status_code == status, answer.text
    assert not list((tmp_path / "incoming").iterdir())


def test_store_closed_while_other_threads_read_ends_no_process(tmp_path: Path) -> None:
    script = """
import sys, threading, pathlib
from router.batches.files.store import BatchStore
for number in range(60):
    store = BatchStore(pathlib.Path(sys.argv[1]), max_tenant_bytes=1 << 20, keep_s=1000.0)
    store.open()
    closed = threading.Event()
    def read():
        while not closed.is_set():
            store.live()
    readers = [threading.Thread(target=read) for _ in range(4)]
    for reader in readers:
        reader.start()
    store.live()
    store.close()
    closed.set()
    for reader in readers:
        reader.join()
"""
    command = [sys.executable, "-c", script, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert (done.returncode, done.stderr) == (0, "")
