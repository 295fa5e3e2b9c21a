"""The decision log: recorded content, retention and access."""

import asyncio
import json
from random import Random

import httpx
import pytest
from msgspec.structs import replace
from pydantic import SecretStr
from starlette.requests import Request

from router.http.admin.debug import DecisionQuery, DecisionRoutes
from router.http.app import OptionalRoutes, create_app
from router.metrics.router_metrics import RouterMetrics
from router.placement.costs import CostModel
from router.placement.decision_log import CANDIDATES_SHOWN, DecisionLog
from router.placement.placer import Placer
from router.types.worker_view import PrefixChange, WorkerLoad
from router.workers.prefix_map import PrefixMap
from router.workers.registry import WorkerRegistry
from tandem.config.admission import ApiKey
from tandem.config.cluster import RouterConfig
from tandem.values.ids import BlockHash, RequestId
from tests.support.router.servers import fakes
from tests.support.router.servers.http_client import error_of
from tests.support.router.worker_views import port, worker

NAMES = [BlockHash(bytes([i]) * 16) for i in range(30)]


class Clock:
    now_s = 50.0

    def __call__(self) -> float:
        return self.now_s


class Placed:
    """A registry of workers and a placer that keeps decisions."""

    def __init__(self, *names: str, kept: int = 4, metrics: RouterMetrics | None = None) -> None:
        self.clock = Clock()
        self.registry = WorkerRegistry(prefix_map=PrefixMap(), clock=self.clock)
        self.decisions = DecisionLog(kept, clock=self.clock)
        for name in names:
            info = worker(name).info
            self.registry.joined(info, port())
            self.registry.prefix_changed(info.key, PrefixChange(first_sequence=0, snapshot=True, changes=()))
        self.placer = Placer(
            registry=self.registry,
            model=CostModel(),
            rng=Random(0),
            clock=self.clock,
            decisions=self.decisions,
            observer=None if metrics is None else metrics.placement,
        )

    def place(self, request_id: str, *, cached: int | None = None, tenant: str = "") -> None:
        assignment = self.placer.assign(num_tokens=len(NAMES) * 16 + 1, names=NAMES)
        self.placer.record(assignment, RequestId(request_id), tenant)
        if cached is not None:
            self.placer.prompt_computed(assignment)
            self.placer.found_cached(assignment, cached)
            self.placer.found_cached(assignment, cached + 1)
        self.placer.release(assignment)


def test_decision_log_keeps_bounded_newest_first() -> None:
    placed = Placed("d0", "p0", kept=3)
    for number in range(5):
        placed.place(f"r{number}-0")
    assert [one["request_id"] for one in placed.decisions.described("", limit=9)] == ["r4-0", "r3-0", "r2-0"]
    assert [one["request_id"] for one in placed.decisions.described("", limit=2)] == ["r4-0", "r3-0"]
    nothing = DecisionLog(0, clock=Clock())
    assert nothing.described("", limit=5) == []


def test_decision_log_filters_by_request_or_choice() -> None:
    placed = Placed("d0", "p0", kept=9)
    for request_id in ("r-1-0", "r-1-1", "r-2-0"):
        placed.place(request_id)
    shown = placed.decisions.described
    assert [one["request_id"] for one in shown("", limit=9, request_id="r-1")] == ["r-1-1", "r-1-0"]
    assert [one["request_id"] for one in shown("", limit=9, request_id="r-2-0")] == ["r-2-0"]
    assert shown("", limit=9, request_id="r") == []


def test_decision_compares_predicted_and_actual_tokens() -> None:
    metrics = RouterMetrics("m")
    placed = Placed("d0", "p0", kept=9, metrics=metrics)
    placed.place("a-0", cached=0)
    placed.place("b-0", cached=464)
    placed.place("c-0")
    latest, second, first = placed.decisions.described("", limit=9)
    assert (first["predicted_cached_tokens"], first["actual_cached_tokens"]) == (0, 0)
    assert (second["predicted_cached_tokens"], second["actual_cached_tokens"]) == (480, 464)
    assert latest["actual_cached_tokens"] is None

    def count(kind: str) -> float | None:
        return metrics.registry.get_sample_value("tandem_placement_cached_tokens_total", {"kind": kind})

    assert (count("predicted"), count("actual")) == (480, 464)
    made = metrics.registry.get_sample_value(
        "tandem_placement_decisions_total", {"reason": "disaggregated", "affinity": "cold"}
    )
    assert made == 1
    assert metrics.registry.get_sample_value("tandem_placement_seconds_count") == 3


def test_decision_describes_its_reason() -> None:
    placed = Placed("d0", "d1", "p0", "p1")
    busy = WorkerLoad(num_free_blocks=1000, prefill_tokens_per_s=1_000.0, backlog_tokens=700)
    placed.registry.load_changed(worker("p1").info.key, busy)
    placed.registry.load_changed(worker("p0").info.key, replace(busy, prefill_tokens_per_s=9_000.0, backlog_tokens=0))
    placed.place("r-0")
    placed.clock.now_s += 2.0
    (one,) = placed.decisions.described("", limit=1)
    assert (one["reason"], one["affinity"], one["prefill_worker"]) == ("disaggregated", "cold", "p0")
    assert (one["age_s"], one["num_tokens"], one["num_candidates"]) == (2.0, 481, 4)
    roles = [(shown["role"], shown["chosen"]) for shown in one["candidates"]]
    assert roles == [("decode", True), ("decode", False), ("prefill", True), ("prefill", False)]
    for shown in one["candidates"]:
        terms = sum(value for name, value in shown.items() if name.endswith("_ms") and name != "total_ms")
        assert terms == pytest.approx(shown["total_ms"], abs=0.01)
    last = one["candidates"][-1]
    assert (last["worker"], last["queue_ms"], last["compute_ms"]) == ("p1", 700.0, 481.0)
    assert one["predicted_ms"] == one["candidates"][0]["total_ms"]


