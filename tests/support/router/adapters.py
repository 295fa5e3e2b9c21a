"""Adapters that tests name, without files."""

import hashlib
from pathlib import Path

from tandem.adapters.files import Adapter

MEBIBYTE = 1 << 20


def adapter_of(name: str = "sql", *, num_bytes: int = 20 * MEBIBYTE, version: int = 0) -> Adapter:
    """An adapter whose digest depends on its name and `version`."""
    digest = hashlib.sha256(f"{name} {version}".encode()).hexdigest()
    return Adapter(name=name, path=Path("/adapters") / name, digest=digest, num_bytes=num_bytes)
