"""Blocks in files: written whole, verified when read, found after a restart; damaged ones are never used."""

import errno
import os
import random
import shutil
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from engine.kv_cache.tiers.disk_index import DiskDone, DiskIndex, DiskJob, DiskVerdict
from engine.kv_storage import block_file
from engine.kv_storage.block_file import HEADER_BYTES, CacheIdentity, cache_identity, file_name
from engine.kv_storage.disk_store import DiskStore, check_path, file_bytes
from tandem.errors import ConfigError, InvariantError
from tandem.values.block_hash import BlockHasher, root_hash
from tandem.values.ids import BlockHash
from tandem.values.kv_layout import KVLayout

BLOCK_BYTES = 5000
IDENTITY = CacheIdentity(digest=b"0123456789abcdef", block_bytes=BLOCK_BYTES)
WAIT_S = 30.0
NAMES = [BlockHash(bytes([k]) * 16) for k in range(20)]


class Rig:
    """A store of eight slots, and the end of each job."""

    def __init__(self, path: Path, identity: CacheIdentity = IDENTITY, capacity: int = 100) -> None:
        self.places = bytearray(os.urandom(8 * BLOCK_BYTES))
        self.store = DiskStore(path, identity=identity, place=self.place)
        self.found = self.store.find(capacity)

    def place(self, slot: int) -> memoryview:
        return memoryview(self.places)[slot * BLOCK_BYTES : (slot + 1) * BLOCK_BYTES]

    def wait(self, count: int = 1) -> list[DiskDone]:
        """The next ends; a last job of each kind of thread shows that those before are done."""
        done: list[DiskDone] = []
        while len(done) < count:
            for threads in (self.store._writer, self.store._readers):
                threads.submit(_nothing).result(WAIT_S)
            done += self.store.collect()
        return done

    def write(self, name: BlockHash, slot: int = 0) -> DiskDone:
        self.store.write(name, slot)
        return self.wait()[0]

    def read(self, name: BlockHash, slot: int = 1) -> DiskDone:
        self.store.read(name, slot)
        return self.wait()[0]

    def path(self, name: BlockHash) -> Path:
        return self.store.folder / file_name(name)


def _nothing() -> None:
    pass


@pytest.fixture
def rig(tmp_path):
    made = Rig(tmp_path / "cache")
    yield made
    made.store.close()


def test_disk_store_block_round_trips(rig):
    content = bytes(rig.place(0))
    wrote = rig.write(NAMES[1])
    assert (wrote.job, wrote.verdict, wrote.num_bytes) == (DiskJob.WRITE, DiskVerdict.DONE, BLOCK_BYTES)
    notified = threading.Event()
    rig.store.listen(notified.set)
    assert rig.read(NAMES[1], slot=5).verdict is DiskVerdict.DONE
    assert notified.wait(WAIT_S)
    assert bytes(rig.place(5)) == content
    rig.store.delete(NAMES[1])
    rig.store._writer.submit(_nothing).result(WAIT_S)
    assert rig.read(NAMES[1]).verdict is DiskVerdict.GONE


def test_disk_store_files_are_private(rig):
    rig.write(NAMES[1])
    for folder in (rig.store.folder, rig.path(NAMES[1]).parent):
        assert folder.stat().st_mode & 0o777 == 0o700
    assert rig.path(NAMES[1]).stat().st_mode & 0o777 == 0o600


def test_disk_store_folder_open_to_others_is_refused(tmp_path):
    (tmp_path / "0").mkdir(mode=0o755)
    with pytest.raises(ConfigError, match="only its owner"):
        Rig(tmp_path)
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ConfigError, match="Not a directory"):
        Rig(file)
    with pytest.raises(ConfigError, match=r"disk_cache_path.*File exists"):
        check_path(file)
    with pytest.raises(ConfigError, match=r"disk_cache_path.*Not a directory"):
        check_path(file / "below")
    check_path(tmp_path / "new" / "one")
    assert (tmp_path / "new" / "one").is_dir()