def test_decision_of_failed_handoff_is_logged_not_compared() -> None:
    metrics = RouterMetrics("m")
    placed = Placed("d0", "p0", "p1", metrics=metrics)
    assignment = placed.placer.assign(num_tokens=481, names=NAMES)
    placed.placer.record(assignment, RequestId("r-0"), "")
    again = placed.placer.reassign_prefill(assignment, frozenset({assignment.computing}))
    assert again is not None
    placed.placer.compute_locally(assignment)
    placed.placer.found_cached(assignment, 7)
    (one,) = placed.decisions.described("", limit=1)
    assert one["rerouted_to"] == [again.info.key.worker_id, "d0"]
    assert one["actual_cached_tokens"] == 7
    labels = {"kind": "actual"}
    assert metrics.registry.get_sample_value("tandem_placement_cached_tokens_total", labels) is None


def test_decision_shows_best_candidates() -> None:
    placed = Placed(*(f"d{i}" for i in range(20)), *(f"p{i}" for i in range(40)))
    placed.place("r-0")
    (one,) = placed.decisions.described("", limit=1)
    assert one["num_candidates"] == 60
    assert len(one["candidates"]) == 2 * CANDIDATES_SHOWN
    assert sum(shown["chosen"] for shown in one["candidates"]) == 2


async def ask(config: RouterConfig, decisions: DecisionLog | None, query: str, key: str = "") -> httpx.Response:
    parts = fakes.make_servers(fakes.make_tokenizer())
    app = create_app(
        parts.frontend, parts.generator, parts.ready, config, parts.metrics, OptionalRoutes(decisions=decisions)
    )
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        return await client.get(f"/debug/decisions{query}", headers={"Authorization": f"Bearer {key}"} if key else {})


async def test_decisions_page_lists_decisions() -> None:
    placed = Placed("d0", "p0", kept=50)
    for number in range(30):
        placed.place(f"r{number}-0")
    answer = await ask(RouterConfig(), placed.decisions, "")
    assert answer.status_code == 200
    assert (answer.json()["kept"], len(answer.json()["data"])) == (30, 20)
    for name in NAMES:
        assert name.hex() not in answer.text
    one = (await ask(RouterConfig(), placed.decisions, "?limit=5&request_id=r3")).json()
    assert [each["request_id"] for each in one["data"]] == ["r3-0"]
    assert "NaN" not in answer.text
    assert "Infinity" not in answer.text
    assert json.loads(answer.text) == answer.json()


@pytest.mark.parametrize(
    ("query", "param"),
    [("?limit=0", "limit"), ("?limit=x", "limit"), ("?limit=1001", "limit"), ("?limit=²", "limit"),
     ("?limit=-1", "limit"), ("?request_id=" + "r" * 300, "request_id"), ("?color=red", "color")],
)  # fmt: skip
async def test_decisions_page_unknown_parameter_is_refused(query: str, param: str) -> None:
    answer = await ask(RouterConfig(), DecisionLog(5, clock=Clock()), query)
    assert answer.status_code == 400
    assert error_of(answer)["param"] == param


async def test_decisions_page_shows_own_tenant_only() -> None:
    placed = Placed("d0", kept=9)
    for request_id, tenant in (("r1-0", "one"), ("r2-0", "two"), ("r3-0", "one"), ("r4-0", "")):
        placed.place(request_id, tenant=tenant)
    keys = (ApiKey(key=SecretStr("k1"), tenant="one"), ApiKey(key=SecretStr("k2"), tenant="two"))
    config = RouterConfig(api_keys=keys)
    own = (await ask(config, placed.decisions, "", key="k1")).json()
    assert (own["kept"], [each["request_id"] for each in own["data"]]) == (2, ["r3-0", "r1-0"])
    of_another = (await ask(config, placed.decisions, "?request_id=r2", key="k1")).json()
    assert of_another["data"] == []


async def test_decisions_page_requires_key_and_may_be_absent() -> None:
    config = RouterConfig(api_keys=(SecretStr("k1"),))
    log = DecisionLog(5, clock=Clock())
    assert (await ask(config, log, "")).status_code == 401
    assert (await ask(config, log, "", key="k1")).status_code == 200
    assert (await ask(config, None, "", key="k1")).status_code == 404


async def test_decisions_page_yields_between_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page takes milliseconds; fifty in one turn of the loop would stall every stream."""
    log, turns, shown_at = DecisionLog(4, clock=Clock()), 0, list[int]()
    monkeypatch.setattr(log, "described", lambda *_, **__: shown_at.append(turns) or [])
    routes = DecisionRoutes(log)
    scope = {"type": "http", "query_string": b"", "headers": [], "state": {"tenant": ""}}
    looking = asyncio.gather(*(routes.list_decisions(Request(dict(scope)), DecisionQuery()) for _ in range(50)))
    while not looking.done():
        turns += 1
        await asyncio.sleep(0)
    assert len(await looking) == 50
    assert len(set(shown_at)) == 50
