"""Models from the hub. `python -m cluster.hub ORG/NAME --into DIR` is what a pod runs before it serves one.

The hub's own client goes on with a file where its connection broke, a few times; then the file is begun anew, after a
pause, and what has come whole stays: `cluster.hub` says how often. What is there is compared with the hub's
list before it counts as fetched: where the client cannot ask for that list, it takes whatever lies in the directory.
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
"""Answers of a server that will say the same tomorrow: no such model, no right to it."""
_FULL_OR_FORBIDDEN = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR}
)
"""Of the directory."""


@dataclass(slots=True, kw_only=True)
class DownloadPatience:
    """Of one download; told of each failure."""

    most_failures: int
    """In a row, between which no file has come whole."""
    rng: Random
    backoff: Backoff = field(default_factory=lambda: Backoff(first_s=1.0, most_s=60.0))
    _most_bytes: int = field(init=False, default=0)
    _failures: int = field(init=False, default=0)

    def wait_s(self, error: BaseException, num_bytes: int) -> float | None:
        """An attempt has failed, and so much of the model is there: the pause before the next; None: give up."""
        if num_bytes > self._most_bytes:
            self._most_bytes, self._failures = num_bytes, 0
        self._failures += 1
        if will_fail_again(error) or self._failures >= self.most_failures:
            return None
        return self.backoff.wait_s(self._failures, self.rng)


def will_fail_again(error: BaseException | None) -> bool:
    """Whether what is asked for is not to be had, however often one asks.

    A client's own error says it by the answer that it had from a server, maybe some causes down, or by its type.
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
"""With pauses of up to a minute: a quarter of an hour and more."""


class Listing(NamedTuple):
    """What the hub has of a model."""

    commit: str
    sizes: Mapping[str, int | None]
    """In bytes, by the file's name; None where the hub does not say."""


class Hub(Protocol):
    """Whoever has models. Raises what it likes."""

    def files(self, hub_id: str, revision: str | None) -> Listing:
        """Of that branch, tag or commit; None: of the main branch."""

    def download(self, hub_id: str, commit: str, patterns: Sequence[str], into: Path | None) -> str:
        """Into a directory, or the user's own cache; returns where the files are."""


class HubClient:
    def files(self, hub_id: str, revision: str | None) -> Listing:
        """One request, whatever the number of files."""
        from huggingface_hub import HfApi

        info = HfApi().model_info(hub_id, revision=revision, files_metadata=True)
        return Listing(str(info.sha), {file.rfilename: file.size for file in info.siblings or ()})

    def download(self, hub_id: str, commit: str | None, patterns: Sequence[str], into: Path | None) -> str:
        """Goes on with what an earlier call has begun."""
        from huggingface_hub import snapshot_download

        return str(snapshot_download(hub_id, revision=commit, allow_patterns=list(patterns), local_dir=into))


def download(hub_id: str) -> str:
    """Into the user's own cache; returns the directory. Raises ConfigError."""
    try:
        return HubClient().download(hub_id, None, _MODEL_FILES, None)
    except ImportError:
        raise ConfigError(
            f"model.path: {hub_id} is not a directory; for hub ids `pip install huggingface-hub`"
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path: cannot fetch {hub_id}: {_first_line(error)}") from None


def _say(line: str) -> None:
    print(line, flush=True)


class Fetch:
    """Puts one model's files into a directory."""

    def __init__(
        self,
        hub: Hub,
        patience: DownloadPatience,
        *,
        pause: Callable[[float], None] = time.sleep,
        tell: Callable[[str], None] = _say,
    ) -> None:
        self._hub = hub
        self._patience = patience
        self._pause = pause
        self._tell = tell

    def run(self, hub_id: str, into: Path, *, revision: str | None, weights: bool) -> bool:
        """False where an earlier call has done so. Raises ConfigError, OSError.

        Several pods may share the directory: the hub's client locks each file, and what has come for one is there for
        all.
        """
        done = into / f".fetched-{'model' if weights else 'tokenizer'}"
        asked = f"{hub_id}@{revision or 'main'}\n"
        if done.is_file() and done.read_text(encoding="utf-8") == asked:
            return False
        into.mkdir(parents=True, exist_ok=True)
        patterns = _MODEL_FILES if weights else _TOKENIZER_FILES
        while (error := self._attempt(hub_id, revision, patterns, into)) is not None:
            wait_s = self._patience.wait_s(error, _num_bytes(into))
            if wait_s is None:
                raise ConfigError(f"model.path: cannot fetch {hub_id}: {_first_line(error)}") from error
            self._tell(f"{hub_id}: {_first_line(error)}; again in {wait_s:.0f} s")
            self._pause(wait_s)
        done.write_text(asked, encoding="utf-8")
        if weights:
            _clear(into)
        return True

    def _attempt(self, hub_id: str, revision: str | None, patterns: Sequence[str], into: Path) -> Exception | None:
        """Why it failed; None: every file is there."""
        try:
            listing = self._hub.files(hub_id, revision)
            wanted = [name for name in listing.sizes if any(fnmatch(name, pattern) for pattern in patterns)]
            if not wanted:
                raise ValueError(f"none of its files is {', '.join(patterns)}")
            self._hub.download(hub_id, listing.commit, patterns, into)
            torn = next((name for name in wanted if not _is_whole(into / name, listing.sizes[name])), None)
            return None if torn is None else ConnectionError(f"{torn} has not come whole")
        except Exception as error:  # noqa: BLE001  # the client's transports raise classes of their own
            return error


def _is_whole(path: Path, size: int | None) -> bool:
    return path.is_file() and size in (None, path.stat().st_size)


def _num_bytes(folder: Path) -> int:
    """Of what has come so far, whole files and begun ones."""
    num_bytes = 0
    for path in folder.rglob("*"):
        with suppress(OSError):  # another pod has just renamed it
            num_bytes += path.lstat().st_size
    return num_bytes


def _clear(folder: Path) -> None:
    """Of what pods have begun and were killed at nothing is of use now; who still writes finds the files whole."""
    for begun in folder.rglob("*.incomplete"):
        with suppress(OSError):
            begun.unlink()


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), "") or type(error).__name__


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line, down to its exit code."""
    parser = argparse.ArgumentParser(prog="cluster.hub", description="fetch a model from the hub, once")
    parser.add_argument("hub_id", metavar="ORG/NAME")
    parser.add_argument("--into", type=Path, required=True, help="the directory to fill")
    parser.add_argument("--revision", help="branch, tag or commit; main when absent")
    parser.add_argument("--tokenizer-only", action="store_true", help="what a router needs: no weights")
    parser.add_argument(
        "--tries",
        type=int,
        default=MOST_FAILURES,
        metavar="N",
        help="that may fail in a row without any further file; %(default)d when absent",
    )
    told = parser.parse_args(arguments)
    # A container's first process hears no signal that it has no handler for: its pod would end with its grace alone.
    # Files that have come whole stay.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(128 + signal.SIGTERM))
    try:
        fetch = Fetch(HubClient(), DownloadPatience(most_failures=told.tries, rng=Random()))
        is_new = fetch.run(told.hub_id, told.into, revision=told.revision, weights=not told.tokenizer_only)
    except (ConfigError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2 if isinstance(error, ConfigError) else 1
    print(f"{told.hub_id}: {'fetched into' if is_new else 'is already in'} {told.into}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
