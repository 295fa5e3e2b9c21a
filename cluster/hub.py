"""Models from the hub. `python -m cluster.hub ORG/NAME --into DIR` is what a pod runs before it serves one."""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tandem.errors import ConfigError

_TOKENIZER_FILES = ("*.json", "*.jinja", "tokenizer.model")
_MODEL_FILES = (*_TOKENIZER_FILES, "*.safetensors")
_Download = Callable[..., Any]


def download(hub_id: str) -> str:
    """Into the user's own cache; returns the directory. Raises ConfigError."""
    return _snapshot(hub_id, None, allow_patterns=list(_MODEL_FILES))


def fetch(hub_id: str, into: Path, *, revision: str | None, weights: bool, snapshot: _Download | None = None) -> bool:
    """Put the model's files into a directory; False where an earlier call has done so. Raises ConfigError.

    Several pods may share the directory: the hub's client locks each file, and what one has begun another goes on with.
    """
    done = into / f".fetched-{'model' if weights else 'tokenizer'}"
    asked = f"{hub_id}@{revision or 'main'}\n"
    if done.is_file() and done.read_text(encoding="utf-8") == asked:
        return False
    into.mkdir(parents=True, exist_ok=True)
    patterns = list(_MODEL_FILES if weights else _TOKENIZER_FILES)
    _snapshot(hub_id, snapshot, allow_patterns=patterns, revision=revision, local_dir=into)
    done.write_text(asked, encoding="utf-8")
    return True


def _snapshot(hub_id: str, snapshot: _Download | None, **options: Any) -> str:
    try:
        return str((snapshot or _hub_client())(hub_id, **options))
    except ImportError:
        raise ConfigError(
            f"model.path: {hub_id} is not a directory; for hub ids `pip install huggingface-hub`"
        ) from None
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(f"model.path: cannot fetch {hub_id}: {reason}") from None


def _hub_client() -> _Download:
    from huggingface_hub import snapshot_download

    client: _Download = snapshot_download
    return client


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line, down to its exit code."""
    parser = argparse.ArgumentParser(prog="cluster.hub", description="fetch a model from the hub, once")
    parser.add_argument("hub_id", metavar="ORG/NAME")
    parser.add_argument("--into", type=Path, required=True, help="the directory to fill")
    parser.add_argument("--revision", help="branch, tag or commit; main when absent")
    parser.add_argument("--tokenizer-only", action="store_true", help="what a router needs: no weights")
    told = parser.parse_args(arguments)
    try:
        is_new = fetch(told.hub_id, told.into, revision=told.revision, weights=not told.tokenizer_only)
    except (ConfigError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2 if isinstance(error, ConfigError) else 1
    print(f"{told.hub_id}: {'fetched into' if is_new else 'is already in'} {told.into}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
