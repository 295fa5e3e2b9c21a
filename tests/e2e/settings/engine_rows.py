"""Settings of engines, pools and hand-offs."""

import asyncio
import signal
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from engine.kernels.cpu.gemm import Arithmetic
from tandem_bench.quality.__main__ import main as write_gate
from tests.e2e.models.test_quantized_checkpoint import quantize
from tests.e2e.settings.row import MAX_TOKENS, Asked, Prompts, Row, Tokens, nothing_else
from tests.support.certificates import Authority
from tests.support.e2e.one_process import PoolDtypes, answers
from tests.support.engine.gguf_writer import write_gguf
from tests.support.oracle import BUILTIN, Oracle, noise

CHUNKED = {"engine.prefill_chunk_tokens": 64}
EXACT_BF16 = {"model.dtype": "bfloat16", "engine.deterministic": True, **CHUNKED}
"""bfloat16 whose results do not depend on the batch."""
POOLS = ("prefill", "decode")
PLAIN = {"model.dtype": "float32", "engine.pipelined": "off", "log_level": "error"}


def bf16(quantization: str = "none") -> PoolDtypes:
    return PoolDtypes(dtype="bfloat16", quantization=quantization)


def alone(
    prefill: PoolDtypes, decode: PoolDtypes, *, wire_dtype: str | None = None, model: str = ""
) -> Callable[[Oracle, Prompts, Path], Tokens]:
    """As one process says it; `model`: a folder within the test's."""

    def expected(_: Oracle, prompts: Prompts, folder: Path) -> Tokens:
        path = folder / model if model else BUILTIN
        return answers(path, prompts, MAX_TOKENS, prefill=prefill, decode=decode, wire_dtype=wire_dtype)

    return expected


async def _flood(asked: Asked) -> None:
    """Ask once for more prompts than the pools hold."""
    made = [noise(100 + i, 250) for i in range(12)]
    got = [await asked.cluster.tokens(prompt, 4, cache_salt="x") for prompt in made]
    assert got == [asked.oracle.tokens(prompt, 4) for prompt in made]


async def _num_cached(asked: Asked, prompt: list[int]) -> int:
    answer = await asked.cluster.complete(prompt, 4, cache_salt="x")
    assert answer["choices"][0]["token_ids"] == asked.oracle.tokens(prompt, 4)
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


async def what_is_used_often_stays(asked: Asked) -> None:
    """Not so what was used once, earlier."""
    often, once = noise(98, 250), noise(99, 250)
    for prompt in [*[often] * 6, once]:
        await _num_cached(asked, prompt)
    await _flood(asked)
    assert await _num_cached(asked, often) > 200
    assert await _num_cached(asked, once) == 0


async def what_is_shared_stays(asked: Asked) -> None:
    """Not so what nobody shares, though it was used later."""
    beginning, own = noise(98, 128), noise(99, 250)
    for prompt in [*(beginning + noise(90 + i, 60) for i in range(4)), own]:
        await _num_cached(asked, prompt)
    await _flood(asked)
    assert await _num_cached(asked, beginning + noise(97, 60)) == 128
    assert await _num_cached(asked, own) < 128, "of a prompt of 250 tokens"


async def what_is_used_earliest_goes(asked: Asked) -> None:
    """However often it was used before."""
    often, last = noise(98, 250), noise(111, 250)
    for _ in range(6):
        await _num_cached(asked, often)
    await _flood(asked)
    assert await _num_cached(asked, last) > 200
    assert await _num_cached(asked, often) == 0


async def streams_outlive_a_killed_worker(asked: Asked) -> None:
    """To the tokens of a cluster that nobody killed."""
    prompt = asked.oracle.story(77, 200)
    whole = await asked.cluster.tokens(prompt, 300, cache_salt="undisturbed")
    reading = asyncio.create_task(asked.cluster.stream(prompt, 300, cache_salt="killed"))
    name, pid = await asked.cluster.kill_the_busiest(signal.SIGKILL)
    assert (await reading).token_ids == whole
    await asked.cluster.comes_back(name, pid)


def moved_by(transport: str) -> Callable[[Asked], Awaitable[None]]:
    """All hand-offs went over it."""

    async def check(asked: Asked) -> None:
        moved = await asked.cluster.figures("tandem_worker_transfers_total", outcome="committed")
        assert sum(moved.values()) > 0
        assert all(transport in key for key in moved), moved

    return check


async def few_run_at_once(asked: Asked) -> None:
    """Twelve streams of one worker with room for two, until a report of it has come while they ran."""
    prompts = [noise(200 + i, 100) for i in range(12)]
    most = 0.0

    async def watch() -> None:
        nonlocal most
        while True:
            running = await asked.cluster.figures("tandem_worker_requests", role="decode", state="running")
            most = max(most, *running.values())
            await asyncio.sleep(0.02)

    expected = [asked.oracle.tokens(prompt, 40) for prompt in prompts]

    async def seen() -> bool:
        assert await asyncio.gather(*(asked.cluster.tokens(prompt, 40) for prompt in prompts)) == expected
        return most > 0

    watching = asyncio.create_task(watch())
    await asked.cluster.until(seen)
    watching.cancel()
    assert most <= 2


