"""A cluster that is given one GGUF file, and nothing else, answers as one that has the restored model's directory."""

import asyncio
import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import save_file

from tests.support.engine.gguf_writer import write_gguf
from tests.support.oracle import BUILTIN, Oracle, prompts
from tests.support.running_cluster import running

MAX_TOKENS = 24
TEXTS = ["Once upon a time, 12 cats  \n\tsat", "naïve 漢字 🙂 <|end|> it's", " <|bos|>"]
TALK = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Tell me of <|end|> the red kite, 42!"}]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "count": {"type": "integer"}},
    "required": ["name", "count"],
    "additionalProperties": False,
}


def write(folder: Path) -> Path:
    """Write the built-in model in Q8_0 to a file, and as restored to `folder/dense`. Returns the file."""
    (folder / "file").mkdir()
    file = folder / "file" / "tiny-q8_0.gguf"
    restored = write_gguf(BUILTIN, file, block_type="Q8_0", pre="smollm")
    shutil.copytree(BUILTIN, folder / "dense", ignore=shutil.ignore_patterns("*.safetensors"))
    save_file({name: values.contiguous() for name, values in restored.items()}, folder / "dense" / "model.safetensors")
    return file


@pytest.mark.turn(3)
async def test_gguf_file_alone_through_both_pools_answers_as_its_restored_directory(fork_servers, tmp_path):
    file = write(tmp_path)
    oracle = Oracle(tmp_path / "dense")
    cases = [(prompt, oracle.tokens(prompt, MAX_TOKENS)) for prompt in prompts(oracle, 6, seed=9)]
    ways = {"model__path": str(file), "model__dtype": "float32", "decode__tensor_parallel_size": 2}
    async with running(command=fork_servers.command, **ways) as cluster:
        answers = await asyncio.gather(*(cluster.tokens(prompt, MAX_TOKENS) for prompt, _ in cases))
        assert answers == [expected for _, expected in cases]
        assert await cluster.disaggregated() > 0
        lines = [line for line in cluster.logs.lines if "weights are restored to float32 from GGUF, F32, Q8_0" in line]
        assert len(lines) == 2  # of the prefill worker, and of the decode worker's first rank
        (model,) = (await cluster.http.get("/v1/models")).json()["data"]
        assert (model["id"], model["has_chat_template"]) == ("tiny-q8_0", True)
        ours = [await answer(cluster, path, body) for path, body in requests("tiny-q8_0")]
        document = json.loads(ours[-1][0])
        assert isinstance(document["name"], str)
        assert isinstance(document["count"], int)
        await cluster.until_idle()
    dense = {"model__path": str(tmp_path / "dense"), "model__dtype": "float32"}
    async with running(command=fork_servers.command, **dense) as cluster:
        assert [await answer(cluster, path, body) for path, body in requests("dense")] == ours


def requests(model):
    """Requests whose answers depend on the tokenizer, the chat template, the end tokens and the grammar."""
    plain = {"model": model, "temperature": 0, "max_tokens": 60}
    form = {"type": "json_schema", "json_schema": {"name": "thing", "strict": True, "schema": SCHEMA}}
    chat = plain | {"messages": TALK}
    return [
        *(("/v1/completions", plain | {"prompt": text}) for text in TEXTS),
        ("/v1/chat/completions", chat),
        ("/v1/chat/completions", chat | {"response_format": form}),
    ]


async def answer(cluster, path, body):
    """Text, number of tokens of the prompt and of the answer, and why it ended."""
    response = await cluster.http.post(path, json=body)
    assert response.status_code == 200, response.text
    (choice,), usage = response.json()["choices"], response.json()["usage"]
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    return text, usage["prompt_tokens"], usage["completion_tokens"], choice["finish_reason"]
