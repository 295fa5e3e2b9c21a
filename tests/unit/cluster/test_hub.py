"""A pod's download before its start: once, complete, and resumed after a break."""

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest

from cluster.hub import DownloadPatience, Fetch, Listing, is_permanent
from cluster.processes.effective_config import PortDrawer
from tandem.errors import ConfigError

FILES = {"config.json": 4, "tokenizer.json": 4, "model.safetensors": 40, "model.bin": 40}


class FakeHub:
    """Has one model; each of `breaks` is raised by one download, after some bytes."""

    def __init__(self, *breaks: Exception, comes: int = 0) -> None:
        self.breaks = list(breaks)
        self.comes = comes
        self.downloads: list[tuple[str, bool]] = []

    def files(self, _hub_id: str, revision: str | None) -> Listing:
        return Listing(f"commit of {revision}", FILES)

    def download(self, _hub_id: str, commit: str, patterns: Sequence[str], into: Path | None) -> str:
        assert into is not None
        self.downloads.append((commit, "*.safetensors" in patterns))
        if self.breaks:
            with (into / "begun.incomplete").open("ab") as file:
                file.write(bytes(self.comes))
            raise self.breaks.pop(0)
        for name, size in FILES.items():
            if f"*{Path(name).suffix}" in patterns:
                (into / name).write_bytes(bytes(size))
        return str(into)


class Fetching:
    """A fetch whose pauses take no time."""

    def __init__(self, hub: FakeHub, *, most_failures: int = 20) -> None:
        self.pauses: list[float] = []
        patience = DownloadPatience(most_failures=most_failures, rng=Random(1))
        self.fetch = Fetch(hub, patience, pause=self.pauses.append, report=lambda _line: None)


def fetch(hub: FakeHub, into: Path, *, revision: str | None = None, weights: bool = True) -> bool:
    return Fetching(hub).fetch.run("org/m", into, revision=revision, weights=weights)


def test_hub_download_runs_once_per_content_and_revision(tmp_path: Path) -> None:
    hub, into = FakeHub(), tmp_path / "models" / "m"
    assert fetch(hub, into, weights=False)
    assert fetch(hub, into)
    assert not fetch(hub, into)
    assert not fetch(hub, into, weights=False)
    assert fetch(hub, into, revision="v2")
    assert hub.downloads == [("commit of None", False), ("commit of None", True), ("commit of v2", True)]


def test_hub_download_retries_with_growing_pauses(tmp_path: Path) -> None:
    fetching = Fetching(FakeHub(*[ConnectionError("reset")] * 9))
    assert fetching.fetch.run("org/m", tmp_path, revision=None, weights=True)
    assert (tmp_path / "model.safetensors").stat().st_size == 40
    for number, pause_s in enumerate(fetching.pauses):
        whole_s = min(60.0, 2.0**number)
        assert whole_s / 2 <= pause_s <= whole_s
    assert len(fetching.pauses) == 9


def test_hub_download_gives_up_after_failures_without_progress(tmp_path: Path) -> None:
    dead = Fetching(FakeHub(*[ConnectionError("reset\nby peer")] * 99), most_failures=5)
    with pytest.raises(ConfigError, match=r"cannot download org/m: reset$"):
        dead.fetch.run("org/m", tmp_path, revision=None, weights=True)
    assert len(dead.pauses) == 4
    slow = Fetching(FakeHub(*[ConnectionError("reset")] * 99, comes=1), most_failures=5)
    assert slow.fetch.run("org/m", tmp_path, revision=None, weights=True)
    assert len(slow.pauses) == 99
    assert max(slow.pauses) <= 1.0


def test_hub_download_removes_incomplete_files_when_complete(tmp_path: Path) -> None:
    begun = tmp_path / ".cache" / "huggingface" / "download" / "x.1234.incomplete"
    begun.parent.mkdir(parents=True)
    begun.write_bytes(bytes(9))
    assert fetch(FakeHub(), tmp_path, weights=False)
    assert begun.exists(), "somebody may be fetching the weights"
    assert fetch(FakeHub(), tmp_path)
    assert not begun.exists()


def _answer(status: int) -> OSError:
    error = OSError(f"{status}")
    error.response = SimpleNamespace(status_code=status)  # type: ignore[attr-defined]
    return error


def _caused_by(cause: Exception) -> Exception:
    error = FileNotFoundError("an error happened while trying to locate the files")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    "error",
    [_answer(401), _answer(404), _caused_by(_answer(404)), ValueError("no/such/id"), OSError(errno.ENOSPC, "full"),
     ImportError("huggingface_hub")],
    ids=repr,
)  # fmt: skip
def test_hub_download_permanent_error_is_not_retried(error: Exception, tmp_path: Path) -> None:
    fetching = Fetching(FakeHub(error))
    with pytest.raises(ConfigError, match="cannot download org/m"):
        fetching.fetch.run("org/m", tmp_path, revision=None, weights=True)
    assert fetching.pauses == []
    assert fetch(FakeHub(), tmp_path), "what failed is not said to be there"


@pytest.mark.parametrize(
    "error",
    [_answer(429), _answer(503), _caused_by(_answer(500)), ConnectionResetError(errno.ECONNRESET, "reset"),
     RuntimeError("of a transport's own"), OSError("Consistency check failed"), TimeoutError()],
    ids=repr,
)  # fmt: skip
def test_hub_transient_errors_are_retryable(error: Exception) -> None:
    assert not is_permanent(error)


def test_hub_download_offline_cache_hit_is_not_complete(tmp_path: Path) -> None:
    class Deaf(FakeHub):
        """Cannot reach the hub for the download, and so uses the existing files."""

        def download(self, hub_id: str, commit: str, patterns: Sequence[str], into: Path | None) -> str:
            if len(self.downloads) < 2:
                self.downloads.append((commit, True))
                return str(into)
            return super().download(hub_id, commit, patterns, into)

    (tmp_path / "config.json").write_bytes(bytes(4))
    (tmp_path / "model.safetensors").write_bytes(bytes(7))
    fetching = Fetching(Deaf())
    assert fetching.fetch.run("org/m", tmp_path, revision=None, weights=True)
    assert len(fetching.pauses) == 2
    assert (tmp_path / "model.safetensors").stat().st_size == 40


def test_hub_download_on_sigterm_ends_at_once(tmp_path: Path) -> None:
    with PortDrawer() as ports:
        nobody = f"http://127.0.0.1:{ports.draw('127.0.0.1', 'a test')}"
    own = {"HF_ENDPOINT": nobody, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0", "NO_PROXY": "127.0.0.1"}
    command = [sys.executable, "-m", "cluster.hub", "org/m", "--into", str(tmp_path / "m")]
    with subprocess.Popen(command, env=os.environ | own, stdout=subprocess.PIPE, text=True) as fetching:
        assert fetching.stdout is not None
        assert "retrying in" in fetching.stdout.readline()
        fetching.terminate()
        # By its own handler: the first process of a container has no other way.
        assert fetching.wait() == 128 + signal.SIGTERM


def test_hub_model_without_matching_files_is_refused(tmp_path: Path) -> None:
    class Empty(FakeHub):
        def files(self, _hub_id: str, revision: str | None) -> Listing:
            return Listing("c", {"model.bin": 4})

    with pytest.raises(ConfigError, match="no file matches"):
        fetch(Empty(), tmp_path)
