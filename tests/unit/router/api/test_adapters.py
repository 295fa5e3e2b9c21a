"""Adapters by name: what is served, who may use it, and how routers agree."""

from pathlib import Path

import pytest

from router.admission.rate_limits import RateLimiter
from router.api.adapters import ServedAdapters
from router.api.request.client_request import ClientRequest
from router.text.chat_template import Message
from router.text.tokenizer import Tokenizer
from tandem.cluster_state.entries import MAX_ADAPTER_CHANGES, AdapterChange, ClusterStateCodec, RouterLoad
from tandem.config.admission import LimitsConfig, TenantLimits
from tandem.errors import InvalidRequest, ModelNotFound, NotAllowed
from tandem.values.block_hash import root_hash
from tandem.values.ids import Incarnation
from tests.support.router.adapters import adapter_of
from tests.support.router.servers import fakes
from tests.support.router.servers.http_client import CHAT, HELLO, PLAIN, client_of, error_of

HELLO_TALK = [Message(role="user", content="hello")]


class _Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def _names(served: ServedAdapters, tenant: str = "") -> list[str]:
    return [adapter.name for adapter in served.available(tenant)]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return fakes.make_tokenizer()


@pytest.fixture
def parts(tokenizer: Tokenizer) -> fakes.Servers:
    parts = fakes.make_servers(tokenizer)
    parts.frontend.adapters = ServedAdapters(fakes.MODEL, [adapter_of("sql"), adapter_of("team/legal")])
    return parts


def test_adapters_loaded_and_unloaded_names_are_served_until_then() -> None:
    served = ServedAdapters("tiny", [adapter_of("sql")])
    served.add(adapter_of("legal"))
    assert _names(served) == ["legal", "sql"]
    served.remove("sql")
    assert _names(served) == ["legal"]
    for name in ("sql", "tiny", "x" * 500):
        with pytest.raises(ModelNotFound) as caught:
            served.get(name, "")
        assert len(caught.value.message) < 250
    with pytest.raises(ModelNotFound):
        served.remove("sql")


def test_adapters_name_in_use_is_replaced_only_on_request() -> None:
    served = ServedAdapters("tiny", [adapter_of("sql")])
    with pytest.raises(InvalidRequest, match="load_inplace"):
        served.add(adapter_of("sql", version=2))
    with pytest.raises(InvalidRequest, match="served model"):
        served.add(adapter_of("tiny"))
    served.add(adapter_of("sql", version=2), replaces=True)
    assert served.get("sql", "") == adapter_of("sql", version=2)


def test_adapters_too_many_loaded_are_refused_until_unloaded_ones_are_forgotten() -> None:
    clock = _Clock()
    served = ServedAdapters("tiny", [adapter_of("sql")], wall_clock=clock)
    for number in range(MAX_ADAPTER_CHANGES - 1):
        served.add(adapter_of(f"a{number}"))
    served.remove("sql")
    served.remove("a0")
    with pytest.raises(InvalidRequest, match="at most"):
        served.add(adapter_of("more"))
    clock.now_s += 3601
    served.add(adapter_of("more"))
    assert len(served.changes) == MAX_ADAPTER_CHANGES
    assert "sql" not in _names(served), "the configuration has it: that it was unloaded is not forgotten"


def test_adapters_unload_beyond_the_bound_reaches_other_routers() -> None:
    clock, codec = _Clock(), ClusterStateCodec(b"a secret of the cluster", "c")
    one, other = (ServedAdapters("tiny", wall_clock=clock) for _ in range(2))
    names = [f"a{number}" for number in range(600)]
    loaded = [AdapterChange(name=name, version=i, adapter=adapter_of(name)) for i, name in enumerate(names)]
    one.merge(loaded)
    other.merge(loaded[-1:])
    one.remove(names[-1])
    load = RouterLoad(router=Incarnation(1), sequence=1, shares=(), adapters=one.changes)
    other.merge(codec.open_load(codec.seal_load(load), Incarnation(1)).adapters)
    assert names[-1] not in _names(other)
    # Both serve what was loaded last, and no more than that: what is not remembered could not be unloaded elsewhere.
    assert set(_names(one)) == set(_names(other)) == set(names[600 - MAX_ADAPTER_CHANGES : -1])
    assert len(one.changes) == MAX_ADAPTER_CHANGES
    assert one.changes[0] == AdapterChange(name=names[-1], version=one.changes[0].version, adapter=None)


def test_adapters_configured_name_that_was_unloaded_stays_so_beyond_the_bound() -> None:
    served = ServedAdapters("tiny", [adapter_of("sql")], wall_clock=_Clock())
    served.merge([AdapterChange(name="sql", version=1, adapter=None)])
    served.merge(
        AdapterChange(name=f"a{number}", version=2 + number, adapter=adapter_of(f"a{number}")) for number in range(600)
    )
    assert "sql" not in _names(served)
    assert len(served.changes) == MAX_ADAPTER_CHANGES


