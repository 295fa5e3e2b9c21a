"""A router that keeps named caches at one worker, which does what the test says, on clocks that it moves."""

from collections.abc import Awaitable, Callable
from typing import Any

from router.api.request.named_caches import CachedPrompts, NamedCaches
from router.text.tokenizer import Tokenizer
from router.types.requests import DeltaSink, RoutedRequest
from router.types.worker_view import WorkerKey
from router.workers.prefix_pins import PinRegistry, PinSite
from tandem.config.cluster import RouterConfig
from tandem.values.block_hash import BlockHasher
from tandem.values.ids import BlockHash, Incarnation, WorkerId
from tandem.values.prefix_pin import PinKey, PinOrder, PinOutcome, PinResult
from tests.support.router.servers import fakes

LONG = "the quick brown fox jumps over the lazy dog " * 4
WORKER = WorkerKey(WorkerId("p0"), Incarnation(1))


class Keeper:
    """A worker that replies at once as the test has set, or not at all, and records its orders."""

    def __init__(self, pins: PinRegistry) -> None:
        self.pins = pins
        self.says: PinOutcome | None = PinOutcome.HELD
        self.orders: list[PinOrder] = []
        self.unpinned: list[PinKey] = []

    def pin(self, order: PinOrder) -> None:
        self.orders.append(order)
        if self.says is not None:
            self.report_outcome(order.key, self.says)

    def report_outcome(self, key: PinKey, outcome: PinOutcome) -> None:
        self.pins.on_outcome(WORKER, PinResult(key=key, outcome=outcome, num_tokens=16))

    def unpin(self, key: PinKey) -> None:
        self.unpinned.append(key)


class PinningGenerator(fakes.FakeGenerator):
    """Has every prompt computed by the one worker."""

    pins: PinRegistry
    meanwhile: Callable[[], Awaitable[Any]] | None = None
    """Done while a prompt is computed."""

    async def run(self, request: RoutedRequest, reader: DeltaSink) -> None:
        if self.meanwhile is not None:
            await self.meanwhile()
        names: list[BlockHash] = []
        BlockHasher(fakes.SECRET).extend(request.hash_root, names, request.prompt_token_ids)
        self.pins.used(request.tenant, request.pins, WORKER, names)
        await super().run(request, reader)


class World:
    def __init__(self, tokenizer: Tokenizer, config: RouterConfig | None = None) -> None:
        self.unix_s = 1_700_000_000.0
        self.mono_s = 1000.0
        self.parts = fakes.make_servers(tokenizer, config, clock=lambda: self.mono_s)
        pins = PinRegistry(find=self.find, clock=lambda: self.mono_s)
        self.keeper = Keeper(pins)
        caches = NamedCaches(clock=lambda: self.unix_s, most=3, max_ttl_s=7200.0)
        self.parts.frontend.kept = CachedPrompts(pins=pins, caches=caches)
        self.parts.generator = PinningGenerator()
        self.parts.generator.pins = pins  # type: ignore[attr-defined]
        self.parts.say("ok")

    def find(self, key: WorkerKey) -> PinSite:
        return PinSite(port=self.keeper, block_size=16, is_leaving=False)  # type: ignore[arg-type]

    def passes(self, seconds: float) -> None:
        self.unix_s += seconds
        self.mono_s += seconds
