"""Request costs and tenants' usage: exact sums, bounded, merged, and visible to their owners."""

import httpx
import orjson
import pytest
from msgspec.structs import asdict

from router.tenants.prices import PriceTable, Spent
from router.tenants.usage import OTHERS, TenantUsage, merge
from tandem.config.cluster import RouterConfig
from tandem.config.prices import PriceConfig
from tests.support.router.servers import fakes
from tests.support.router.servers.http_client import CHAT, HELLO, client_of

SPENT = Spent(
    requests=1,
    prompt_tokens=1000,
    cached_tokens=400,
    completion_tokens=200,
    computed_tokens=1200,
    needed_tokens=800,
    prefill_s=0.5,
    decode_s=2.0,
    kv_byte_s=float(3 << 30),
)
KEYS = [
    {"key": "one", "tenant": "acme"},
    {"key": "two", "tenant": "other-company"},
    {"key": "boss", "tenant": "ops", "operator": True},
]


def test_spent_addition_covers_all_fields() -> None:
    assert asdict(SPENT.plus(SPENT)) == {name: 2 * value for name, value in asdict(SPENT).items()}
    assert all(asdict(SPENT).values())


@pytest.mark.parametrize(
    ("prices", "amount"),
    [
        ({}, 0.0),
        ({"prompt_per_million": 2.0}, 1000 * 2e-6),
        ({"prompt_per_million": 2.0, "cached_discount": 0.75}, (600 + 100) * 2e-6),
        ({"prompt_per_million": 2.0, "cached_discount": 1.0, "completion_per_million": 8.0}, 600 * 2e-6 + 200 * 8e-6),
        ({"prefill_second": 0.1, "decode_second": 0.01, "kv_gib_second": 0.001}, 0.05 + 0.02 + 0.003),
    ],
)
def test_price_table_amounts_are_exact(prices: dict[str, float], amount: float) -> None:
    assert PriceTable(PriceConfig(**prices)).amount(SPENT) == pytest.approx(amount, rel=1e-12)


def test_spent_fractions_are_computed() -> None:
    assert (SPENT.retry_amplification, SPENT.hit_fraction) == (1.5, 0.4)
    assert (Spent().retry_amplification, Spent().hit_fraction) == (1.0, 0.0)


def test_usage_tenants_beyond_bound_are_summed_as_others() -> None:
    book = TenantUsage(most=2)
    for tenant in ("a", "b", "c", "d", "a"):
        book.add(tenant, SPENT)
    shown = {one["tenant"]: one["requests"] for one in book.object(book.render(), only=None)["data"]}
    assert shown == {"a": 2, "b": 1, OTHERS: 2}
    # A tenant of that name sees no others'.
    assert [one["requests"] for one in book.object(book.render(), only="other")["data"]] == [0]


def test_usage_of_processes_is_merged() -> None:
    books = [TenantUsage(since_s=since_s) for since_s in (30.0, 20.0)]
    books[0].add("a", SPENT)
    for book in books:
        book.add("b", SPENT)
    whole = books[0].object(merge([book.render() for book in books]), only=None)
    assert whole["since"] == 20
    assert [(one["tenant"], one["requests"], one["prompt_tokens"]) for one in whole["data"]] == [
        ("a", 1, 1000),
        ("b", 2, 2000),
    ]
    assert whole["total"]["kv_byte_s"] == 9 << 30
    with pytest.raises(ValueError, match="version"):
        merge([orjson.dumps({"since_s": 0.0, "tenants": {"a": {"requests": 1}}})])


async def usage(client: httpx.AsyncClient, key: str | None) -> dict:
    answer = await client.get("/v1/usage", headers={} if key is None else {"Authorization": f"Bearer {key}"})
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_usage_shows_own_tenant_or_all_to_operator() -> None:
    parts = fakes.make_servers(fakes.make_tokenizer(), RouterConfig(api_keys=KEYS))
    ids = parts.say("hello")
    async with client_of(parts) as client:
        for key in ("one", "one", "two"):
            headers = {"Authorization": f"Bearer {key}"}
            prompt = (await client.post(CHAT, json=HELLO, headers=headers)).json()["usage"]["prompt_tokens"]
        own = await usage(client, "one")
        assert [one["tenant"] for one in own["data"]] == ["acme"]
        assert own["total"] == {
            "requests": 2,
            "prompt_tokens": 2 * prompt,
            "cached_tokens": 14,
            "completion_tokens": 2 * len(ids),
            "computed_tokens": 60,
            "needed_tokens": 40,
            "prefill_s": 1.0,
            "decode_s": 2.0,
            "kv_byte_s": 4096.0,
            "cost": 0.0,
            "retry_amplification": 1.5,
            "hit_fraction": round(14 / (2 * prompt), 6),
        }
        everybody = await usage(client, "boss")
        assert [(one["tenant"], one["requests"]) for one in everybody["data"]] == [("acme", 2), ("other-company", 1)]
        assert everybody["total"]["requests"] == 3
        assert (await client.get("/v1/usage")).status_code == 401


async def test_usage_without_keys_has_one_tenant() -> None:
    parts = fakes.make_servers(fakes.make_tokenizer())
    async with client_of(parts) as client:
        assert (await client.post(CHAT, json=HELLO | {"n": 0})).status_code == 400
        assert (await usage(client, None))["data"] == []
        parts.say("hello")
        await client.post(CHAT, json=HELLO)
        assert [(one["tenant"], one["requests"]) for one in (await usage(client, None))["data"]] == [("default", 1)]


async def test_usage_names_tenants_as_metrics_do() -> None:
    keys = [{"key": "nameless"}, {"key": "named", "tenant": "acme"}, {"key": "boss", "operator": True}]
    parts = fakes.make_servers(fakes.make_tokenizer(), RouterConfig(api_keys=keys))
    parts.say("hello")
    async with client_of(parts) as client:
        for key in ("nameless", "named"):
            await client.post(CHAT, json=HELLO, headers={"Authorization": f"Bearer {key}"})
        metrics = (await client.get("/metrics", headers={"Authorization": "Bearer boss"})).text
        for key, num_shown in (("nameless", 1), ("named", 1), ("boss", 2)):
            tenants = [one["tenant"] for one in (await usage(client, key))["data"]]
            assert len(tenants) == num_shown
            assert all(f'tandem_tenant_cached_tokens_total{{tenant="{name}"}}' in metrics for name in tenants)
    assert {name[:4] for name in tenants} == {"key-", "acme"}
    parts.metrics.usage.add(OTHERS, SPENT)
    whole = parts.metrics.usage.object(parts.metrics.usage.render(), only=None)
    assert "other" in [one["tenant"] for one in whole["data"]]