async def memory_is_within_its_bound(asked: Asked) -> None:
    """Weights and KV, as the workers report them."""
    for worker in asked.cluster.local.workers:
        kinds = await asked.cluster.figures("tandem_worker_memory_bytes", worker=worker.name, role=worker.role.value)
        assert 100 << 20 <= kinds["weights",] + kinds["kv_pool",] <= 300 << 20, kinds


def stored_as_they_are(*, is_said: bool) -> Callable[[Asked], Awaitable[None]]:
    """What the workers say of a quantized checkpoint's matrices."""

    async def check(asked: Asked) -> None:
        lines = [line for line in asked.cluster.logs.lines if "are multiplied as they are stored" in line]
        assert bool(lines) == is_said, asked.cluster.logs.lines

    return check


async def certificates(folder: Path, _: AsyncExitStack) -> Mapping[str, Any]:
    Authority().issue(folder)
    return {}


async def k_quantized_file(folder: Path, _: AsyncExitStack) -> Mapping[str, Any]:
    write_gguf(BUILTIN, folder / "tiny-q4_k_m.gguf", block_type="Q4_K_M", pre="smollm")
    return {}


async def quality_gate(folder: Path, _: AsyncExitStack) -> Mapping[str, Any]:
    """What the built-in model expects in float32."""
    write_gate(["builtin", "--suite", "kl", "--samples", "2", "--gate", str(folder / "gate.json")])
    return {}


async def gates_are_passed(asked: Asked) -> None:
    """By each worker, before it serves."""
    lines = [line for line in asked.cluster.logs.lines if "quality gate passed" in line]
    assert len(lines) == len(asked.cluster.local.workers), asked.cluster.logs.lines


async def quantized_model(folder: Path, _: AsyncExitStack) -> Mapping[str, Any]:
    quantize(folder)
    return {}


async def pools_are_compared(asked: Asked, *, least_agreeing: float = 0.8) -> None:
    """On answers that have ended, by a pool of each kind, which differ and not by much."""

    async def compared() -> bool:
        return await asked.cluster.figure("tandem_shadow_answers_total", outcome="compared") >= 6

    of: dict[str, float] = {}

    async def read() -> bool:
        """Whether no answer was compared between the readings of two counters."""
        for name in ("tokens", "agreeing_tokens"):
            of[name] = await asked.cluster.figure(f"tandem_shadow_{name}_total")
        return of["tokens"] == await asked.cluster.figure("tandem_shadow_tokens_total")

    await asked.cluster.until(compared)
    await asked.cluster.until(read)
    assert of["tokens"] >= 6 * MAX_TOKENS
    assert least_agreeing * of["tokens"] < of["agreeing_tokens"] <= of["tokens"]
    prefill, decode = [await asked.cluster.figure("tandem_shadow_loss_nats_total", role=one) for one in POOLS]
    assert prefill != decode
    assert abs(prefill - decode) < 0.2 * of["tokens"]


