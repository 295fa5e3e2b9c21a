"""Downloads of models from the hub. A pod runs `python -m cluster.hub ORG/NAME --into DIR` before it serves a model.

The hub's own client resumes a file a few times if its connection breaks. Beyond that, this module retries the download
after a pause, keeping every complete file. A download counts as done only when all files have been compared with the
hub's list: without that list the client would accept whatever lies in the directory.
"""

import argparse
import errno
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from random import Random
from typing import NamedTuple, Protocol

from tandem.backoff import Backoff
from tandem.errors import ConfigError

_LASTING = frozenset({400, 401, 403, 404, 405, 407, 410, 416, 422, 451})
"""HTTP statuses that a retry will not change, such as no such model or no permission."""
_FULL_OR_FORBIDDEN = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR}
)
"""Errors of the target directory that a retry will not change."""


@dataclass(slots=True, kw_only=True)
class DownloadPatience:
    """Decides about retries of one download, after each failure."""

    most_failures: int
    """Maximum number of failures in a row without another complete file."""
    rng: Random
    backoff: Backoff = field(default_factory=lambda: Backoff(first_s=1.0, most_s=60.0))
    _most_bytes: int = field(init=False, default=0)
    _failures: int = field(init=False, default=0)

    def wait_s(self, error: BaseException, num_bytes: int) -> float | None:
        """Return the pause before the next attempt, given the bytes present so far; None to give up."""
        if num_bytes > self._most_bytes:
            self._most_bytes, self._failures = num_bytes, 0
        self._failures += 1
        if is_permanent(error) or self._failures >= self.most_failures:
            return None
        return self.backoff.wait_s(self._failures, self.rng)


def is_permanent(error: BaseException | None) -> bool:
    """Return whether a retry cannot succeed.

    The client's own error shows this by its type or by the server's response, possibly some causes down.
    """
    while error is not None:
        status = getattr(getattr(error, "response", None), "status_code", None)
        if isinstance(status, int):
            return status in _LASTING
        if isinstance(error, OSError) and error.errno is not None:
            return error.errno in _FULL_OR_FORBIDDEN
        if isinstance(error, ImportError | ValueError | TypeError):
            return True
        error = error.__cause__
    return False


_TOKENIZER_FILES = ("*.json", "*.jinja", "tokenizer.model")
_MODEL_FILES = (*_TOKENIZER_FILES, "*.safetensors")
MOST_FAILURES = 20
"""Maximum number of failures in a row; with pauses of up to a minute they take a quarter of an hour or more."""


class Listing(NamedTuple):
    """Commit and files of a model on the hub."""

    commit: str
    sizes: Mapping[str, int | None]
    """Sizes in bytes by file name; None where the hub states none."""


class Hub(Protocol):
    """Source of models. Its methods may raise any exception."""

    def files(self, hub_id: str, revision: str | None) -> Listing:
        """List the files of a branch, tag or commit; None: the main branch."""

    def download(self, hub_id: str, commit: str, patterns: Sequence[str], into: Path | None) -> str:
        """Download into a directory, or the user's cache if None; returns the directory with the files."""


class HubClient:
    def files(self, hub_id: str, revision: str | None) -> Listing:
        """List the files in one request, whatever their number."""
        from huggingface_hub import HfApi

        info = HfApi().model_info(hub_id, revision=revision, files_metadata=True)
        return Listing(str(info.sha), {file.rfilename: file.size for file in info.siblings or ()})

    def download(self, hub_id: str, commit: str | None, patterns: Sequence[str], into: Path | None) -> str:
        """Download the files, resuming what an earlier call has begun."""
        from huggingface_hub import snapshot_download

        return str(snapshot_download(hub_id, revision=commit, allow_patterns=list(patterns), local_dir=into))