def test_adapters_unloaded_long_ago_are_not_remembered_again() -> None:
    """Routers that still have such a name pass it on; it would go round for ever."""
    clock = _Clock()
    one, other = (ServedAdapters("tiny", wall_clock=clock) for _ in range(2))
    for served in (one, other):
        served.add(adapter_of("sql"))
    other.remove("sql")
    late = other.changes
    clock.now_s += 3601
    one.merge(late)
    assert _names(one) == [], "it counts where the adapter is still served"
    assert one.changes == ()
    one.merge(late)
    assert one.changes == ()
    other.add(adapter_of("legal"))
    assert [change.name for change in other.changes] == ["legal"], "forgotten with the next change"


def test_adapters_error_at_the_bound_says_that_unloaded_names_count() -> None:
    served = ServedAdapters("tiny", wall_clock=_Clock())
    for number in range(MAX_ADAPTER_CHANGES):
        served.add(adapter_of(f"a{number}"))
    served.remove("a0")
    with pytest.raises(InvalidRequest, match="those unloaded within the last hour count"):
        served.add(adapter_of("more"))


def test_adapters_changes_in_any_order_lead_to_the_same_names() -> None:
    clock = _Clock()
    one, other, late = (ServedAdapters("tiny", [adapter_of("sql")], wall_clock=clock) for _ in range(3))
    one.add(adapter_of("legal"))
    other.merge(one.changes)
    assert _names(other) == ["legal", "sql"]
    other.remove("legal")
    other.remove("sql")
    other.add(adapter_of("sql", version=2))
    for changes in (other.changes, one.changes, other.changes):
        late.merge(changes)
        one.merge(changes)
    assert _names(one) == _names(other) == _names(late) == ["sql"]
    assert one.get("sql", "") == late.get("sql", "") == adapter_of("sql", version=2)


def test_adapters_two_routers_change_a_name_at_once_both_keep_the_same_one() -> None:
    clock = _Clock()
    one, other = (ServedAdapters("tiny", wall_clock=clock) for _ in range(2))
    one.add(adapter_of("sql", version=1))
    other.add(adapter_of("sql", version=2))
    first, second = one.changes, other.changes
    one.merge(second)
    other.merge(first)
    assert one.get("sql", "") == other.get("sql", "")


def test_adapters_change_by_a_slow_clock_still_counts_after_the_earlier_one() -> None:
    clock = _Clock()
    served = ServedAdapters("tiny", wall_clock=clock)
    served.merge([AdapterChange(name="sql", version=2_000_000, adapter=adapter_of("sql"))])
    served.remove("sql")
    assert _names(served) == []
    served.merge([AdapterChange(name="tiny", version=1, adapter=adapter_of("tiny"))])
    assert _names(served) == []


def test_adapters_of_other_tenants_are_as_if_they_were_not_there() -> None:
    patterns = {"a": ("team/*", "sql"), "b": (), "c": ("*",)}
    tenants = {tenant: TenantLimits(adapters=names) for tenant, names in patterns.items()}
    limiter = RateLimiter(LimitsConfig(tenants=tenants), clock=lambda: 0.0)
    served = ServedAdapters(
        "tiny",
        [adapter_of("sql"), adapter_of("team/legal"), adapter_of("other")],
        may_use=limiter.may_use_adapter,
    )
    assert [_names(served, tenant) for tenant in "abc"] == [
        ["sql", "team/legal"],
        [],
        ["other", "sql", "team/legal"],
    ]
    unknown, forbidden = [], []
    for found, name in ((forbidden, "other"), (unknown, "never")):
        with pytest.raises(ModelNotFound) as caught:
            served.get(name, "a")
        found.append(caught.value.message.replace(name, "NAME"))
    assert unknown == forbidden


def test_adapters_tenant_whose_entry_names_none_has_those_of_the_default() -> None:
    """Limits that an entry leaves out are unlimited; a permission must not come of that."""
    limits = LimitsConfig(
        default=TenantLimits(adapters=()),
        tenants={"x": TenantLimits(requests_per_minute=60), "y": TenantLimits(adapters=("sql",))},
    )
    limiter = RateLimiter(limits, clock=lambda: 0.0)
    allowed = {tenant: limiter.may_use_adapter(tenant, "sql") for tenant in ("x", "y", "unnamed")}
    assert allowed == {"x": False, "y": True, "unnamed": False}
    limiter.reconfigure(LimitsConfig(tenants=limits.tenants))
    assert limiter.may_use_adapter("x", "sql"), "the default names none: every one"


