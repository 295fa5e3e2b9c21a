"""What one looks at when one wonders why: the last placements of one's own requests."""

import asyncio
from typing import Any

from starlette.requests import Request

from router.placement.decision_log import DecisionLog
from router.workers.prefix_pins import PinRegistry
from tandem.errors import InvalidRequest

DEFAULT_LIMIT = 20
MAX_LIMIT = 1000
_MAX_ID_CHARS = 256


class DecisionRoutes:
    """GET /debug/decisions."""

    def __init__(self, decisions: DecisionLog) -> None:
        self._decisions = decisions
        self._one_at_a_time = asyncio.Lock()

    async def list_decisions(self, request: Request) -> dict[str, Any]:
        """The tenant's own, newest first. `?limit=` of them, `?request_id=` of one request. Raises InvalidRequest."""
        query = request.query_params
        if unknown := query.keys() - {"limit", "request_id"}:
            raise InvalidRequest(f"{min(unknown)[:40]!r} is no parameter of this page; limit and request_id are")
        request_id = query.get("request_id")
        if request_id is not None and len(request_id) > _MAX_ID_CHARS:
            raise InvalidRequest(f"request_id has more than {_MAX_ID_CHARS} characters", param="request_id")
        tenant, limit = request.state.tenant, _limit(query.get("limit"))
        async with self._one_at_a_time:
            # It takes milliseconds: between two of many who ask for it, streams have their turn.
            await asyncio.sleep(0)
            shown = self._decisions.described(tenant, limit=limit, request_id=request_id)
        return {"object": "list", "kept": self._decisions.num_kept(tenant), "data": shown}


class PinRoutes:
    """GET /debug/pins."""

    def __init__(self, pins: PinRegistry) -> None:
        self._pins = pins

    async def list_pins(self, request: Request) -> dict[str, Any]:
        """The tenant's own pinned prefixes that this router process knows of, the most recently used first."""
        shown = [
            {
                "name": name,
                "worker": record.worker.worker_id,
                "outcome": "asked" if record.outcome is None else record.outcome.value,
                "num_tokens": record.num_tokens,
                "ends_in_s": round(left_s, 3),
            }
            for name, record, left_s in self._pins.of_tenant(request.state.tenant)
        ]
        return {"object": "list", "data": shown[:MAX_LIMIT]}


def _limit(text: str | None) -> int:
    if text is None:
        return DEFAULT_LIMIT
    if not (text.isascii() and text.isdigit() and len(text) <= 6 and 1 <= int(text) <= MAX_LIMIT):
        raise InvalidRequest(f"limit must be an integer in [1, {MAX_LIMIT}]", param="limit")
    return int(text)
