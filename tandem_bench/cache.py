"""Where benchmarks keep what is costly to make: models, the peers' environments. Never in the repository."""

import os
from pathlib import Path

_NAME = "tandem-bench"


def cache_dir(kind: str) -> Path:
    """`~/.cache/tandem-bench/KIND`, or below `XDG_CACHE_HOME`; made when it is missing."""
    root = os.environ.get("XDG_CACHE_HOME")
    folder = (Path(root) if root else Path.home() / ".cache") / _NAME / kind
    folder.mkdir(parents=True, exist_ok=True)
    return folder
