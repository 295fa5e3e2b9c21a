"""Asks a running cluster over its control socket."""

import socket
from collections.abc import Iterator
from pathlib import Path

from pydantic import ValidationError

from cluster.control.wire import ControlMessage, Told, written
from tandem.process.runtime_folder import answers_as_us

_CONNECT_S = 5.0


class NoCluster(Exception):
    """Nobody answers there, or not to the end."""


def ask(path: Path, asked: ControlMessage) -> Iterator[Told]:
    """Line by line, until the last one has come; a change takes as long as it takes. Raises NoCluster."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
        link.settimeout(_CONNECT_S)
        try:
            link.connect(str(path))
        except OSError as error:
            raise NoCluster(
                f"no cluster answers at {path} ({error.strerror or error}): start one with `tandem up`, "
                "or name its HTTP port with --port"
            ) from None
        try:
            if not answers_as_us(link):
                raise NoCluster(f"another user answers at {path}")
            link.sendall(written(asked))
            link.settimeout(None)
            with link.makefile("rb") as lines:
                for line in lines:
                    told = Told.model_validate_json(line)
                    yield told
                    if told.done is not None:
                        return
        except (OSError, ValidationError) as error:
            raise NoCluster(f"no cluster answers at {path}: {error}") from None
    raise NoCluster("the cluster ended before it was done")
