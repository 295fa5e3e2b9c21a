"""Irregular or oversized files are refused by name, without blocking or filling memory."""

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from tandem.config.cluster import load
from tandem.config.source.regular_file import read_regular_file, read_regular_text
from tandem.config.source.yaml_file import read_mapping
from tandem.errors import ConfigError, UnreadableFile
from tandem.rpc.certificates import read_pem


def make_fifo(path: Path) -> None:
    os.mkfifo(path)


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


def test_regular_file_within_bound_is_read(tmp_path: Path) -> None:
    path, data = tmp_path / "file", os.urandom(3 << 20)
    path.write_bytes(data)
    assert read_regular_file(path, max_bytes=len(data)) == data
    link = tmp_path / "link"
    link.symlink_to(path)
    assert read_regular_file(link, max_bytes=len(data)) == data
    with pytest.raises(UnreadableFile, match=rf"^{path}: larger than {len(data) - 1} bytes$"):
        read_regular_file(path, max_bytes=len(data) - 1)


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (make_fifo, "a FIFO, not a regular file"),
        (make_socket, "a socket, not a regular file"),
        (Path.mkdir, "Is a directory"),
        (lambda path: path.symlink_to("/dev/zero"), "a device, not a regular file"),
        (lambda path: path.symlink_to(path), "Too many levels of symbolic links"),
        (lambda _path: None, "No such file or directory"),
    ],
)
def test_regular_file_fifo_or_device_is_refused_without_blocking(
    tmp_path: Path, make: Callable[[Path], None], kind: str
) -> None:
    path = tmp_path / "named"
    make(path)
    with pytest.raises(UnreadableFile, match=rf"^{path}: {kind}$"):
        read_regular_file(path)


def test_regular_file_replaced_during_open_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, fifo, regular = tmp_path / "file", tmp_path / "fifo", os.stat(__file__)
    os.mkfifo(fifo)
    path.symlink_to(fifo)
    monkeypatch.setattr("tandem.config.source.regular_file.os.stat", lambda _path: regular)
    with pytest.raises(UnreadableFile, match="a FIFO, not a regular file"):
        read_regular_file(path)


def test_regular_file_bound_counts_bytes_read() -> None:
    """A file of proc(5) is regular and reports size 0."""
    path = Path("/proc/self/status")
    assert path.stat().st_size == 0
    assert read_regular_file(path).startswith(b"Name:")
    with pytest.raises(UnreadableFile, match="larger than 16 bytes"):
        read_regular_file(path, max_bytes=16)


def test_regular_file_check_receives_opened_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("text")
    seen: list[int] = []
    assert read_regular_text(path, check=lambda status: seen.append(status.st_ino)) == "text"
    assert seen == [path.stat().st_ino]


def test_regular_text_not_utf8_is_refused_and_not_shown(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"hush\xff")
    with pytest.raises(ConfigError, match=r"file: not UTF-8 \(byte 4\)$") as refusal:
        read_regular_text(path)
    assert "hush" not in str(refusal.value)
    assert not isinstance(refusal.value, UnreadableFile), "it was read"


@pytest.mark.parametrize("read", [load, read_mapping, lambda path: read_pem(path, "router.tls.cert")])
@pytest.mark.parametrize("special", ["/dev/zero", "fifo"])
def test_readers_of_user_files_refuse_endless_file(
    tmp_path: Path, read: Callable[[Path], object], special: str
) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(ConfigError, match="not a regular file"):
        read(tmp_path / special)


def test_config_variable_naming_pipe_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "fifo")
    monkeypatch.setenv("TANDEM_SECRET__FILE", str(tmp_path / "fifo"))
    with pytest.raises(ConfigError, match=r"^environment variable TANDEM_SECRET__FILE: .*fifo: a FIFO"):
        load(None)
