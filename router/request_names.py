"""Clients' own names of their requests: shown back to them, and used nowhere else."""

import re

from tandem.errors import InvalidRequest

_NAME = re.compile(r"[\x21-\x7e]{1,128}")


def check_request_id(value: str, param: str) -> str:
    """A client's own id, fit to be sent back. Raises InvalidRequest."""
    if not _NAME.fullmatch(value):
        raise InvalidRequest(f"{param} must have 1 to 128 visible ASCII characters", param=param)
    return value
