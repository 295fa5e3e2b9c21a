"""Time tells no tenant what another has asked (docs/extend/incidents.md; CVE-2025-46570).

Servers' own names, through the router's prefix map and an engine's cache: whoever sends another tenant's prompt finds
nothing of it anywhere, so that it is computed, and takes as long, as if nobody had ever sent it.
"""

from collections.abc import Callable, Sequence

import pytest

from engine.scheduler.scheduler import Scheduler
from router.api.request.client_request import ClientRequest
from router.types.worker_view import PrefixChange
from router.workers.prefix_map import PrefixMap
from tandem.values.block_hash import BlockHasher
from tandem.values.ids import BlockHash, WorkerId
from tandem.values.sampling import SamplingParams
from tests.support.engine import ledger
from tests.support.router.servers import fakes

HERE = WorkerId("d0")
PROMPT = [(7 * i) % 90 for i in range(100)]


class Stack:
    """One router's names and map, and its only worker."""

    def __init__(self, secret: bytes = fakes.SECRET) -> None:
        self._parts = fakes.make_servers(fakes.make_tokenizer())
        self._hasher = BlockHasher(secret)
        self._scheduler = Scheduler(ledger.config(), self._hasher)
        self._runner = ledger.LedgerRunner()
        self.map = PrefixMap()
        self.map.add_worker(HERE, capacity=1000)
        self.map.apply(HERE, PrefixChange(first_sequence=0, snapshot=True, changes=()))
        self._sequence = 0

    async def names(self, fields: ClientRequest, prompt: Sequence[int] = PROMPT) -> tuple[BlockHash, list[BlockHash]]:
        (one,) = await self._parts.frontend.prepare_prompts([tuple(prompt)], fields)
        names: list[BlockHash] = []
        self._hasher.extend(one.request.hash_root, names, one.request.prompt_token_ids)
        return one.request.hash_root, names

    async def ask(self, fields: ClientRequest) -> tuple[int, int, int]:
        """Blocks that the router expected in the cache, tokens that were, and tokens that the engine computed."""
        root, names = await self.names(fields)
        thought = self.map.longest_prefix(names).get(HERE, 0)
        request = ledger.request(PROMPT, params=SamplingParams(max_tokens=1, ignore_eos=True))
        request.hash_root = root
        before, cached = self._runner.num_computed, 0
        self._scheduler.add(request)
        while (batch := self._scheduler.schedule(0.0)) is not None:
            for event in self._scheduler.commit(batch, self._runner.execute(batch)).events:
                cached = event.num_cached_tokens if event.token is not None else cached
        changes = tuple((name, True) for name in names if not thought)
        self.map.apply(HERE, PrefixChange(first_sequence=self._sequence, snapshot=False, changes=changes))
        self._sequence += len(changes)
        return thought, cached, self._runner.num_computed - before


COLD = (0, 0, len(PROMPT))
WARM = (6, 96, 4)


@pytest.mark.parametrize(
    ("victim", "spy"),
    [
        (ClientRequest(tenant="a"), ClientRequest(tenant="b")),
        (ClientRequest(tenant="a"), ClientRequest()),
        (ClientRequest(tenant="a", cache_salt="s"), ClientRequest(tenant="b", cache_salt="s")),
        (ClientRequest(tenant="a", cache_salt="s"), ClientRequest(tenant="a")),
        (ClientRequest(tenant="a"), ClientRequest(tenant="", cache_salt="a")),
        (ClientRequest(tenant="ab", cache_salt="c"), ClientRequest(tenant="a", cache_salt="bc")),
        (ClientRequest(tenant="a"), ClientRequest(cache_salt="1:a")),
    ],
)
async def test_prompt_of_another_tenant_hits_no_cache(victim: ClientRequest, spy: ClientRequest) -> None:
    stack = Stack()
    assert await stack.ask(victim) == COLD
    assert await stack.ask(spy) == COLD, "not a token less than the first time"
    assert await stack.ask(victim) == WARM, "each has a cache of its own all the same"
    assert await stack.ask(spy) == WARM


@pytest.mark.parametrize("change", [lambda prompt: prompt[:-1], lambda prompt: [*prompt[:20], 1, *prompt[21:]]])
async def test_block_names_are_opaque_without_the_secret(change: Callable[[list[int]], list[int]]) -> None:
    """Cache events and Redis hold names: without the secret a guessed prompt cannot be tested against them."""
    (_, ours), (_, theirs) = (
        await Stack().names(ClientRequest()),
        await Stack(b"another secret..").names(ClientRequest()),
    )
    assert len(ours) == 6
    assert not set(ours) & set(theirs)
    (_, near) = await Stack().names(ClientRequest(), change(PROMPT))
    shared = [mine == other for mine, other in zip(ours, near, strict=False)]
    assert shared == sorted(shared, reverse=True), "a name stands for all that comes before it"
