"""Requests that name LoRA adapters get the answers of `transformers` with the adapters merged into its weights."""

import asyncio
import re
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM

from cluster.supervisor.exceptions import ClusterFailed
from tandem.model_path import BUILTIN_NAME
from tests.support.engine.lora import merged, write_adapter
from tests.support.oracle import BUILTIN, Oracle, prompts
from tests.support.running_cluster import running

MAX_TOKENS = 24
ADAPTERS = {
    "style/formal": {"rank": 4, "seed": 1},
    "style:brief": {"rank": 8, "seed": 2, "use_rslora": True, "modules": ("q_proj", "v_proj", "down_proj")},
}
WAYS = {
    "shm": {"transfer__transport": "shm", "engine__prefill_chunk_tokens": 64},
    "tcp-2": {
        "transfer__transport": "tcp",
        "prefill__tensor_parallel_size": 2,
        "decode__tensor_parallel_size": 2,
        "engine__prefill_chunk_tokens": 64,
    },
    "colocated-torch": {"prefill__replicas": 0, "engine__kernels": "torch"},
}


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    """The adapters' directories, and an oracle of each merged model."""
    base = AutoModelForCausalLM.from_pretrained(BUILTIN, dtype=torch.float32)
    made = {}
    for name, options in ADAPTERS.items():
        folder = tmp_path_factory.mktemp("adapter")
        path = write_adapter(folder / "peft", base, **options)
        shutil.copytree(BUILTIN, folder / "merged")
        merged(base, path).save_pretrained(folder / "merged")
        made[name] = path, Oracle(folder / "merged")
    return made


def differing(cases, answers):
    return [i for i, ((*_, expected), answer) in enumerate(zip(cases, answers, strict=True)) if answer != expected]


@pytest.mark.parametrize(
    "way", [*(pytest.param(name, marks=pytest.mark.slow) for name in WAYS if name != "shm"), "shm"]
)
async def test_cluster_with_adapters_answers_equal_merged_weights(way, adapters, oracle, fork_servers):
    """With each adapter and with none, together and again from the caches, which no two of them share."""
    of = {BUILTIN_NAME: oracle} | {name: merged_oracle for name, (_, merged_oracle) in adapters.items()}
    asked = prompts(oracle, 4, seed=8)
    cases = [(name, prompt, of[name].tokens(prompt, MAX_TOKENS)) for prompt in asked for name in of]
    assert all(len({tuple(tokens) for _, given, tokens in cases if given == prompt}) == len(of) for prompt in asked)
    settings = {"model__adapters": {name: str(path) for name, (path, _) in adapters.items()}, **WAYS[way]}
    async with running(command=fork_servers.command, **settings) as cluster:
        has_prefill_pool = cluster.local.config.prefill.replicas > 0
        for salt in ("cold", "warm", "warm"):
            answers = await asyncio.gather(
                *(cluster.tokens(prompt, MAX_TOKENS, model=name, cache_salt=salt) for name, prompt, _ in cases)
            )
            assert differing(cases, answers) == []
        assert (await cluster.disaggregated() > 0) == has_prefill_pool
        assert await cluster.figure("tandem_dispatch_retries_total") == 0, "a hand-off failed"
        answer = await cluster.complete(asked[0], 1, model="style:brief")
        assert answer["model"] == "style:brief"
        listed = (await cluster.http.get("/v1/models")).json()["data"]
        assert {one["id"] for one in listed} == set(of)
        unknown = {"model": "style:unknown", "prompt": asked[0], "max_tokens": 1}
        response = await cluster.http.post("/v1/completions", json=unknown)
        assert (response.status_code, "style:unknown" in response.text) == (404, True)
        await cluster.until_idle()


async def test_cluster_with_too_high_a_rank_does_not_start(adapters, fork_servers):
    path, _ = adapters["style:brief"]
    settings = {"model__adapters": {"style:brief": str(path)}, "engine__max_adapter_rank": 7}
    with pytest.raises(ClusterFailed) as failed:
        async with running(command=fork_servers.command, **settings):
            pass
    wrong = (
        rf"error: model\.adapters\.style:brief: {re.escape(str(path))}/adapter_config\.json: r is 8, and engine\.max"
    )
    assert re.search(wrong, str(failed.value)), failed.value


