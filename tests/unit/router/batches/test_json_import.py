"""Import of the previous version's JSON files into the database, once no such process runs batches."""

from pathlib import Path
from typing import Any

import orjson
import pytest

from router.batches.files.store import BatchStore, _owner
from router.batches.files.types import BatchStatus
from tandem.config.cluster import RouterConfig
from tests.support.router.servers import fakes
from tests.support.router.servers.batch_server import running
from tests.unit.router.batches.test_batches import KEYS, TEXT, line

NOW_S = 1_000.0
BATCH = f"batch_{7:032x}"
INPUT = f"file-{1:032x}"


def result(number: int) -> bytes:
    return orjson.dumps({"id": f"batch_req_{7:032x}_{number}", "custom_id": str(number)}) + b"\n"


def write_old_file(folder: Path, name: str, content: bytes, **changes: Any) -> None:
    path = folder / "tenants" / _owner("acme") / "files" / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {"filename": "in.jsonl", "purpose": "batch", "created_s": 900, "expires_s": 4_000_000_000, **changes}
    path.write_bytes(orjson.dumps(record))
    path.with_suffix(".data").write_bytes(content)


def write_old_batch(folder: Path, output: bytes = b"", **changes: Any) -> Path:
    """In the previous version's format."""
    place = folder / "tenants" / _owner("acme") / "batches" / BATCH
    place.mkdir(parents=True)
    state = {
        "id": BATCH, "tenant": "acme", "endpoint": "/v1/completions", "input_file_id": INPUT, "created_s": 950,
        "expires_s": 4_000_000_000, "metadata": {"a": "b"}, "status": "in_progress", "at_s": {"in_progress": 951},
        "total": 3, "completed": 1, "failed": 0, "errors": [], "ends_as": None, "output_file_id": None,
        "error_file_id": None, **changes,
    }  # fmt: skip
    (place / "batch.json").write_bytes(orjson.dumps(state))
    (place / "output.jsonl").write_bytes(output)
    return place


def opened(folder: Path) -> BatchStore:
    store = BatchStore(folder, max_tenant_bytes=1 << 20, keep_s=1e9)
    store.open()
    return store


def test_import_keeps_files_batches_results_and_cancellation(tmp_path: Path) -> None:
    write_old_file(tmp_path, INPUT, b"{}")
    place = write_old_batch(tmp_path, result(0) + result(2) + b'{"id":"batch_req_to')
    (place / "cancel").touch()
    store = opened(tmp_path)
    [batch] = store.live()
    assert (batch.id, batch.status, batch.metadata, batch.total) == (BATCH, BatchStatus.IN_PROGRESS, {"a": "b"}, 3)
    assert store.batches("acme") == [batch]
    assert store.is_cancelled(batch)
    assert store.results(batch).done == {0, 2}, "a torn line is no result"
    assert store.content("acme", INPUT).read_bytes() == b"{}"
    assert store.file("acme", INPUT).expires_s == 4_000_000_000
    assert not list(tmp_path.glob("tenants/*/batches/*"))
    assert not list(tmp_path.glob("tenants/*/files/*.json"))


def test_import_interrupted_is_repeated_without_duplicates(tmp_path: Path) -> None:
    write_old_batch(tmp_path, result(0))
    store = opened(tmp_path)
    store.sweep(NOW_S)
    store.results(store.live()[0]).add([(1, result(1))], is_error=False)
    # As if the process had died before it deleted the folder.
    write_old_batch(tmp_path, result(0), completed=0)
    store.sweep(NOW_S)
    [batch] = store.live()
    assert store.results(batch).done == {0, 1}
    assert not list(tmp_path.glob("tenants/*/batches/*"))


@pytest.mark.parametrize("content", [b"", b"{", b'{"id": 5}', b"[]"])
def test_import_unreadable_file_disturbs_no_other(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    write_old_file(tmp_path, INPUT, b"{}")
    write_old_file(tmp_path, f"file-{2:032x}", b"{}")
    (tmp_path / "tenants" / _owner("acme") / "files" / f"file-{2:032x}.json").write_bytes(content)
    (write_old_batch(tmp_path) / "batch.json").write_bytes(content)
    store = opened(tmp_path)
    assert caplog.text.count("cannot be imported") == 2
    store.sweep(NOW_S)
    assert [file.id for file in store.files("acme")] == [INPUT]
    assert store.live() == []


def test_import_published_results_keep_their_file(tmp_path: Path) -> None:
    write_old_batch(tmp_path, status="finalizing", ends_as="completed")
    (tmp_path / "tenants" / _owner("acme") / "batches" / BATCH / "output.jsonl").unlink()
    write_old_file(tmp_path, f"file-{7:032x}-output", result(0), purpose="batch_output")
    store = opened(tmp_path)
    store.sweep(NOW_S)
    [batch] = store.live()
    assert store.publish(batch, NOW_S) == (f"file-{7:032x}-output", None)


def test_import_waits_for_process_running_batches(tmp_path: Path) -> None:
    """A process of the previous version may still run them: it uses the same lock."""
    running_one = opened(tmp_path)
    assert running_one.may_run()
    write_old_batch(tmp_path, result(0))
    other = opened(tmp_path)
    assert other.live() == []
    assert list(tmp_path.glob("tenants/*/batches/*"))
    running_one.close()
    assert [batch.id for batch in opened(tmp_path).live()] == [BATCH]


async def test_import_of_running_batch_finishes_it(tmp_path: Path) -> None:
    parts = fakes.make_servers(fakes.make_tokenizer(), RouterConfig(api_keys=KEYS))
    parts.say(TEXT)
    write_old_file(tmp_path, INPUT, b"\n".join(orjson.dumps(line(str(number))) for number in range(3)))
    write_old_batch(tmp_path, result(1))
    async with running(parts, tmp_path) as world:
        batch = await world.ended(BATCH)
        assert batch["request_counts"] == {"total": 3, "completed": 3, "failed": 0}
        results = await world.lines(batch["output_file_id"])
    assert sorted(one["custom_id"] for one in results) == ["0", "1", "2"]
    assert len(parts.generator.requests) == 2, "what was answered is not run again"
