"""Clusters whose decode workers verify drafts answer as one that has none, whatever is asked, and whatever is drafted.

The answers are drawn from few prompts, and each is asked for twice under one salt: the second time, drafts from earlier
answers are right nearly everywhere, and those from the request's own text often wrong.
"""

import asyncio
import json
import random
import signal

import pytest
import pytest_asyncio

from tests.support.e2e.emitted import is_of_drafts, unknown
from tests.support.monitoring_files import expressions
from tests.support.oracle import prompts
from tests.support.running_cluster import running

pytestmark = pytest.mark.asyncio(loop_scope="module")
ALL = ["grammar", "prediction", "lookup", "suffix"]


def drafts(*sources, most=8, adaptive=False):
    return {
        "engine__speculation__sources": list(sources),
        "engine__speculation__max_draft_tokens": most,
        "engine__speculation__adaptive": adaptive,
    }


WAYS = {
    "shm": {**drafts(*ALL), "decode__replicas": 2},
    "adaptive": {**drafts(*ALL, adaptive=True), "prefill__replicas": 0},
}
LONG_WAYS = {
    "tcp": {**drafts("suffix", "lookup", most=64), "transfer__transport": "tcp", "engine__prefill_chunk_tokens": 16},
    "few-blocks": {**drafts(*ALL, most=3), "engine__num_blocks": 40, "engine__offload_bytes": 4 << 20},
    "int8": {**drafts(*ALL), "engine__kv_dtype": "int8", "engine__deterministic": True},
    "tp-2": {**drafts(*ALL), "prefill__replicas": 0, "decode__tensor_parallel_size": 2},
}
LONG = 300
SCHEMA = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["red", "green", "a shade of blue"]},
        "number": {"type": "integer", "minimum": 0, "maximum": 999},
        "likes_long_walks_on_the_beach": {"type": "boolean"},
    },
    "required": ["colour", "number", "likes_long_walks_on_the_beach"],
    "additionalProperties": False,
}
AS_SCHEMA = {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": SCHEMA}}


@pytest_asyncio.fixture(
    loop_scope="module",
    scope="module",
    params=[*WAYS, *(pytest.param(name, marks=pytest.mark.slow) for name in LONG_WAYS)],
)
async def cluster(request, fork_servers):
    way = (WAYS | LONG_WAYS)[request.param]
    async with running(command=fork_servers.command, router__max_queue_s=600.0, **way) as made:
        yield made


def drawn(seed):
    """Random options: those that depend on earlier tokens, end early, or sample."""
    draw = random.Random(seed)
    structure = {"response_format": AS_SCHEMA, "ignore_eos": False} if seed % 4 == 3 else {}
    return {
        "seed": seed,
        "temperature": draw.choice([0, 0.8, 1.5]),
        "top_p": draw.choice([1.0, 0.9]),
        "repetition_penalty": draw.choice([1.0, 1.2]),
        "frequency_penalty": draw.choice([0.0, 0.7]),
        "logit_bias": draw.choice([{}, {"400": 3.0, "401": -100.0}]),
        "logprobs": draw.choice([None, 3]),
        "stop": draw.choice([None, ["e "], ["the", " a"], ["zzz"]]) if not structure else None,
        "bad_words": draw.choice([[], ["the", "was"]]),
        "ignore_eos": draw.random() < 0.5,
        "n": draw.choice([1, 1, 3]),
        **structure,
    }


@pytest.fixture(scope="module")
def cases(oracle):
    return [
        (prompt[:300], 60 if i % 4 == 3 else random.Random(i).choice([1, 2, 40, 60]), drawn(i))
        for i, prompt in enumerate(prompts(oracle, 12, seed=21))
    ]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def alone(cluster, fork_servers, cases):
    """Without drafts, one at a time, over as many ranks and by as exact a cache, which change the last bits."""
    config = cluster.local.config
    same = {
        "decode__tensor_parallel_size": config.decode.tensor_parallel_size,
        "engine__kv_dtype": config.engine.kv_dtype,
        "engine__deterministic": config.engine.deterministic,
    }
    async with running(command=fork_servers.command, prefill__replicas=0, **same) as plain:
        answers = [shown(await plain.complete(prompt, count, **more)) for prompt, count, more in cases]
        assert not await plain.figure("tandem_worker_step_draft_tokens_total")
        return answers


def shown(answer):
    """All fields that depend neither on caches nor on time."""
    usage = {key: answer["usage"][key] for key in ("prompt_tokens", "completion_tokens")}
    return answer["choices"], usage


@pytest.mark.in_turns
async def test_drafted_answers_are_those_without_drafts(cluster, cases, alone):
    for salt in ("cold", "cold", "batch"):
        answers = await asyncio.gather(
            *(cluster.complete(prompt, count, cache_salt=salt, **more) for prompt, count, more in cases)
        )
        differing = [i for i, one in enumerate(answers) if shown(one) != alone[i]]
        assert differing == [], [(cases[i][1:], shown(answers[i]), alone[i]) for i in differing[:1]]
    structured = [choice["text"] for i, one in enumerate(answers) if i % 4 == 3 for choice in one["choices"]]
    assert all(set(json.loads(text)) == set(SCHEMA["required"]) for text in structured if text.endswith("}"))
    await cluster.until_idle()


async def test_streams_with_drafts_equal_transformers(cluster, oracle):
    """The second time in few steps: nearly all tokens are those of an earlier answer."""
    asked = [(prompt, oracle.tokens(prompt, 48)) for prompt in (p[:300] for p in prompts(oracle, 6, seed=22))]
    for salt in ("first", "first", "second"):
        answers = await asyncio.gather(*(cluster.stream(prompt, 48, cache_salt=salt) for prompt, _ in asked))
        if cluster.local.config.engine.kv_dtype == "auto":
            assert [one.token_ids for one in answers] == [expected for _, expected in asked]
    await cluster.until_idle()
    if cluster.local.config.engine.speculation.adaptive:
        return  # whether anything pays depends on the machine
    names = ("tandem_worker_step_draft_tokens_total", "tandem_worker_step_accepted_tokens_total")
    drafted, accepted = [await cluster.figure(name) for name in names]
    assert drafted >= accepted > 48
    assert await cluster.figure("vllm:spec_decode_num_accepted_tokens_total") == accepted
    of_drafts = [one for one in expressions() if is_of_drafts(one)]
    assert of_drafts
    assert unknown(of_drafts, (await cluster.http.get("/metrics")).text) == []


def edited(text):
    """The text with a few words changed, removed and added, and its second half before the first."""
    words = text.split(" ")
    for place in range(3, len(words), 9):
        words[place] = ("another", "", "quite another")[place % 3]
    middle = len(words) // 2
    return " ".join(words[middle:] + words[:middle])


async def told(cluster, story, prediction=None, **more):
    """A chat's answers, and how many tokens of the prediction were accepted and rejected."""
    turn = {"role": "user", "content": f"Tell me the story of {story}."}
    body = {"messages": [turn], "max_tokens": 48, "ignore_eos": True, "seed": story, **more}
    if prediction is not None:
        body["prediction"] = {"type": "content", "content": prediction}
    answer = (await cluster.http.post("/v1/chat/completions", json=body)).json()
    details = answer["usage"]["completion_tokens_details"]
    return [choice["message"]["content"] for choice in answer["choices"]], (
        details["accepted_prediction_tokens"],
        details["rejected_prediction_tokens"],
    )


async def test_predictions_right_or_wrong_change_no_answer(cluster):
    """Of a prediction that is right nearly all is accepted, and the more of it is wrong, the more is rejected."""

    ways = [{}, {"frequency_penalty": 0.5}, {"logprobs": True, "top_logprobs": 2}, {"n": 2}]
    cases = [(i, way | {"temperature": heat}) for i, way in enumerate(ways) for heat in (0, 0.9)]
    plain = await asyncio.gather(*(told(cluster, i, **way) for i, way in cases))
    used = {}
    for name, change in {
        "right": lambda text: text,
        "edited": edited,
        "unrelated": lambda _: "Zebras quarrel over quartz: 17, 42, 99. " * 40,
    }.items():
        predictions = [change(texts[0]) for texts, _ in plain]
        asked = zip(cases, predictions, strict=True)
        answers = await asyncio.gather(*(told(cluster, i, given, **way) for (i, way), given in asked))
        assert [texts for texts, _ in answers] == [texts for texts, _ in plain]
        used[name] = [sum(counts) for counts in zip(*(counts for _, counts in answers), strict=True)]
    assert [counts for _, counts in plain] == [(0, 0)] * len(cases)
    speculation = cluster.local.config.engine.speculation
    if "prediction" not in speculation.sources:
        assert all(counts == [0, 0] for counts in used.values())
    elif not speculation.adaptive:
        accepted = {name: counts[0] for name, counts in used.items()}
        assert accepted["right"] > 24 * len(cases)
        assert accepted["right"] > accepted["edited"] > accepted["unrelated"]
        labels = {"source": "prediction"}
        await cluster.until_idle()
        counted = await cluster.figure("vllm:spec_decode_num_accepted_tokens_total", **labels)
        assert counted == sum(counts[0] for counts in used.values())
        drafted = await cluster.figure("tandem_worker_draft_tokens_total", **labels)
        assert drafted == sum(map(sum, used.values()))


@pytest.mark.parametrize("cluster", ["shm"], indirect=True, scope="module")  # the one with two decode workers
async def test_streams_with_drafts_survive_the_loss_of_their_worker(cluster, oracle):
    """What the worker had drafted, and whose answers it had kept, is lost with it, and nobody can tell."""
    made = [oracle.story(900 + i, 100) for i in range(4)]
    expected = oracle.batch(made, LONG)
    plain = [(await told(cluster, i, max_tokens=LONG))[0] for i in range(4)]
    answers = asyncio.gather(*(cluster.stream(prompt, LONG) for prompt in made))
    predicted = asyncio.gather(*(told(cluster, i, edited(texts[0]), max_tokens=LONG) for i, texts in enumerate(plain)))
    killed = await cluster.kill_the_busiest(signal.SIGKILL)
    assert [one.token_ids for one in await answers] == expected
    assert [texts for texts, _ in await predicted] == plain
    assert all(0 < accepted < LONG for _, (accepted, _) in await predicted)
    await cluster.comes_back(*killed)
    await cluster.until_idle()