def download(hub_id: str, files: Sequence[str] = _MODEL_FILES) -> str:
    """Download files, named or by patterns, into the user's cache and return the directory. Raises ConfigError."""
    try:
        return HubClient().download(hub_id, None, files, None)
    except ImportError:
        raise ConfigError(
            f"model.path: {hub_id} is not a directory; to use a hub id, `pip install huggingface-hub`"
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path: cannot download {hub_id}: {_first_line(error)}") from None


def _say(line: str) -> None:
    print(line, flush=True)


class Fetch:
    """Downloads one model's files into a directory, with retries."""

    def __init__(
        self,
        hub: Hub,
        patience: DownloadPatience,
        *,
        pause: Callable[[float], None] = time.sleep,
        report: Callable[[str], None] = _say,
    ) -> None:
        self._hub = hub
        self._patience = patience
        self._pause = pause
        self._report = report

    def run(self, hub_id: str, into: Path, *, revision: str | None, weights: bool) -> bool:
        """Download the files; return False if an earlier call has done so. Raises ConfigError, OSError.

        Several pods may share the directory: the hub's client locks each file, so each one is downloaded once.
        """
        done = into / f".fetched-{'model' if weights else 'tokenizer'}"
        requested = f"{hub_id}@{revision or 'main'}\n"
        if done.is_file() and done.read_text(encoding="utf-8") == requested:
            return False
        into.mkdir(parents=True, exist_ok=True)
        patterns = _MODEL_FILES if weights else _TOKENIZER_FILES
        while (error := self._attempt(hub_id, revision, patterns, into)) is not None:
            wait_s = self._patience.wait_s(error, _num_bytes(into))
            if wait_s is None:
                raise ConfigError(f"model.path: cannot download {hub_id}: {_first_line(error)}") from error
            self._report(f"{hub_id}: {_first_line(error)}; retrying in {wait_s:.0f} s")
            self._pause(wait_s)
        done.write_text(requested, encoding="utf-8")
        if weights:
            _clear(into)
        return True

    def _attempt(self, hub_id: str, revision: str | None, patterns: Sequence[str], into: Path) -> Exception | None:
        """Try once; return why it failed, or None if every file is complete."""
        try:
            listing = self._hub.files(hub_id, revision)
            wanted = [name for name in listing.sizes if any(fnmatch(name, pattern) for pattern in patterns)]
            if not wanted:
                raise ValueError(f"no file matches {', '.join(patterns)}")
            self._hub.download(hub_id, listing.commit, patterns, into)
            torn = next((name for name in wanted if not _is_whole(into / name, listing.sizes[name])), None)
            return None if torn is None else ConnectionError(f"{torn} is incomplete")
        except Exception as error:  # noqa: BLE001  # the client's transports raise their own exceptions
            return error


def _is_whole(path: Path, size: int | None) -> bool:
    return path.is_file() and size in (None, path.stat().st_size)


def _num_bytes(folder: Path) -> int:
    """Count the bytes present so far, in complete and incomplete files."""
    num_bytes = 0
    for path in folder.rglob("*"):
        with suppress(OSError):  # another pod has just renamed it
            num_bytes += path.lstat().st_size
    return num_bytes


def _clear(folder: Path) -> None:
    """Remove the incomplete files of killed pods; every running download finds its files complete."""
    for begun in folder.rglob("*.incomplete"):
        with suppress(OSError):
            begun.unlink()


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), "") or type(error).__name__


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="cluster.hub", description="download a model from the hub, unless it is there already"
    )
    parser.add_argument("hub_id", metavar="ORG/NAME")
    parser.add_argument("--into", type=Path, required=True, help="target directory")
    parser.add_argument("--revision", help="branch, tag or commit; default: main")
    parser.add_argument(
        "--tokenizer-only", action="store_true", help="download only what a router needs, without weights"
    )
    parser.add_argument(
        "--tries",
        type=int,
        default=MOST_FAILURES,
        metavar="N",
        help="maximum failures in a row without another complete file; default: %(default)d",
    )
    options = parser.parse_args(arguments)
    # The first process of a container ignores signals without a handler: its pod would end only after its grace period.
    # Complete files are kept.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(128 + signal.SIGTERM))
    try:
        fetch = Fetch(HubClient(), DownloadPatience(most_failures=options.tries, rng=Random()))
        is_new = fetch.run(options.hub_id, options.into, revision=options.revision, weights=not options.tokenizer_only)
    except (ConfigError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2 if isinstance(error, ConfigError) else 1
    print(f"{options.hub_id}: {'downloaded into' if is_new else 'is already in'} {options.into}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
