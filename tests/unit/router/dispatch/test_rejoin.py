"""The only decode worker is lost: its streams wait for `router.rejoin_s`, on a virtual clock."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from random import Random

import pytest

from router.__main__ import make_dispatcher
from router.dispatch.choices.context import DispatchSettings
from router.dispatch.dispatcher import Dispatcher
from router.metrics.router_metrics import RouterMetrics
from router.placement.costs import CostModel
from router.placement.decision_log import DecisionLog
from router.placement.placer import Placer
from router.types.session_events import AttemptFinished, AttemptReader, SubmitOrder, TokensArrived, WorkerLost
from router.types.worker_view import WorkerInfo, WorkerKey
from router.workers.prefix_map import PrefixMap
from router.workers.registry import WorkerRegistry
from tandem.config.cluster import load
from tandem.errors import Unavailable
from tandem.values.block_hash import BlockHasher
from tandem.values.ids import Incarnation, WorkerId
from tandem.values.kv_layout import KVLayout
from tandem.values.outputs import FinishReason, PhaseTimes, SampledToken
from tandem.values.roles import WorkerRole
from tests.support.fake_worker import SECRET, expected_tokens
from tests.support.router.cluster import PROMPT, collect, routed

LAYOUT = KVLayout(
    model_fingerprint="m", dtype="float32", num_layers=1, num_kv_heads=1, head_dim=8, block_size=16, tp_size=1
)


class Loop(asyncio.SelectorEventLoop):
    """Its time advances by `pass_s` only."""

    now_s = 0.0

    def time(self) -> float:
        return self.now_s


async def pass_s(seconds: float) -> None:
    """Advance the time, and run everything due."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, Loop)
    loop.now_s += seconds
    for _ in range(20):
        await asyncio.sleep(0)


@dataclass(eq=False)
class Worker:
    """One process, whose port takes orders and follows the test's script."""

    registry: WorkerRegistry
    incarnation: int
    role: WorkerRole = WorkerRole.DECODE
    orders: list[tuple[SubmitOrder, AttemptReader]] = field(default_factory=list)

    def __post_init__(self) -> None:
        name = WorkerId(self.role.value)
        self.key = WorkerKey(name, Incarnation(self.incarnation))
        info = WorkerInfo(
            key=self.key, role=self.role, model_name="m", max_model_len=1024, num_blocks=64, layout=LAYOUT
        )
        self.registry.joined(info, self)  # type: ignore[arg-type]  # of a port, what these tests need

    def submit(self, order: SubmitOrder, reader: AttemptReader) -> None:
        self.orders.append((order, reader))

    def cancel(self, *_: object) -> None:
        """Do nothing: no attempt is running."""

    def give(self, count: int, *, index: int = 0) -> None:
        """The next tokens of an order, as many as are left of it at most."""
        order, reader = self.orders[index]
        start = len(order.generated_token_ids)
        ids = expected_tokens(PROMPT, count=8, seed=3, choice=order.choice_index, start=start)[:count]
        tokens = tuple(SampledToken(token_id=token_id) for token_id in ids)
        times = PhaseTimes()
        finished = AttemptFinished(reason=FinishReason.LENGTH, cached_tokens=0, times=times) if count >= 8 else None
        reader.on_event(TokensArrived(start, tokens, None, finished))

    async def die(self) -> None:
        """Like the end of its session: first the registry, then the attempts on it."""
        self.registry.left(self.key, "gone")
        for _, reader in self.orders:
            reader.on_event(WorkerLost(reason="gone"))
        await pass_s(0.0)


class World:
    """A router's core and whatever workers the test starts."""

    def __init__(self, rejoin_s: float) -> None:
        clock = asyncio.get_running_loop().time
        self.registry = WorkerRegistry(prefix_map=PrefixMap(), clock=clock)
        self.dispatcher = Dispatcher(
            placer=Placer(registry=self.registry, model=CostModel(), rng=Random(1), clock=clock),
            hasher=BlockHasher(SECRET),
            settings=DispatchSettings(rejoin_s=rejoin_s),
            clock=clock,
            rng=Random(2),
        )

    def ask(self, num_choices: int) -> asyncio.Task[dict[int, list[int]]]:
        return asyncio.create_task(collect(self.dispatcher.generate(routed(n=num_choices))))


def run_on_virtual_clock(test: Callable[[World], Awaitable[None]], *, rejoin_s: float) -> None:
    async def run() -> None:
        await test(World(rejoin_s))

    with asyncio.Runner(loop_factory=Loop) as runner:
        runner.run(run())


@pytest.mark.parametrize("num_choices", [1, 2])
@pytest.mark.parametrize("away_s", [0.1, 10.0, 59.9])
def test_rejoining_worker_continues_the_stream(num_choices: int, away_s: float) -> None:
    async def test(world: World) -> None:
        worker = Worker(world.registry, 1)
        answer = world.ask(num_choices)
        await pass_s(0.0)
        for index in range(num_choices):
            worker.give(3, index=index)
        await pass_s(5.0)
        await worker.die()
        await pass_s(away_s)
        worker = Worker(world.registry, 2)
        await pass_s(0.0)
        assert [len(order.generated_token_ids) for order, _ in worker.orders] == [3] * num_choices
        # That loss is over: the next one has all the time again.
        await worker.die()
        await pass_s(59.9)
        worker = Worker(world.registry, 3)
        await pass_s(0.0)
        for index in range(num_choices):
            worker.give(8, index=index)
            # Who lost two workers without a token from the second goes on alone for a moment.
            await pass_s(2.5)
        assert answer.done()
        expected = {c: expected_tokens(PROMPT, count=8, seed=3, choice=c) for c in range(num_choices)}
        assert await answer == expected
        assert world.dispatcher.num_inflight == 0

    run_on_virtual_clock(test, rejoin_s=60.0)


@pytest.mark.parametrize("num_choices", [1, 2])
def test_rejoin_timeout_names_the_limit(num_choices: int) -> None:
    async def test(world: World) -> None:
        worker = Worker(world.registry, 1)
        answer = world.ask(num_choices)
        await pass_s(0.0)
        worker.give(3)
        await pass_s(0.0)
        await worker.die()
        await pass_s(29.0)
        # A prefill worker alone goes on with nothing, and gives no more time.
        Worker(world.registry, 9, role=WorkerRole.PREFILL)
        await pass_s(0.9)
        assert not answer.done()
        await pass_s(0.2)
        assert answer.done()
        with pytest.raises(Unavailable, match=r"none joined to continue within 30 s \(router.rejoin_s\)") as caught:
            await answer
        assert caught.value.retry_after_s == 1.0
        assert world.dispatcher.num_inflight == 0

    run_on_virtual_clock(test, rejoin_s=30.0)


def test_rejoin_limit_is_configurable() -> None:
    config = load(None, {"router.rejoin_s": 7.5})
    registry = WorkerRegistry(prefix_map=PrefixMap(), clock=lambda: 0.0)
    metrics, decisions = RouterMetrics("m"), DecisionLog(1, clock=lambda: 0.0)
    made = make_dispatcher(config, registry, metrics, SECRET, decisions)
    assert made._context.settings.rejoin_s == 7.5
