"""A model with its own sampling defaults: real processes, every API."""

import json
import shutil
from pathlib import Path

import grpc.aio
import pytest

from tandem.model_path import BUILTIN, model_directory
from tandem.v1 import inference_pb2 as pb
from tandem.v1.inference_pb2_grpc import InferenceStub
from tests.support.running_cluster import running

ASKED = [{"role": "user", "content": "Tell me a story of a fox."}]
SEEDS = (1, 2, 3)
ONE_WORKER = {"prefill__replicas": 0, "decode__replicas": 1}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The built-in model with greedy decoding as its default."""
    directory = tmp_path / "own-sampling"
    shutil.copytree(model_directory(BUILTIN), directory)
    own = json.loads((directory / "generation_config.json").read_text())
    (directory / "generation_config.json").write_text(json.dumps(own | {"top_k": 1, "max_new_tokens": 12}))
    return directory


async def test_generation_config_applies_on_every_wire_unless_overridden(fork_servers, model, tmp_path):
    batches = {"path": str(tmp_path / "batches")}
    named = {"model__path": str(model), "model__dtype": "float32"}

    async def chat(**more: object) -> str:
        answer = await cluster.http.post("/v1/chat/completions", json={"messages": ASKED, **more})
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["message"]["content"]

    async with running(command=fork_servers.command, **named, **ONE_WORKER, router__batches=batches) as cluster:
        (card,) = (await cluster.http.get("/v1/models")).json()["data"]
        assert card["default_sampling_params"] == {"top_k": 1, "max_tokens": 12}
        greedy = await chat(temperature=0, top_k=0, max_tokens=12)
        assert [await chat(seed=seed) for seed in SEEDS] == [greedy] * 3
        assert len({await chat(seed=seed, top_k=-1) for seed in SEEDS}) > 1
        body = {"model": card["id"], "max_tokens": 12, "messages": ASKED}
        answer = (await cluster.http.post("/v1/messages", json=body)).json()
        assert answer["content"][0]["text"] == greedy
        answer = (await cluster.http.post("/v1/responses", json={"input": ASKED})).json()
        assert answer["output"][0]["content"][0]["text"] == greedy
        assert await _over_grpc(cluster.local.grpc_address) == greedy
        assert await _in_a_batch(cluster) == greedy
    async with running(command=fork_servers.command, **named, **ONE_WORKER, model__generation_config="none") as cluster:
        (card,) = (await cluster.http.get("/v1/models")).json()["data"]
        assert card["default_sampling_params"] == {}
        assert len({await chat(seed=seed, max_tokens=12) for seed in SEEDS}) > 1


async def _over_grpc(address: str) -> str:
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content=ASKED[0]["content"])])
    async with grpc.aio.insecure_channel(address) as channel:
        answers = [answer async for answer in InferenceStub(channel).Generate(pb.GenerateRequest(chat=chat))]
    return "".join(answer.text for answer in answers)


async def _in_a_batch(cluster) -> str:
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": ASKED}}
    files = {"file": ("in.jsonl", json.dumps(line).encode())}
    file = (await cluster.http.post("/v1/files", data={"purpose": "batch"}, files=files)).json()
    wanted = {"input_file_id": file["id"], "endpoint": line["url"], "completion_window": "24h"}
    batch = (await cluster.http.post("/v1/batches", json=wanted)).json()

    async def done() -> bool:
        nonlocal batch
        batch = (await cluster.http.get(f"/v1/batches/{batch['id']}")).json()
        return batch["status"] == "completed"

    await cluster.until(done)
    (result,) = (await cluster.http.get(f"/v1/files/{batch['output_file_id']}/content")).text.splitlines()
    return json.loads(result)["response"]["body"]["choices"][0]["message"]["content"]