def test_disk_store_removed_folder_is_not_recreated_without_lock(tmp_path, caplog):
    rig = Rig(tmp_path / "cache")
    rig.write(NAMES[1])
    shutil.rmtree(tmp_path / "cache")
    assert rig.write(NAMES[2]).verdict is DiskVerdict.FAILED
    assert rig.read(NAMES[1]).verdict is DiskVerdict.GONE
    assert "No such file or directory" in caplog.text
    rig.store.close()
    later = Rig(tmp_path / "cache")
    assert later.write(NAMES[2]).verdict is DiskVerdict.DONE
    later.store.close()


def test_disk_store_workers_on_one_path_have_separate_folders(tmp_path):
    one, two = Rig(tmp_path), Rig(tmp_path)
    assert one.store.folder != two.store.folder
    folder = one.store.folder
    one.store.close()
    again = Rig(tmp_path)
    assert again.store.folder == folder
    for rig in (again, two):
        rig.store.close()


def test_disk_store_workers_of_different_caches_find_their_own(tmp_path):
    kinds = [IDENTITY, replace(IDENTITY, digest=b"another caches id"[:16])]
    for rig in [Rig(tmp_path, kind) for kind in kinds]:
        rig.write(NAMES[1])
        rig.store.close()
    for order in (kinds[::-1], kinds):
        rigs = [Rig(tmp_path, kind) for kind in order]
        for rig in rigs:
            assert (rig.found.names, rig.found.num_removed) == ((NAMES[1],), 0)
            rig.store.close()


def test_disk_store_restart_restores_order_of_use(tmp_path):
    rig = Rig(tmp_path)
    for k in (3, 1, 2):
        rig.write(NAMES[k])
        os.utime(rig.path(NAMES[k]), (k, k))
    rig.read(NAMES[1])
    content = bytes(rig.place(0))
    rig.store.close()
    later = Rig(tmp_path)
    assert later.found.names == (NAMES[2], NAMES[3], NAMES[1])
    assert later.found.num_removed == 0
    assert later.read(NAMES[2]).verdict is DiskVerdict.DONE
    assert bytes(later.place(1)) == content
    later.store.close()
    smaller = Rig(tmp_path, capacity=2)
    assert len(smaller.found.names) == 2
    assert smaller.found.num_removed == 1
    assert not smaller.path(NAMES[3]).exists()
    smaller.store.close()


@pytest.mark.parametrize("seed", range(40))
def test_disk_store_flipped_bit_is_detected(rig, seed):
    draw = random.Random(seed)
    rig.write(NAMES[1])
    data = bytearray(rig.path(NAMES[1]).read_bytes())
    used = HEADER_BYTES - 8  # the last eight bytes of the header say nothing
    at = draw.choice([draw.randrange(used), draw.randrange(HEADER_BYTES, len(data))])
    data[at] ^= 1 << draw.randrange(8)
    rig.path(NAMES[1]).write_bytes(data)
    assert rig.read(NAMES[1]).verdict is DiskVerdict.DAMAGED


@pytest.mark.parametrize(
    "length", [0, 10, HEADER_BYTES, HEADER_BYTES + BLOCK_BYTES - 1, HEADER_BYTES + BLOCK_BYTES + 1]
)
def test_disk_store_file_of_another_length_is_ignored(tmp_path, length):
    rig = Rig(tmp_path)
    rig.write(NAMES[1])
    with rig.path(NAMES[1]).open("r+b") as file:
        file.truncate(length)
    assert rig.read(NAMES[1]).verdict is DiskVerdict.DAMAGED
    rig.store.close()
    later = Rig(tmp_path)
    assert (later.found.names, later.found.num_removed) == ((), 1)
    assert not later.path(NAMES[1]).exists()
    later.store.close()


def test_disk_store_file_of_another_cache_is_ignored(tmp_path):
    rig = Rig(tmp_path)
    rig.write(NAMES[1])
    rig.write(NAMES[2])
    rig.path(NAMES[2]).rename(rig.path(NAMES[1]))  # another block under this name
    assert rig.read(NAMES[1]).verdict is DiskVerdict.DAMAGED
    rig.write(NAMES[3])
    rig.store.close()
    other = Rig(tmp_path, replace(IDENTITY, digest=b"another caches id"[:16]))
    assert (other.found.names, other.found.num_removed) == ((), 2)
    other.store.close()