ROWS = {
    "lfu": Row(
        settings={"engine.eviction": "lfu", "engine.num_blocks": 64, "engine.block_size": 32},
        check=what_is_used_often_stays,
        block_size=32,
    ),
    "prefix": Row(
        settings={"engine.eviction": "prefix", "engine.num_blocks": 110, "transfer.transport": "tcp"},
        check=what_is_shared_stays,
    ),
    "lru": Row(
        settings={"engine.eviction": "lru", "engine.num_blocks": 110, "prefill.replicas": 0},
        check=what_is_used_earliest_goes,
        moves=False,
    ),
    "bfloat16": Row(
        settings={
            **EXACT_BF16,
            "engine.quantization": "none",
            "decode.replicas": 2,
            "transfer.transport": "tcp",
            "transfer.wire_dtype": "bfloat16",
        },
        check=streams_outlive_a_killed_worker,
        expected=alone(bf16(), bf16()),
    ),
    "float16": Row(
        settings={"model.dtype": "float16", "engine.kernels": "torch", "transfer.wire_dtype": "float16"},
        expected=alone(PoolDtypes(dtype="float16"), PoolDtypes(dtype="float16")),
    ),
    "small-steps": Row(
        settings={
            "engine.max_step_s": 0.01,
            "engine.max_batched_tokens": 128,
            "engine.max_running_requests": 2,
            "engine.max_waiting_requests": 3,
            "engine.max_overtakes": 0,
            "engine.priority_aging_s": 0.5,
            "engine.pipelined": "on",
            **CHUNKED,
        },
        check=few_run_at_once,
    ),
    "memory": Row(
        settings={"engine.memory_bytes": 300 << 20, "engine.device": "cpu", "engine.block_size": 64} | PLAIN,
        check=memory_is_within_its_bound,
        block_size=64,
    ),
    "tcp-tls": Row(
        settings={
            "transfer.transport": "tcp",
            "transfer.tcp_streams": 4,
            "transfer.lease_s": 5.0,
            "transfer.chunk_bytes": 1 << 16,
            "transfer.tls": {"cert": "{folder}/cert.pem", "key": "{folder}/key.pem", "ca": "{folder}/ca.pem"},
        },
        start=certificates,
        check=moved_by("tcp"),
    ),
    "torch-dist": Row(
        settings={"transfer.transport": "torch_dist", "transfer.isolated_network": True}, check=moved_by("torch_dist")
    ),
    "nixl": Row(settings={"transfer.transport": "nixl", "transfer.isolated_network": True}, check=moved_by("nixl")),
    **{
        f"wire-{dtype}": Row(
            settings={"transfer.transport": "tcp", "transfer.wire_dtype": dtype, "transfer.succession_s": 0.0},
            expected=alone(PoolDtypes(), PoolDtypes(), wire_dtype=dtype),
            is_warm_equal=False,
        )
        for dtype in ("int8", "fp8_e4m3", "int4")
    },
    **{
        f"kv-{dtype}-{transport}": Row(
            settings={"engine.kv_dtype": dtype, "transfer.transport": transport, **CHUNKED},
            expected=alone(PoolDtypes(kv_dtype=dtype), PoolDtypes(kv_dtype=dtype)),
        )
        for dtype, transport in (("int8", "shm"), ("int8", "tcp"), ("fp8_e4m3", "shm"), ("int4", "tcp"))
    },
    "kv-int4-failover": Row(
        settings={**EXACT_BF16, "engine.kv_dtype": "int4", "decode.replicas": 2, "transfer.transport": "shm"},
        check=streams_outlive_a_killed_worker,
        expected=alone(replace(bf16(), kv_dtype="int4"), replace(bf16(), kv_dtype="int4")),
    ),
    **{
        f"kv-{prefill}-to-{decode}": Row(
            settings={
                "engine.kv_dtype": other,
                "prefill.kv_dtype": prefill,
                "decode.kv_dtype": decode,
                "transfer.transport": "tcp",
                "transfer.wire_dtype": wire,
                "log_level": "warning",
            },
            expected=alone(PoolDtypes(kv_dtype=prefill), PoolDtypes(kv_dtype=decode)),
            is_warm_equal=False,
        )
        for prefill, decode, wire, other in (
            ("auto", "int8", "float32", "auto"),
            ("auto", "fp8_e4m3", "auto", "fp8_e4m3"),
            ("int8", "auto", "auto", "auto"),
            ("auto", "int4", "auto", "int4"),
            ("int4", "auto", "auto", "auto"),
            ("fp8_e4m3", "auto", "float32", "int8"),
        )
    },
    "blocks-32-to-16": Row(
        settings={"prefill.block_size": 32, "decode.block_size": 16, "engine.block_size": 64, "log_level": "debug"},
    ),
    "blocks-16-to-64": Row(
        settings={"prefill.block_size": 16, "engine.block_size": 64, "transfer.transport": "tcp"},
        block_size=64,
    ),
    **{
        f"quantization-{name}": Row(
            settings={**EXACT_BF16, "engine.quantization": name, "engine.quality_gate": "{folder}/gate.json"},
            start=quality_gate,
            check=gates_are_passed,
            expected=alone(bf16(name), bf16(name)),
            needs=Arithmetic.INT8_VECTORS,
        )
        for name in ("int8", "int4", "fp8", "nf4")
    },
    **{
        f"quantization-{name}": Row(
            settings={
                **EXACT_BF16,
                "engine.quantization": name,
                "prefill.quantization": name,
                "decode.quantization": name,
                "model.path": "{folder}/w4a16",
            },
            start=quantized_model,
            check=check,
            expected=alone(bf16(name), bf16(name), model="w4a16"),
            needs=Arithmetic.INT8_VECTORS,
        )
        for name, check in (
            ("stored", stored_as_they_are(is_said=True)),
            ("auto", nothing_else),  # with AMX they are restored
        )
    },
    "quantization-q4_k_m": Row(
        settings={**EXACT_BF16, "engine.quantization": "stored", "model.path": "{folder}/tiny-q4_k_m.gguf"},
        start=k_quantized_file,
        check=stored_as_they_are(is_said=True),
        expected=alone(bf16("stored"), bf16("stored"), model="tiny-q4_k_m.gguf"),
        needs=Arithmetic.INT8_VECTORS,
    ),
    **{
        f"quantization-{prefill}-to-{decode}": Row(
            settings={
                **EXACT_BF16,
                "prefill.quantization": prefill,
                "decode.quantization": decode,
                "router.quality.shadow_share": 1.0,
            },
            check=partial(pools_are_compared, least_agreeing=least_agreeing),
            expected=alone(bf16(prefill), bf16(decode)),
            is_warm_equal=False,
            needs=Arithmetic.INT8_VECTORS,
        )
        for prefill, decode, least_agreeing in (
            ("none", "int4", 0.8),
            ("int4", "int8", 0.8),
            ("int8", "none", 0.8),
            ("fp8", "nf4", 0.8),
            ("nf4", "fp8", 0.75),  # 166 of 208 tokens of these answers: four bits judge what eight have written
        )
    },
}
