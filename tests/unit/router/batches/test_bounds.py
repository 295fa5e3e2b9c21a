"""Batches: bounds of what many of them, broken files and a full disk may do to others."""

import asyncio
import fcntl
import resource
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from router.batches.files import store as store_module
from router.batches.files.store import BatchStore, UploadSlots, acquire_all
from router.batches.files.types import BatchStatus, StoredBatch, StoredFile
from router.batches.runner import MOST_AT_WORK, MOST_OF_TENANT, startable
from router.http.body.upload import FRAME_BYTES
from tandem.config.cluster import RouterConfig
from tandem.errors import Overloaded
from tests.support.router.servers import fakes
from tests.support.router.servers.batch_server import running

KEYS = [{"key": "one", "tenant": "acme"}, {"key": "two", "tenant": "other-company"}]


@pytest.fixture
def parts() -> fakes.Doors:
    made = fakes.make_doors(fakes.make_tokenizer(), RouterConfig(api_keys=KEYS))
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


def test_what_is_begun_is_bounded_and_the_oldest_goes_first() -> None:
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


def test_a_broken_file_harms_no_other(store: BatchStore, tmp_path: Path) -> None:
    content = tmp_path / "content"
    for number in range(3):
        store.save(batch(number))
        content.write_bytes(b"x")
        store.add_file("acme", content, filename=str(number), purpose="batch", now_s=100.0)
    for path, text in zip(tmp_path.glob("tenants/*/batches/*/batch.json"), (b"", b'{"id": 5}'), strict=False):
        path.write_bytes(text)
    for path, text in zip(tmp_path.glob("tenants/*/files/*.json"), (b"{", b'{"id": 5}'), strict=False):
        path.write_bytes(text)
    store.sweep(200.0)
    assert len(store.live()) == len(store.batches("acme")) == len(store.files("acme")) == 1


def test_batches_that_ended_are_remembered_up_to_a_bound(store: BatchStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "MOST_ENDED", 2)
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


def test_files_are_bounded_in_number(store: BatchStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "MOST_FILES", 1)
    content = tmp_path / "content"
    content.write_bytes(b"x")
    store.add_file("acme", content, filename="f", purpose="batch", now_s=100.0)
    content.write_bytes(b"x")
    with pytest.raises(Overloaded, match="at most 1"):
        store.add_file("acme", content, filename="f", purpose="batch", now_s=100.0)


@contextmanager
def full_disk(most_bytes: int) -> Iterator[None]:
    """No file may be longer: a write that would make it so is cut short, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_leaves_no_half_line(store: BatchStore, tmp_path: Path) -> None:
    made = batch(0)
    store.save(made)
    results = store.results(made)
    first, second = (f'{{"id":"batch_req_{0:032x}_{number}"}}\n'.encode() for number in range(2))
    results.add(0, first, is_error=False)
    with full_disk(len(first) + 5), pytest.raises(OSError, match="No space"):
        results.add(1, second, is_error=False)
    assert results.done == {0}
    results.add(1, second, is_error=False)
    (path,) = tmp_path.glob("tenants/*/batches/*/output.jsonl")
    assert path.read_bytes() == first + second


def test_results_that_find_a_full_disk_become_files_later(store: BatchStore) -> None:
    made = batch(0)
    store.save(made)
    line = f'{{"id":"batch_req_{0:032x}_0"}}\n'.encode()
    store.results(made).add(0, line, is_error=False)
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


async def test_a_full_disk_is_told_and_keeps_nothing_of_what_was_refused(parts: fakes.Doors, tmp_path: Path) -> None:
    async with running(parts, tmp_path) as world:
        name = await world.upload({"custom_id": "a"})
        before = found_in(tmp_path)
        asked = {"input_file_id": name, "endpoint": "/v1/completions", "completion_window": "24h"}
        with full_disk(0):
            refused = [
                await world.http.post("/v1/files", files={"file": ("f", b"x")}, data={"purpose": "batch"}),
                await world.http.post("/v1/batches", json=asked),
            ]
        assert [(answer.status_code, answer.headers["retry-after"]) for answer in refused] == [(503, "30")] * 2
        assert found_in(tmp_path) == before
        assert (await world.http.post("/v1/batches", json=asked)).status_code == 200


async def test_uploads_on_their_way_are_bounded_by_tenant_for_all_processes(parts: fakes.Doors, tmp_path: Path) -> None:
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


async def test_batches_that_have_not_ended_are_bounded_for_all_processes(parts: fakes.Doors, tmp_path: Path) -> None:
    async with running(parts, tmp_path, max_batches=3) as world, running(parts, tmp_path, max_batches=3) as other:
        world.room.is_there = other.room.is_there = False
        line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a"}}
        asked = {"input_file_id": await world.upload(line), "endpoint": "/v1/completions", "completion_window": "24h"}
        answers = await asyncio.gather(*(http.post("/v1/batches", json=asked) for http in (world.http, other.http) * 4))
        assert Counter(answer.status_code for answer in answers) == {200: 3, 429: 5}


class Looked(BatchStore):
    """Between a look at what there is and what is written upon it, another process tries to come in."""

    num_looks = 0

    def _nobody_comes_in(self) -> None:
        self.num_looks += 1
        for lock in self._folder.glob("tenants/*/*/alone"):
            with lock.open("ab") as other, pytest.raises(BlockingIOError):
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def files(self, tenant: str) -> list[StoredFile]:
        self._nobody_comes_in()
        return super().files(tenant)

    def batches(self, tenant: str) -> list[StoredBatch]:
        self._nobody_comes_in()
        return super().batches(tenant)


@pytest.mark.parametrize("what", ["file", "batch"])
def test_room_is_looked_for_and_taken_by_one_process_at_a_time(tmp_path: Path, what: str) -> None:
    store = Looked(tmp_path, max_tenant_bytes=10, keep_s=1000.0)
    store.open()

    def add(number: int) -> None:
        if what == "batch":
            store.add_batch(batch(number), most=1)
            return
        content = store.incoming()
        content.write_bytes(b"0123456789")
        store.add_file("acme", content, filename="f", purpose="batch", now_s=100.0)

    add(0)
    with pytest.raises(Overloaded):
        add(1)
    assert store.num_looks == 2


def test_a_process_that_is_killed_gives_its_places_back(tmp_path: Path) -> None:
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
async def test_upload_whose_boundary_comes_in_pieces_is_the_same_file(
    parts: fakes.Doors, tmp_path: Path, step: int
) -> None:
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
async def test_upload_beyond_its_bounds_is_refused_and_leaves_nothing(
    parts: fakes.Doors, tmp_path: Path, body: bytes, status: int
) -> None:
    async with running(parts, tmp_path, max_file_bytes=1024) as world:
        headers = {"Content-Type": "multipart/form-data; boundary=x"}
        answer = await world.http.post("/v1/files", content=body, headers=headers)
    assert answer.status_code == status, answer.text
    assert not list((tmp_path / "incoming").iterdir())
