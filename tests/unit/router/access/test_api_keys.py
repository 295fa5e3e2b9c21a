"""Keys with tenants, and the client's own time limit, at the HTTP server."""

import hmac

import pytest
from pydantic import SecretStr

from router.access.api_keys import ApiKeyStore
from tandem.config.admission import ApiKey
from tandem.config.cluster import ClusterConfig, RouterConfig, dump
from tandem.errors import Unauthenticated
from tests.support.router.servers import fakes
from tests.support.router.servers.http_client import client_of


def keys(*given) -> ApiKeyStore:
    return ApiKeyStore(RouterConfig(api_keys=given).api_keys)


def test_key_store_tenant_is_named_or_derived_from_key() -> None:
    book = keys("bare", {"key": "one", "tenant": "acme"}, {"key": "two", "tenant": "acme"})
    assert book.tenant("Bearer one") == book.tenant("Bearer two") == "acme"
    assert len(book.tenant("Bearer bare")) == 32
    assert keys("bare").tenant("Bearer bare") == keys({"key": "bare"}).tenant("Bearer bare")
    with pytest.raises(Unauthenticated):
        book.tenant("Bearer acme")
    assert keys().tenant(None) == ""


def test_key_store_many_keys_compares_one_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    book = ApiKeyStore(ApiKey(key=f"key-{number}", tenant=f"t{number % 1000}") for number in range(2000))
    compared: list[tuple[bytes, bytes]] = []

    def compare(given: bytes, known: bytes) -> bool:
        compared.append((given, known))
        return given == known

    monkeypatch.setattr(hmac, "compare_digest", compare)
    assert [book.tenant(f"Bearer key-{number}") for number in (0, 999, 1999)] == ["t0", "t999", "t999"]
    with pytest.raises(Unauthenticated):
        book.tenant("Bearer key-2000")
    assert [given == known for given, known in compared] == [True] * 3 + [False]


def test_key_store_duplicate_key_keeps_first_entry() -> None:
    book = ApiKeyStore([ApiKey(key="one", tenant="first"), ApiKey(key="one", tenant="second")])
    assert book.tenant("Bearer one") == "first"
    assert book.tenants == {"first"}


@pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer ", "Bearer  \t", "Basic good"])
def test_key_store_missing_key_does_not_match_empty_one(header: str | None) -> None:
    book = ApiKeyStore([ApiKey(key="good"), ApiKey.model_construct(key=SecretStr(""), tenant="nobody")])
    with pytest.raises(Unauthenticated):
        book.tenant(header)


def test_api_keys_survive_dump_and_are_hidden_in_repr() -> None:
    config = ClusterConfig(router={"api_keys": ["bare", {"key": "a-secret", "tenant": "acme"}]})
    assert "a-secret" in dump(config)
    assert "a-secret" not in repr(config)


@pytest.mark.parametrize(("value", "status"), [("2.5", 200), ("0", 400), ("-1", 400), ("soon", 400), ("nan", 400)])
async def test_timeout_header_bounds_the_request(value: str, status: int) -> None:
    parts = fakes.make_servers(fakes.make_tokenizer(), clock=lambda: 40.0)
    parts.generator.script = fakes.Script(tokens=(10, 11))
    async with client_of(parts) as client:
        headers = {"X-Tandem-Timeout": value}
        answer = await client.post("/v1/completions", json={"prompt": "a"}, headers=headers)
        assert answer.status_code == status
        if status == 200:
            assert parts.generator.requests[0].deadline_s == 42.5
        else:
            assert answer.json()["error"]["param"] == "X-Tandem-Timeout"