def test_disk_store_removes_partial_files_and_keeps_foreign_ones(tmp_path):
    rig = Rig(tmp_path)
    rig.write(NAMES[1])
    half = rig.path(NAMES[1]).with_suffix(".tmp")
    half.write_bytes(b"half")
    letter = rig.store.folder / "01" / "letter.txt"
    letter.write_text("not ours")
    link = rig.store.folder / "ff"
    link.symlink_to(tmp_path)
    rig.store.close()
    later = Rig(tmp_path)
    assert (later.found.names, later.found.num_removed) == ((NAMES[1],), 1)
    assert not half.exists()
    assert letter.exists()
    later.store.close()


def test_disk_store_full_disk_refuses_and_leaves_nothing(rig, monkeypatch):
    room = [HEADER_BYTES + 100]

    def write(fd, view):
        if not room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        size = min(room[0], len(view))
        room[0] -= size
        return real(fd, view[:size])

    real = os.write
    with monkeypatch.context() as patch:
        patch.setattr(block_file.os, "write", write)
        wrote = rig.write(NAMES[1])
    assert (wrote.verdict, wrote.num_bytes) == (DiskVerdict.FAILED, 0)
    assert not list(rig.path(NAMES[1]).parent.iterdir())
    assert rig.write(NAMES[1]).verdict is DiskVerdict.DONE
    assert rig.read(NAMES[1]).verdict is DiskVerdict.DONE


def test_disk_store_does_not_follow_links(rig, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("untouched")
    rig.write(NAMES[1])
    rig.path(NAMES[1]).unlink()
    rig.path(NAMES[1]).symlink_to(secret)
    assert rig.read(NAMES[1]).verdict is DiskVerdict.FAILED
    rig.path(NAMES[1]).with_suffix(".tmp").symlink_to(secret)
    assert rig.write(NAMES[1]).verdict is DiskVerdict.FAILED
    assert secret.read_text() == "untouched"


def test_cache_identity_differs_by_layout_secret_and_engine():
    layout = KVLayout(model_fingerprint="m", dtype="float32", num_layers=2, num_kv_heads=2, head_dim=4, block_size=16)
    one = cache_identity(layout, secret=b"s", computed_by=("a", "bc"))
    assert one == cache_identity(layout, secret=b"s", computed_by=("a", "bc"))
    others = [
        cache_identity(replace(layout, model_fingerprint="n"), secret=b"s", computed_by=("a", "bc")),
        cache_identity(replace(layout, head_dim=8), secret=b"s", computed_by=("a", "bc")),
        cache_identity(layout, secret=b"t", computed_by=("a", "bc")),
        cache_identity(layout, secret=b"s", computed_by=("ab", "c")),
    ]
    assert len({one.digest, *(other.digest for other in others)}) == 5


def test_block_names_are_stable_per_secret_and_tenant():
    """A chain's root is keyed with the cluster's secret and covers model and tenant; no process adds anything."""
    chains = []
    for secret, tenant in ((b"s" * 16, "a"), (b"s" * 16, "a"), (b"t" * 16, "a"), (b"s" * 16, "b")):
        chain: list[BlockHash] = []
        BlockHasher(secret).extend(root_hash(secret=secret, model_fingerprint="m", salt=tenant), chain, range(40))
        chains.append(tuple(map(file_name, chain)))
    assert chains[0] == chains[1]
    assert len({*chains}) == 3


def test_disk_store_index_is_bounded_and_detects_misuse():
    index = DiskIndex(3, NAMES[:3])
    assert index.begin(NAMES[3]) == [NAMES[0]]
    assert index.begin(NAMES[3]) is None
    index.touch(NAMES[1])
    assert index.begin(NAMES[4]) == [NAMES[2]]
    assert index.begin(NAMES[5]) == [NAMES[1]]
    assert index.begin(NAMES[6]) is None
    index.end(NAMES[4], is_stored=True)
    index.end(NAMES[3], is_stored=False)
    assert list(index) == [NAMES[4]]
    with pytest.raises(InvariantError):
        index.end(NAMES[3], is_stored=True)
    with pytest.raises(InvariantError):
        DiskIndex(1, NAMES[:2])
    assert file_bytes(1) == file_bytes(4096 - HEADER_BYTES) == 4096
