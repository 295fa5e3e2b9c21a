"""Directories for costly files of benchmarks: models and the peers' environments. Never in the repository."""

import os
from pathlib import Path

_NAME = "tandem-bench"


def cache_dir(kind: str) -> Path:
    """Return `~/.cache/tandem-bench/KIND`, or the same below `XDG_CACHE_HOME`, created if missing."""
    root = os.environ.get("XDG_CACHE_HOME")
    folder = (Path(root) if root else Path.home() / ".cache") / _NAME / kind
    folder.mkdir(parents=True, exist_ok=True)
    return folder
