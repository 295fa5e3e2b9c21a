"""Adapters that are loaded and unloaded over HTTP while the router runs."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from router.__main__ import _served_adapters
from router.admission.rate_limits import RateLimiter
from router.api.adapters import ServedAdapters
from router.host_peers.adapters import AdapterFile
from router.http.admin.adapters import MAX_ADAPTER_PATH_BYTES
from router.text.tokenizer import Tokenizer
from tandem.adapters.files import Adapter, read_adapter
from tandem.cluster_state.entries import MAX_ADAPTER_CHANGES, AdapterChange
from tandem.config.admission import ApiKey, LimitsConfig
from tandem.config.cluster import ClusterConfig, RouterConfig
from tandem.errors import ConfigError
from tandem.process.lifetime import RouterPlace
from tests.support.router.adapters import adapter_of
from tests.support.router.servers import fakes
from tests.support.router.servers.http_client import CHAT, HELLO, client_of, error_of

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
OPERATOR, TENANT = {"Authorization": "Bearer operator"}, {"Authorization": "Bearer tenant"}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return fakes.make_tokenizer()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("sql", "legal"):
        write_adapter(tmp_path / name, name.encode())
    return tmp_path


def write_adapter(path: Path, weights: bytes, **config: Any) -> None:
    path.mkdir(exist_ok=True)
    (path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 8, "lora_alpha": 16} | config))
    (path / "adapter_model.safetensors").write_bytes(weights)


def serve(tokenizer: Tokenizer, folder: Path | None, config: RouterConfig | None = None) -> fakes.Servers:
    parts = fakes.make_servers(tokenizer, config)
    parts.frontend.adapters = ServedAdapters(fakes.MODEL, folder=folder)
    return parts


async def start_adapters(config: ClusterConfig, shared_folder: Path | None = None) -> ServedAdapters:
    """The adapters of one router process as it starts."""
    place = RouterPlace(shared_folder=shared_folder)
    return await _served_adapters(config, place, fakes.MODEL, RateLimiter(LimitsConfig(), clock=lambda: 0.0), None)


async def test_adapter_loaded_is_served_until_it_is_unloaded(tokenizer: Tokenizer, folder: Path) -> None:
    parts = serve(tokenizer, folder)
    async with client_of(parts) as client:
        assert (await client.post(CHAT, json={**HELLO, "model": "sql"})).status_code == 404
        loaded = await client.post(LOAD, json={"lora_name": "sql", "lora_path": str(folder / "sql")})
        assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'sql' added successfully.")
        parts.say("hello")
        assert (await client.post(CHAT, json={**HELLO, "model": "sql"})).json()["model"] == "sql"
        again = await client.post(LOAD, json={"lora_name": "sql", "lora_path": "legal"})
        assert (again.status_code, error_of(again)["param"]) == (400, "lora_name")
        before = parts.frontend.adapters.get("sql", "").digest
        inplace = {"lora_name": "sql", "lora_path": "legal", "load_inplace": True}
        assert (await client.post(LOAD, json=inplace)).status_code == 200
        assert parts.frontend.adapters.get("sql", "").digest != before
        unloaded = await client.post(UNLOAD, json={"lora_name": "sql"})
        assert (unloaded.status_code, unloaded.text) == (200, "Success: LoRA adapter 'sql' removed successfully.")
        assert (await client.post(CHAT, json={**HELLO, "model": "sql"})).status_code == 404
        assert (await client.post(UNLOAD, json={"lora_name": "sql"})).status_code == 404


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"lora_name": "sql"}, 400),
        ({"lora_path": "sql"}, 400),
        ({"lora_name": "s q l", "lora_path": "sql"}, 400),
        ({"lora_name": "tiny", "lora_path": "sql"}, 400),
        ({"lora_name": "sql", "lora_path": "none"}, 400),
        ({"lora_name": "sql", "lora_path": "../sql"}, 403),
        ({"lora_name": "sql", "lora_path": "/etc"}, 403),
        ({"lora_name": "sql", "lora_path": "x" * (MAX_ADAPTER_PATH_BYTES + 1)}, 400),
    ],
)
async def test_adapter_that_cannot_be_loaded_is_refused(
    tokenizer: Tokenizer, folder: Path, body: dict[str, str], status: int
) -> None:
    parts = serve(tokenizer, folder)
    async with client_of(parts) as client:
        answer = await client.post(LOAD, json=body)
        assert (answer.status_code, error_of(answer)["param"] in ("lora_name", "lora_path")) == (status, True)
    assert len(parts.frontend.adapters) == 0


@pytest.mark.parametrize(
    ("config", "num_bytes", "named"),
    [
        ({"r": 65}, 10, "r is 65, and engine.max_adapter_rank 64"),
        ({"use_dora": True}, 10, "use_dora True is not supported"),
        ({"bias": "all"}, 10, "bias must be none, is 'all'"),
        ({}, (2 << 20) + 9, "has matrices of 2097153 bytes, engine.adapter_bytes admits 2097152"),
    ],
)
async def test_adapter_that_no_worker_would_take_is_refused_at_load_and_at_start(
    tokenizer: Tokenizer, tmp_path: Path, config: dict[str, Any], num_bytes: int, named: str
) -> None:
    """1 MiB for adapters: 2 MiB in float32."""
    write_adapter(tmp_path / "sql", bytes(num_bytes), **config)
    write_adapter(tmp_path / "fits", bytes((2 << 20) + 8))
    settings = ClusterConfig.model_validate(
        {"model": {"adapter_folder": str(tmp_path)}, "engine": {"adapter_bytes": 1 << 20}}
    )
    parts = fakes.make_servers(tokenizer)
    parts.frontend.adapters = await start_adapters(settings)
    async with client_of(parts) as client:
        answer = await client.post(LOAD, json={"lora_name": "sql", "lora_path": "sql"})
        assert (answer.status_code, error_of(answer)["param"]) == (400, "lora_path")
        assert named in error_of(answer)["message"]
        assert (await client.post(LOAD, json={"lora_name": "sql", "lora_path": "fits"})).status_code == 200
    configured = settings.model.model_copy(update={"adapters": {"sql": str(tmp_path / "sql")}})
    with pytest.raises(ConfigError, match=named):
        await start_adapters(settings.model_copy(update={"model": configured}))


async def test_adapter_without_a_folder_is_refused(tokenizer: Tokenizer, folder: Path) -> None:
    async with client_of(serve(tokenizer, None)) as client:
        answer = await client.post(LOAD, json={"lora_name": "sql", "lora_path": str(folder / "sql")})
        assert answer.status_code == 403
        assert "model.adapter_folder" in error_of(answer)["message"]


async def test_adapter_is_loaded_by_operators_only(tokenizer: Tokenizer, folder: Path) -> None:
    keys = [ApiKey(key="operator", operator=True), ApiKey(key="tenant")]  # type: ignore[arg-type]
    parts = serve(tokenizer, folder, RouterConfig(max_body_bytes=1 << 20, api_keys=tuple(keys)))
    body = {"lora_name": "sql", "lora_path": "sql"}
    async with client_of(parts) as client:
        for path in (LOAD, UNLOAD):
            assert (await client.post(path, json=body)).status_code == 401
            assert (await client.post(path, json=body, headers=TENANT)).status_code == 403
        assert (await client.post(LOAD, json=body, headers=OPERATOR)).status_code == 200


def test_adapter_file_processes_that_share_it_see_each_others_changes(tokenizer: Tokenizer, folder: Path) -> None:
    shared = folder / "shared"
    shared.mkdir()
    one, other = (serve(tokenizer, folder).frontend.adapters for _ in range(2))
    for served in (one, other):
        served.store = AdapterFile(shared)
    one.add(adapter_of("sql"))
    assert other.get("sql", "") == adapter_of("sql")
    other.add(adapter_of("legal"))
    other.remove("sql")
    assert [adapter.name for adapter in one.available("")] == ["legal"]
    late = ServedAdapters(fakes.MODEL, [adapter_of("sql")])
    late.store = AdapterFile(shared)
    assert [adapter.name for adapter in late.available("")] == ["legal"]
    assert {path.stat().st_mode & 0o777 for path in shared.iterdir()} == {0o600}


def test_adapter_file_keeps_the_newest_changes_only(tmp_path: Path) -> None:
    """Names come and go for as long as the processes run, and each change writes the whole file."""
    file, reader = AdapterFile(tmp_path), AdapterFile(tmp_path)
    names = [f"a{number}" for number in range(3000)]
    file.write(AdapterChange(name=name, version=i, adapter=None) for i, name in enumerate(names))
    file.write([AdapterChange(name="a7", version=9000, adapter=None)])
    assert [change.name for change in reader.read()] == ["a7", *reversed(names[-4 * MAX_ADAPTER_CHANGES + 1 :])]


async def test_adapter_of_the_configuration_is_read_by_the_first_process_of_a_host(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise each would read all files, and one that restarts might serve others than its siblings."""
    num_read = []

    def counted(name: str, path: Path, **bounds: int | None) -> Adapter:
        num_read.append(name)
        return read_adapter(name, path, **bounds)  # type: ignore[arg-type]

    monkeypatch.setattr("router.__main__.read_adapter", counted)
    shared, adapters = tmp_path_factory.mktemp("shared"), {name: str(folder / name) for name in ("sql", "legal")}
    config = ClusterConfig.model_validate({"model": {"adapters": adapters}})
    found = await asyncio.gather(*(start_adapters(config, shared) for _ in range(4)))
    assert sorted(num_read) == ["legal", "sql"]
    assert {tuple(served.available("")) for served in found} == {tuple(found[0].available(""))}
    assert [one.name for one in found[0].available("")] == ["legal", "sql"]
    write_adapter(folder / "sql", b"others")
    restarted = await start_adapters(config, shared)
    assert restarted.available("") == found[0].available("")
    assert len(num_read) == 2
    moved = ClusterConfig.model_validate({"model": {"adapters": {**adapters, "sql": str(folder / "legal")}}})
    assert (await start_adapters(moved, shared)).get("sql", "").digest == found[0].get("legal", "").digest
    # What was cut short when a process was killed is read again.
    (shared / "configured_adapters.json").write_text("[{")
    assert (await start_adapters(config, shared)).get("sql", "").digest != found[0].get("sql", "").digest
    assert {path.stat().st_mode & 0o777 for path in shared.iterdir()} == {0o600}
