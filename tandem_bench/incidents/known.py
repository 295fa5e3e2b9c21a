"""The incidents of docs/operate/walkthroughs.md."""

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tandem.model_path import BUILTIN, model_directory
from tandem.values.kv_layout import KVLayout
from tandem_bench.cache import cache_dir
from tandem_bench.clusters import COLOCATED, Setup
from tandem_bench.incidents import structures
from tandem_bench.incidents.loads import chats, chats_and_documents, long_contexts, short_and_long
from tandem_bench.incidents.scene import Incident, Phase, Shown

CARELESS_BITS, CAREFUL_BITS = 4, 8
_WEIGHTS = "model.safetensors"


def rounded_folder(bits: int) -> Path:
    """Return the folder of the rounded model, whether it exists or not."""
    return cache_dir("models") / f"tandem-tiny-{bits}-bits"


def make_rounded() -> None:
    """Make both models: four bits with one scale per matrix, and eight bits with a scale per row."""
    for bits in (CARELESS_BITS, CAREFUL_BITS):
        source, folder = model_directory(BUILTIN), rounded_folder(bits)
        if not (folder / _WEIGHTS).exists():
            shutil.copytree(source, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns(_WEIGHTS))
            tensors = {name: _rounded(tensor, bits) for name, tensor in load_file(source / _WEIGHTS).items()}
            half_written = folder / "half-written"
            save_file(tensors, half_written)
            half_written.replace(folder / _WEIGHTS)


def _rounded(tensor: torch.Tensor, bits: int) -> torch.Tensor:
    if tensor.dim() < 2:
        return tensor
    levels = 2 ** (bits - 1) - 1
    largest = tensor.abs().max() if bits == CARELESS_BITS else tensor.abs().amax(dim=-1, keepdim=True)
    scale = (largest / levels).clamp_min(1e-12)
    rounded: torch.Tensor = (tensor / scale).round() * scale
    return rounded.to(tensor.dtype)


_POOL_BLOCKS = 256
"""Blocks of float32: room for two sequences of the whole context."""
_GEOMETRY = {"model_fingerprint": "", "num_layers": 4, "num_kv_heads": 4, "head_dim": 32, "block_size": 16}
"""Geometry of the built-in model."""


def same_bytes(num_blocks: int, *, dtype: str, as_dtype: str) -> int:
    """Return how many blocks of another dtype take the same bytes."""
    ours, theirs = (KVLayout(dtype=name, **_GEOMETRY).block_bytes for name in (dtype, as_dtype))  # type: ignore[arg-type]
    return num_blocks * ours // theirs


def _memory() -> Incident:
    more = same_bytes(_POOL_BLOCKS, dtype="float32", as_dtype="int8")
    return Incident(
        story="long contexts fill the decode pool: sequences preempt each other and are computed again",
        phases=(
            Phase(
                name="float32 KV",
                setup=Setup(mode="shm", engine={"num_blocks": _POOL_BLOCKS}),
                load=long_contexts,
                is_trouble=True,
            ),
            Phase(
                name="int8 KV, the same bytes",
                setup=Setup(mode="shm", engine={"num_blocks": more, "kv_dtype": "int8"}),
                load=long_contexts,
            ),
        ),
        panels=(Shown(dashboard="kv-cache", title="KV in use"), Shown(dashboard="kv-cache", title="Preemptions")),
        alarms=("TandemKvCacheFull",),
        figures={
            "KV use of the fullest worker": "max(vllm:kv_cache_usage_perc)",
            "preemptions a second": "sum(max by (engine) (rate(vllm:num_preemptions_total[20s])))",
        },
    )


_NOT_QUEUED = {"queue": {"worker_backlog_s": 30.0}}
"""The documents wait at the workers: a fast machine would otherwise be given one at a time."""


