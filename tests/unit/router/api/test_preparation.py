"""Requests that wait for the tokenizer or for a grammar: no tenant's keep another's from being prepared."""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from router.api.request.client_request import ClientRequest
from router.text.chat_template import Message
from router.text.grammars.structured_output import Shape, StructuredOutput
from router.text.tokenizer import Tokenizer
from tandem.config.cluster import RouterConfig
from tandem.errors import Overloaded
from tests.support.router.servers import fakes

PLACES = 8
HELLO = [Message(role="user", content="hello")]
ENDLESS = StructuredOutput(shape=Shape.REGEX, value="endless", param="field")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return fakes.make_tokenizer()


class StuckGrammars:
    """A checker that never ends."""

    async def checked(self, grammar: str, param: str, tenant: str = "") -> str:
        await asyncio.Event().wait()
        return grammar


@asynccontextmanager
async def at_once(calls: Sequence[Coroutine[Any, Any, object]]) -> AsyncIterator[list[asyncio.Task[object]]]:
    """Run calls as far as they get, until the end of the block."""
    tasks = [asyncio.create_task(call) for call in calls]
    await asyncio.sleep(0.05)
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_tenant_with_stuck_grammars_leaves_places_for_another(tokenizer: Tokenizer) -> None:
    config = RouterConfig(max_inflight_requests=PLACES)
    frontend = fakes.make_servers(tokenizer, config, grammars=StuckGrammars()).frontend
    stuck = ClientRequest(tenant="a", structure=ENDLESS)
    async with at_once([frontend.prepare_chat(HELLO, stuck) for _ in range(PLACES)]) as calls:
        refused = [call for call in calls if call.done()]
        assert len(refused) == PLACES // 2
        for call in refused:
            with pytest.raises(Overloaded, match="requests of this API key"):
                await call
        await frontend.prepare_chat(HELLO, ClientRequest(tenant="b"))
        await frontend.prepare_prompts(["hello"], ClientRequest(tenant="b"))