@pytest.mark.slow
async def test_cluster_loads_adapters_while_it_runs(adapters, oracle, fork_servers, tmp_path):
    """More than a worker has room for: they take turns. Only from below the folder, only for tenants that may."""
    folder = tmp_path / "adapters"
    base = AutoModelForCausalLM.from_pretrained(BUILTIN, dtype=torch.float32)
    shutil.copytree(adapters["style/formal"][0], folder / "formal")
    for number in range(4):
        write_adapter(folder / f"other-{number}", base, rank=4, seed=10 + number)
    num_bytes = (folder / "formal" / "adapter_model.safetensors").stat().st_size
    settings = {
        "model__adapter_folder": str(folder),
        "engine__adapter_bytes": int(2.5 * num_bytes),
        "router__api_keys": [{"key": "of-operator", "operator": True}, {"key": "of-few", "tenant": "few"}],
        "router__limits": {"tenants": {"few": {"adapters": ["formal*"]}}},
    }
    (prompt,) = prompts(oracle, 1, seed=9)
    expected = adapters["style/formal"][1].tokens(prompt, MAX_TOKENS)
    few = {"Authorization": "Bearer of-few"}
    async with running(command=fork_servers.command, key="of-operator", **settings) as cluster:

        async def load(name, path, **more):
            return await cluster.http.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": path}, **more)

        assert (await load("formal", "formal", headers=few)).status_code == 403
        assert (await load("formal", str(adapters["style:brief"][0]))).status_code == 403
        names = ["formal", *(f"other-{number}" for number in range(4))]
        for name in names:
            assert (await load(name, name)).status_code == 200
        for _ in range(2):
            answers = await asyncio.gather(*(cluster.tokens(prompt, MAX_TOKENS, model=name) for name in names))
            assert answers[0] == expected
            assert len(set(map(tuple, answers))) == len(names)
        ask = {"prompt": prompt, "max_tokens": 1}
        statuses = [
            (await cluster.http.post("/v1/completions", json=ask | {"model": name}, headers=few)).status_code
            for name in ("formal", "other-0")
        ]
        assert statuses == [200, 404]
        unloaded = await cluster.http.post("/v1/unload_lora_adapter", json={"lora_name": "formal"})
        assert unloaded.status_code == 200
        gone = await cluster.http.post("/v1/completions", json=ask | {"model": "formal"})
        assert gone.status_code == 404
        await cluster.until_idle()


@pytest.mark.slow
async def test_cluster_refuses_other_files_than_it_serves(adapters, fork_servers, tmp_path, oracle):
    """Files that are replaced at their path are refused at once, with the reason, until they are loaded anew."""
    path = tmp_path / "adapters" / "style"
    shutil.copytree(adapters["style/formal"][0], path)
    (prompt,) = prompts(oracle, 1, seed=9)
    expected = adapters["style:brief"][1].tokens(prompt, MAX_TOKENS)
    settings = {"model__adapters": {"style": str(path)}, "model__adapter_folder": str(path.parent)}
    async with running(command=fork_servers.command, **settings) as cluster:
        shutil.copytree(adapters["style:brief"][0], path, dirs_exist_ok=True)
        async with asyncio.timeout(20):
            refused = await cluster.http.post("/v1/completions", json={"model": "style", "prompt": prompt})
        assert (refused.status_code, "another version of the adapter's files" in refused.text) == (503, True)
        others = await cluster.tokens(prompt, 4)
        assert others == oracle.tokens(prompt, 4), "the workers are as good as before for everything else"
        anew = {"lora_name": "style", "lora_path": "style", "load_inplace": True}
        assert (await cluster.http.post("/v1/load_lora_adapter", json=anew)).status_code == 200
        assert await cluster.tokens(prompt, MAX_TOKENS, model="style") == expected
        await cluster.until_idle()
