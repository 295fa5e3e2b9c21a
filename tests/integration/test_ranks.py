"""An engine whose model lies on several processes: the same tokens, and an end as soon as one of them ends."""

import os
import queue
import random
import select
import signal
import subprocess
import sys
import time
from array import array
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.assembly import EngineParts, EngineSpec, assemble
from engine.backends.options import BackendOptions
from engine.parallel.group import RankLost
from engine.ranks.leader import Leader
from engine.ranks.messages import RankSetup
from engine.request import Batch, BatchItem, BlockTable, Request
from kv_transfer.transports.shared_pool import SharedPool
from tandem.errors import ConfigError
from tandem.ids import BlockHash, BlockId, RequestId
from tandem.model_path import model_directory
from tandem.sampling import SamplingParams
from tests.unit.engine.paged_harness import ARCHITECTURES, reference_model

BUILTIN = model_directory("builtin")
WAIT_S = 20.0
OUTPUT = 12


def spec(path: Path, size: int, **more) -> EngineSpec:
    values = {
        "model_path": path,
        "dtype": "float32",
        "max_model_len": 128,
        "device": "cpu",
        "block_size": 16,
        "num_blocks": 40,
        "memory_bytes": 256 << 20,
        "max_batched_tokens": 128,
        "prefill_chunk_tokens": 32,
        "max_running_requests": 8,
        "max_waiting_requests": 8,
        "num_threads": 1,
        "kernels": "torch",
        "quantization": "none",
        "deterministic": False,
        "eviction": "lru",
        "max_overtakes": 8,
        "priority_aging_s": None,
        "num_workers_here": 1,
        "secret": b"0123456789abcdef",
        "tensor_parallel_size": size,
    }
    return EngineSpec(**values | more)


def say(parts: EngineParts, params: SamplingParams) -> list[list[int]]:
    """Continuations of three prompts, computed in chunks and then together."""
    rng = random.Random(3)
    requests = []
    for i, length in enumerate((5, 40, 61)):
        tokens = array("i", [rng.randrange(3, 97) for _ in range(length)])
        blocks = BlockTable([BlockId(8 * i + j) for j in range(8)])
        requests.append(
            Request(
                request_id=RequestId(str(i)),
                token_ids=tokens,
                num_prompt_tokens=length,
                params=params,
                hash_root=BlockHash(b""),
                block_table=blocks,
            )
        )
    while any(request.num_output_tokens < OUTPUT for request in requests):
        run_step(parts, requests)
    return [list(request.token_ids)[request.num_prompt_tokens :][:OUTPUT] for request in requests]


def run_step(parts: EngineParts, requests: list[Request]) -> None:
    items = []
    for request in requests:
        count = min(32, request.num_uncomputed_tokens)
        samples = request.num_computed_tokens + count == request.num_tokens
        items.append(BatchItem(request=request, start=request.num_computed_tokens, num_tokens=count, samples=samples))
    sampled = iter(parts.runner.execute(Batch(items=tuple(items))))
    for item in items:
        item.request.num_computed_tokens += item.num_tokens
        if item.samples:
            item.request.token_ids.append(next(sampled).token_id)


def children() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if "engine.ranks" in " ".join(child.cmdline())]


@pytest.mark.parametrize(
    ("architecture", "size"),
    [("Qwen3ForCausalLM", 2)]
    + [pytest.param(name, size, marks=pytest.mark.slow) for name in ARCHITECTURES for size in (2, 4)],
)
def test_processes_together_say_what_one_says(architecture: str, size: int, tmp_path: Path) -> None:
    model = reference_model(architecture, num_attention_heads=8, num_key_value_heads=4, head_dim=8)
    model.save_pretrained(tmp_path)
    alone = assemble(spec(tmp_path, 1))
    together = assemble(spec(tmp_path, size), pool=SharedPool)
    try:
        for params in (SamplingParams(temperature=0.0), SamplingParams(temperature=0.9, top_p=0.9, seed=7)):
            assert say(together, params) == say(alone, params)
        assert together.layout.tp_size == size
        assert together.model == alone.model
        assert together.budget.num_blocks == alone.budget.num_blocks == 40
        assert together.budget.weights_bytes < alone.budget.weights_bytes
        # Rank r's part of the pool: the blocks that were written are there, side by side with rank 0's.
        memory = together.kv_memory()
        assert memory.nbytes == alone.kv_memory().nbytes
        parts = [bytes(memory[i * together.budget.kv_bytes :][: together.budget.kv_bytes]) for i in range(size)]
        assert len(set(parts)) == size
        assert all(any(part) for part in parts)
    finally:
        together.ranks.close()


def test_a_part_that_is_wrong_is_refused_by_its_rank_and_nobody_is_left(tmp_path: Path) -> None:
    reference_model("LlamaForCausalLM", num_attention_heads=8, num_key_value_heads=4).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.mlp.down_proj.weight"][3, -1] = float("inf")  # in rank 1's columns alone
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, file)
    with pytest.raises(ConfigError, match=r"rank 1: checkpoint: model\.layers\.1\.mlp\.down_proj\.weight has values"):
        assemble(spec(tmp_path, 2))
    assert children() == []


def test_what_cannot_be_split_is_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match=r"tensor_parallel_size is 3: it must divide config\.json's num_attention"):
        assemble(spec(BUILTIN, 3))


def test_the_memory_is_divided_among_the_ranks() -> None:
    with pytest.raises(ConfigError, match=r"not enough memory.*memory     8\.0 MiB"):
        assemble(spec(BUILTIN, 2, memory_bytes=16 << 20, num_blocks=None, max_model_len=2048))
    assert children() == []


def test_a_killed_rank_ends_the_group_idle_or_not() -> None:
    parts = assemble(spec(BUILTIN, 2), pool=SharedPool)
    told = queue.SimpleQueue()
    parts.ranks.watch(lambda lost: told.put((lost, time.monotonic())))
    (pid,) = parts.ranks.pids.values()
    started = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    lost, ended = told.get(timeout=WAIT_S)
    print(f"told after {(ended - started) * 1e3:.0f} ms")
    assert str(lost) == f"rank 1 (pid {pid}) was ended by SIGKILL"
    with pytest.raises(RankLost):
        say(parts, SamplingParams(temperature=0.0))
    parts.ranks.close()
    assert children() == []


def test_a_frozen_rank_does_not_hang_the_leader() -> None:
    options = BackendOptions(device=torch.device("cpu"), dtype="float32", kernels="torch")
    setup = RankSetup(rank=0, size=2, model_path=BUILTIN, backend=options, log_level="INFO", timeout_s=3.0)
    leader = Leader(setup)
    try:
        (pid,) = leader.pids.values()
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(RankLost, match="rank 0 lost the others"):
            leader.group.all_reduce_(torch.ones(4))
    finally:
        leader.close()
    assert children() == []


LEADER = """
import sys
from tests.integration.test_ranks import BUILTIN, assemble, spec
parts = assemble(spec(BUILTIN, 2))
print(*parts.ranks.pids.values(), flush=True)
sys.stdin.read()
"""


def test_nobody_survives_the_leader() -> None:
    leader = subprocess.Popen(
        [sys.executable, "-c", LEADER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    with leader:
        follower = os.pidfd_open(int(leader.stdout.readline()))
        started = time.monotonic()
        leader.kill()
        ended, _, _ = select.select([follower], [], [], WAIT_S)
        print(f"gone after {(time.monotonic() - started) * 1e3:.0f} ms")
        assert ended, "rank 1 outlived rank 0"
        os.close(follower)