def _batching() -> Incident:
    return Incident(
        story="one worker reads documents and continues chats: a step with a whole document holds up every stream",
        phases=(
            Phase(
                name="whole prompts in one step",
                setup=Setup(
                    mode=COLOCATED,
                    prefill_chunk_tokens=12_800,
                    engine={"max_step_s": None, "max_batched_tokens": 12_800},
                    router=_NOT_QUEUED,
                ),
                load=chats_and_documents,
                is_trouble=True,
            ),
            Phase(
                name="max_step_s 0.05",
                setup=Setup(mode=COLOCATED, prefill_chunk_tokens=512, engine={"max_step_s": 0.05}, router=_NOT_QUEUED),
                load=chats_and_documents,
            ),
            Phase(name="a prefill pool", setup=Setup(mode="shm", router=_NOT_QUEUED), load=chats_and_documents),
        ),
        panels=(
            Shown(dashboard="overview", title="Time between tokens"),
            Shown(dashboard="pd-flow", title="Step time"),
        ),
        alarms=("TandemTokensThriceTheirBaseline",),
        baselines={"tandem:itl_seconds:p95_baseline1d": "tandem:itl_seconds:p95_5m"},
        figures={
            "p95 between tokens (s)": "tandem:itl_seconds:p95_5m",
            "seconds of a step with a prompt": (
                'max(rate(tandem_worker_step_seconds_total{kind="prefill"}[20s])'
                ' / rate(tandem_worker_steps_total{kind="prefill"}[20s]))'
            ),
        },
    )


def _jitter() -> Incident:
    return Incident(
        story="every prompt, however short, goes through the prefill pool and waits there behind long ones",
        phases=(
            Phase(
                name="local_prefill_tokens 0",
                setup=Setup(mode="shm", local_prefill_tokens=0),
                load=short_and_long,
                is_trouble=True,
            ),
            Phase(
                name="read by decode, not queued",
                setup=Setup(mode="shm", local_prefill_tokens=64, router=_NOT_QUEUED),
                load=short_and_long,
            ),
        ),
        panels=(
            Shown(dashboard="overview", title="First token by prompt length"),
            Shown(dashboard="pd-flow", title="Where prompts are computed"),
        ),
        alarms=("TandemShortPromptsWait",),
        figures={
            "p95 of first tokens, prompts up to 128 (s)": (
                'histogram_quantile(0.95, sum by (le) (rate(tandem_slice_ttft_seconds_bucket{prompt="128"}[20s])))'
            ),
            "p95 of first tokens, longer ones (s)": (
                'histogram_quantile(0.95, sum by (le) (rate(tandem_slice_ttft_seconds_bucket{prompt!="128"}[20s])))'
            ),
        },
    )


def _structures() -> Incident:
    setup = Setup(mode=COLOCATED)
    return Incident(
        story="answers that follow a schema are cut before they are whole, and clients ask again and again",
        phases=(
            Phase(name="no bounds, 48 tokens", setup=setup, load=structures.unbounded, is_trouble=True),
            Phase(name="bounds, 256 tokens", setup=setup, load=structures.bounded),
        ),
        panels=(Shown(dashboard="overview", title="Structured answers by end"),),
        alarms=("TandemStructuresCut",),
        figures={
            "share cut": (
                'sum(rate(tandem_structured_answers_total{finished_reason="length"}[20s]))'
                " / sum(rate(tandem_structured_answers_total[20s]))"
            ),
        },
    )


def _quality() -> Incident:
    probed = {"quality": {"period_s": 5.0}}

    def phase(name: str, path: str, *, is_trouble: bool = False) -> Phase:
        setup = Setup(
            mode="shm",
            dtype="bfloat16",
            model={"path": path, "name": "tandem-tiny"},
            router=probed,
        )
        return Phase(name=name, setup=setup, load=chats, is_trouble=is_trouble)

    return Incident(
        story="a checkpoint that was quantized carelessly is deployed under the old name: as fast, and worse",
        phases=(
            phase("bfloat16", BUILTIN),
            phase("four bits", str(rounded_folder(CARELESS_BITS)), is_trouble=True),
            phase("eight bits by row", str(rounded_folder(CAREFUL_BITS))),
        ),
        panels=(Shown(dashboard="overview", title="Quality probe: loss"),),
        alarms=("TandemQualityLost",),
        figures={
            "loss of the probe (nats)": "max(tandem_quality_loss_nats)",
            "p95 between tokens (s)": "tandem:itl_seconds:p95_5m",
        },
        one_history=True,
        prepare=make_rounded,
    )


INCIDENTS: Mapping[str, Callable[[], Incident]] = {
    "memory": _memory,
    "batching": _batching,
    "quality": _quality,
    "structures": _structures,
    "jitter": _jitter,
}
