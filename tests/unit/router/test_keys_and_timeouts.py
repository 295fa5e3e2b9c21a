"""Keys with tenants, and the client's own time limit, at the HTTP door."""

import time

import pytest
from pydantic import SecretStr

from router.auth import ApiKeys
from tandem.admission_config import ApiKey
from tandem.config import ClusterConfig, RouterConfig, dump
from tandem.errors import Unauthenticated
from tests.unit.router import doors
from tests.unit.router.http_doors import client_of


def keys(*given) -> ApiKeys:
    return ApiKeys(RouterConfig(api_keys=given).api_keys)


def test_keys_of_one_tenant_share_its_name_and_bare_keys_are_tenants_of_their_own() -> None:
    book = keys("bare", {"key": "one", "tenant": "acme"}, {"key": "two", "tenant": "acme"})
    assert book.tenant("Bearer one") == book.tenant("Bearer two") == "acme"
    assert len(book.tenant("Bearer bare")) == 32
    assert keys("bare").tenant("Bearer bare") == keys({"key": "bare"}).tenant("Bearer bare")
    with pytest.raises(Unauthenticated):
        book.tenant("Bearer acme")
    assert keys().tenant(None) == ""


@pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer ", "Bearer  \t", "Basic good"])
def test_who_sends_no_key_has_none_even_if_an_empty_one_were_known(header: str | None) -> None:
    book = ApiKeys([ApiKey(key="good"), ApiKey.model_construct(key=SecretStr(""), tenant="nobody")])
    with pytest.raises(Unauthenticated):
        book.tenant(header)


def test_keys_survive_the_file_that_processes_are_given() -> None:
    config = ClusterConfig(router={"api_keys": ["bare", {"key": "a-secret", "tenant": "acme"}]})
    assert "a-secret" in dump(config)
    assert "a-secret" not in repr(config)


@pytest.mark.parametrize(("value", "status"), [("2.5", 200), ("0", 400), ("-1", 400), ("soon", 400), ("nan", 400)])
async def test_a_client_may_bound_its_own_time(value: str, status: int) -> None:
    parts = doors.make_doors(doors.make_tokenizer())
    parts.generator.script = doors.Script(tokens=(10, 11))
    async with client_of(parts) as client:
        headers = {"X-Tandem-Timeout": value}
        answer = await client.post("/v1/completions", json={"prompt": "a"}, headers=headers)
        assert answer.status_code == status
        if status == 200:
            deadline_s = parts.generator.requests[0].deadline_s
            assert deadline_s is not None
            assert deadline_s <= time.monotonic() + 2.5
        else:
            assert answer.json()["error"]["param"] == "X-Tandem-Timeout"
