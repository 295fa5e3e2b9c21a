"""Ids of requests: this router's own, and clients', which are only echoed back to them."""

import re

from router.access.audit_log import current_entry
from tandem.errors import InvalidRequest
from tandem.telemetry.logs import REQUEST_ID
from tandem.values.ids import RequestId
from tandem.values.random_pool import RANDOM

_NAME = re.compile(r"[\x21-\x7e]{1,128}")


def check_request_id(value: str, param: str) -> str:
    """Check that a client's own id is fit to be sent back, and return it. Raises InvalidRequest."""
    if not _NAME.fullmatch(value):
        raise InvalidRequest(f"{param} must have 1 to 128 visible ASCII characters", param=param)
    return value


def name_request(former: str | None) -> RequestId:
    """Name a request of the call that this task serves; `former`: id of the stream that it continues.

    The first request gets the call's own id, which is also its X-Request-Id if the client gave none; the task's log
    lines carry it from now on.
    """
    entry = current_entry()
    if former is None and entry is not None and not entry.is_named:
        name = entry.own_id
    else:
        name = former or RANDOM.token_hex(16)
    if entry is None or not entry.is_named:
        REQUEST_ID.set(name)
    if entry is not None:
        entry.is_named, entry.own_id = True, entry.own_id if entry.is_named else name
    return RequestId(name)
