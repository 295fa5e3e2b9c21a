"""Files of certificates that are renewed: when they are read again, and what is logged of bad ones."""

import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tandem.errors import UnreadableFile
from tandem.rpc import mutual_tls, renewable_tls
from tandem.rpc.renewable_tls import RETRY_S, RenewableTls
from tests.support.certificates import Authority


class Rig:
    """Files in place, others to renew them with, and a clock."""

    def __init__(self, folder: Path) -> None:
        for name in ("now", "new"):
            (folder / name).mkdir()
        authority = Authority()
        self.files = authority.issue(folder / "now", setting="cluster.tls")
        self.new = authority.issue(folder / "new")
        self.now_s = 0.0
        self.tls = RenewableTls(self.files, use="a test", clock=lambda: self.now_s)
        self.first = self.tls.current()

    def renew(self, *names: str) -> None:
        for name in names or ("ca", "key", "cert"):
            shutil.copy(getattr(self.new, name), getattr(self.files, name))

    def has_renewed(self) -> bool:
        return self.tls.current().cert == self.new.cert.read_bytes()


@pytest.fixture
def rig() -> Iterator[Rig]:
    with TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Rig(Path(folder))


@contextmanager
def without_root() -> Iterator[None]:
    """Root reads every file."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)


def test_unchanged_files_are_not_read_again(rig: Rig) -> None:
    rig.now_s = 10 * RETRY_S
    assert rig.tls.current() is rig.first


def test_file_that_was_renewed_unreadable_is_read_once_its_mode_is_mended(rig: Rig, caplog) -> None:
    caplog.set_level(logging.INFO)
    rig.renew()
    rig.files.key.chmod(0)
    with without_root():
        assert rig.tls.current() is rig.first
    before = rig.files.key.stat()
    rig.files.key.chmod(0o644)
    after = rig.files.key.stat()
    assert (before.st_ino, before.st_mtime_ns, before.st_size) == (after.st_ino, after.st_mtime_ns, after.st_size)
    with without_root():
        assert rig.has_renewed()
    assert [record.levelname for record in caplog.records] == ["ERROR", "INFO"]
    assert "cluster.tls.key: " in caplog.messages[0]
    assert caplog.messages[1] == "new certificates of cluster.tls are in force for a test"


def test_failed_read_is_tried_again_though_the_files_seem_unchanged(rig: Rig, caplog, monkeypatch) -> None:
    num_reads = 0

    def fails(*_args: object) -> str:
        nonlocal num_reads
        num_reads += 1
        raise UnreadableFile("cluster.tls.cert: Stale file handle")

    rig.renew()
    with monkeypatch.context() as patched:
        patched.setattr(renewable_tls, "read_pem", fails)
        for _ in range(3):
            assert rig.tls.current() is rig.first
        assert num_reads == 1, "at most once in so long"
        rig.now_s = RETRY_S
        assert rig.tls.current() is rig.first
        assert num_reads == 2
    assert len(caplog.records) == 1, "the same complaint is logged once"
    assert not rig.has_renewed()
    rig.now_s = 2 * RETRY_S
    assert rig.has_renewed()


def test_file_that_vanishes_between_being_read_and_loaded_keeps_the_former(rig: Rig, caplog, monkeypatch) -> None:
    load = mutual_tls.load_certificate

    def vanishes(context, cert: Path, key: Path, setting: str) -> None:
        key.rename(key.with_name("gone"))
        context.load_cert_chain(cert, key)

    rig.renew()
    with monkeypatch.context() as patched:
        patched.setattr(mutual_tls, "load_certificate", vanishes)
        assert rig.tls.current() is rig.first
    assert "No such file" in caplog.text
    assert mutual_tls.load_certificate is load
    rig.renew()
    assert rig.has_renewed()


def test_directory_in_place_of_a_file_keeps_the_former(rig: Rig, caplog) -> None:
    rig.renew("ca", "cert")
    rig.files.key.unlink()
    rig.files.key.mkdir()
    assert rig.tls.current() is rig.first
    assert "Is a directory" in caplog.text
    rig.files.key.rmdir()
    rig.renew()
    assert rig.has_renewed()