@pytest.mark.parametrize("path", ["/elsewhere", "../x", "link/x", "", ".", "a/../..", "a\0b", "/etc/passwd"])
def test_adapters_path_outside_of_the_folder_is_refused(tmp_path: Path, path: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "link").symlink_to(tmp_path)
    served = ServedAdapters("tiny", folder=tmp_path / "folder")
    with pytest.raises((NotAllowed, InvalidRequest)):
        served.resolve(path)


def test_adapters_path_below_the_folder_is_resolved(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "folder").symlink_to(tmp_path / "real")
    served = ServedAdapters("tiny", folder=tmp_path / "folder")
    real = (tmp_path / "real").resolve() / "a"
    assert served.resolve("a") == served.resolve(str(tmp_path / "folder" / "a")) == real
    with pytest.raises(NotAllowed, match="adapter_folder"):
        ServedAdapters("tiny").resolve("a")


async def test_frontend_adapter_as_model_separates_block_names_and_travels_along(parts: fakes.Servers) -> None:
    async def root(model: str | None) -> bytes:
        return (await parts.frontend.prepare_chat(HELLO_TALK, ClientRequest(model=model))).request.hash_root

    plain = root_hash(secret=fakes.SECRET, model_fingerprint="f" * 32, salt="0:")
    assert await root(None) == await root(fakes.MODEL) == plain
    assert len({plain, await root("sql"), await root("team/legal")}) == 3
    digest = adapter_of("sql").digest
    assert await root("sql") == root_hash(secret=fakes.SECRET, model_fingerprint="f" * 32, adapter=digest, salt="0:")
    (one,) = await parts.frontend.prepare_prompts(["hello"], ClientRequest(model="sql"))
    assert one.request.adapter == adapter_of("sql")
    (one,) = await parts.frontend.prepare_prompts(["hello"], ClientRequest())
    assert one.request.adapter is None


async def test_frontend_adapter_unloaded_during_preparation_is_not_found(parts: fakes.Servers) -> None:
    encode = parts.frontend.prompts.encode

    async def slowly(text: str, add_special_tokens: bool) -> list[int]:
        parts.frontend.adapters.remove("sql")
        return await encode(text, add_special_tokens)

    parts.frontend.prompts.encode = slowly  # type: ignore[method-assign, assignment]
    with pytest.raises(ModelNotFound):
        await parts.frontend.prepare_prompts(["hello"], ClientRequest(model="sql"))


async def test_http_adapter_answers_and_lists_name_it(parts: fakes.Servers) -> None:
    async with client_of(parts) as client:
        base, *adapters = (await client.get("/v1/models")).json()["data"]
        assert (base["id"], base["root"], base["parent"]) == (fakes.MODEL, fakes.MODEL, None)
        assert [(one["id"], one["root"], one["parent"]) for one in adapters] == [
            ("sql", "/adapters/sql", fakes.MODEL),
            ("team/legal", "/adapters/team/legal", fakes.MODEL),
        ]
        assert (await client.get("/v1/models/team%2Flegal")).json()["id"] == "team/legal"
        assert (await client.get("/v1/models/none")).status_code == 404
        parts.say("hello")
        for path, body in (
            (CHAT, HELLO),
            (PLAIN, {"prompt": "hello"}),
            ("/v1/responses", {"input": "hello"}),
            ("/v1/messages", {**HELLO, "max_tokens": 4}),
        ):
            answer = await client.post(path, json={**body, "model": "sql"})
            assert (answer.status_code, answer.json()["model"]) == (200, "sql"), path
            streamed = await client.post(path, json={**body, "model": "sql", "stream": True})
            assert '"model":"sql"' in streamed.text, path
        assert all(request.adapter == adapter_of("sql") for request in parts.generator.requests)
        assert (await client.post(CHAT, json={**HELLO, "model": fakes.MODEL})).json()["model"] == fakes.MODEL
        assert parts.generator.requests[-1].adapter is None
        refused = await client.post(CHAT, json={**HELLO, "model": "none"})
        assert (refused.status_code, error_of(refused)["code"]) == (404, "model_not_found")
        assert (await client.post("/tokenize", json={"prompt": "hello", "model": "sql"})).status_code == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": "a"}),
        ("/v1/rerank", {"query": "a", "documents": ["b"]}),
        ("/v1/score", {"text_1": "a", "text_2": "b"}),
    ],
)
async def test_http_adapter_on_pooled_routes_is_refused(parts: fakes.Servers, path: str, body: dict[str, str]) -> None:
    async with client_of(parts) as client:
        answer = await client.post(path, json={**body, "model": "sql"})
        assert (answer.status_code, error_of(answer)["param"]) == (400, "model"), answer.text
        assert "adapter" in error_of(answer)["message"]
        assert (await client.post(path, json={**body, "model": "none"})).status_code == 404
