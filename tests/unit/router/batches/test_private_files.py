"""Uploads and their results are readable by the router's own user only."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.requests import Request

from router.batches.files.store import BatchStore
from router.http.body.upload import read_upload
from tandem.config.cluster import RouterConfig
from tests.support.router.servers import fakes
from tests.support.router.servers.batch_server import running
from tests.unit.router.batches.test_batches import KEYS, TEXT, line


@pytest.fixture(autouse=True)
def _permissive_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def readable_by_others(folder: Path) -> set[str]:
    """Paths readable by other users, the folder included."""
    return {
        f"{path.relative_to(folder)} {path.stat().st_mode & 0o777:o}"
        for path in (folder, *folder.rglob("*"))
        if path.stat().st_mode & 0o777 != (0o700 if path.is_dir() else 0o600)
    }


async def test_batch_files_are_private_to_their_owner(tmp_path: Path) -> None:
    folder = tmp_path / "batches"
    parts = fakes.make_servers(fakes.make_tokenizer(), RouterConfig(api_keys=KEYS))
    parts.say(TEXT)
    async with running(parts, folder) as world:
        file_id = await world.upload(line("a"), line("b", temperature=3.0))
        made = await world.create(file_id)
        batch = await world.ended(made["id"])
        assert batch["status"] == "completed"
        await world.http.post(f"/v1/batches/{(await world.create(file_id))['id']}/cancel")
        found = {path.name for path in folder.rglob("*")}
        assert {
            "incoming",
            "uploads",
            "tenants",
            "lock",
            "0",
            "batches.sqlite3",
            "batches.sqlite3-wal",
            f"{file_id}.data",
        } <= found
        assert {name.rpartition("-")[2] for name in found} >= {"output.data", "errors.data"}
        assert readable_by_others(folder) == set()


async def test_upload_in_progress_is_private(tmp_path: Path) -> None:
    content = tmp_path / "content"
    body = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\nhello\r\n--b--\r\n'
    pieces = [body[:40], body[40:]]
    modes = []

    async def receive() -> dict[str, object]:
        if len(pieces) < 2:
            modes.append(content.stat().st_mode & 0o777)
        return {"type": "http.request", "body": pieces.pop(0), "more_body": bool(pieces)}

    scope = {"type": "http", "headers": [(b"content-type", b"multipart/form-data; boundary=b")]}
    await read_upload(Request(scope, receive), content, max_bytes=100)
    assert modes == [0o600]
    assert content.stat().st_mode & 0o777 == 0o600
    assert content.read_bytes() == b"hello"


def test_batch_folder_of_earlier_version_is_made_private(tmp_path: Path) -> None:
    old = tmp_path / "batches"
    for name in ("incoming", "uploads", "tenants"):
        (old / name / "below").mkdir(parents=True)
    BatchStore(old, max_tenant_bytes=1 << 20, keep_s=60.0).open()
    modes = {path.name: path.stat().st_mode & 0o777 for path in old.iterdir() if path.is_dir()}
    assert modes == dict.fromkeys(("incoming", "uploads", "tenants"), 0o700)
    # The folder itself may be one that somebody shares with others on purpose.
    assert old.stat().st_mode & 0o777 == 0o777
