"""An engine sharded over several processes: the same tokens, and an end as soon as one of them ends."""

import os
import queue
import random
import select
import signal
import subprocess
import sys
import time
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.assembly import EngineParts, assemble
from engine.backends.options import BackendOptions
from engine.distributed.links.channel import ChannelKind, RankChannel
from engine.distributed.links.lost import RankLost
from engine.distributed.ranks import leader as leading
from engine.distributed.ranks.leader import Leader
from engine.distributed.ranks.messages import RankSetup
from engine.distributed.ranks.processes import RANK_MODULE
from engine.kv_cache.tiers.costs import MeasuredRates
from engine.spec import EngineSpec
from engine.types.block_table import BlockTable
from engine.types.prompt_logprobs import PromptScoringState
from engine.types.request import Batch, BatchItem, Request, SampledToken
from kv_transfer.memory.shared_memory import SharedPool
from tandem.errors import ConfigError
from tandem.model_path import model_directory
from tandem.values.ids import BlockHash, BlockId, RequestId, TransferId
from tandem.values.sampling import SamplingParams
from tests.support.engine.paged_harness import ARCHITECTURES, reference_model

BUILTIN = model_directory("builtin")
WAIT_S = 20.0
OUTPUT = 12
ODD = SamplingParams(
    temperature=1.1,
    top_k=30,
    min_p=0.02,
    repetition_penalty=1.3,
    presence_penalty=0.4,
    frequency_penalty=0.3,
    logit_bias={7: 2.5, 11: -3.0},
    seed=-4,
)
"""Everything that can be asked of a draw."""


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


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process stands for a worker; it must not be ended because a test is slow to close its ranks."""
    monkeypatch.setattr(leading, "_EXIT_S", 120.0)


def generate(parts: EngineParts, params: SamplingParams) -> list[list[int]]:
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


def run_step(parts: EngineParts, requests: list[Request]) -> list[SampledToken]:
    items = []
    for request in requests:
        count = min(32, request.num_uncomputed_tokens)
        samples = request.num_computed_tokens + count == request.num_tokens
        items.append(BatchItem(request=request, start=request.num_computed_tokens, num_tokens=count, samples=samples))
    tokens = parts.runner.execute(Batch(items=tuple(items)))
    sampled = iter(tokens)
    for item in items:
        item.request.num_computed_tokens += item.num_tokens
        if item.samples:
            item.request.token_ids.append(next(sampled).token_id)
    return list(tokens)


def say_with_logprobs(parts: EngineParts) -> Iterator[SampledToken]:
    """One continuation with logprobs, step by step."""
    request = Request(
        request_id=RequestId("logprobs"),
        token_ids=array("i", range(3, 40)),
        num_prompt_tokens=37,
        params=ODD._replace(num_logprobs=3),
        hash_root=BlockHash(b""),
        block_table=BlockTable([BlockId(i) for i in range(8)]),
    )
    while request.num_output_tokens < OUTPUT:
        yield from run_step(parts, [request])


def read_prompt(parts: EngineParts) -> tuple[list[float], list[int], list[float]]:
    """What is scored of a prompt in two chunks: log probabilities, the most likely tokens, the mean hidden state."""
    scorings = [PromptScoringState(num_prompt_tokens=37, num_top=num_top) for num_top in (3, None)]
    requests = [request_of(range(3, 40), f"scored {i}") for i in range(2)]
    for i, (request, scoring) in enumerate(zip(requests, scorings, strict=True)):
        request.scoring = scoring
        request.block_table.extend(BlockId(8 * i + j) for j in range(8))
    while any(request.num_output_tokens < 1 for request in requests):
        run_step(parts, requests)
    return [*scorings[0].logprobs, *scorings[0].top_logprobs], list(scorings[0].top_ids), scorings[1].vector()


def compare_logprobs(ours, expected) -> None:
    """The same tokens; ranks sum in another order, so log probabilities are only close."""
    for one, other in zip(ours, expected, strict=True):
        assert one.token_id == other.token_id
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert [top.token_id for top in one.top_logprobs] == [top.token_id for top in other.top_logprobs]
        values = [top.logprob for top in other.top_logprobs]
        assert [top.logprob for top in one.top_logprobs] == pytest.approx(values, abs=1e-4)


def test_step_is_sent_to_ranks_in_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = assemble(spec(BUILTIN, 2))
    sent: list[ChannelKind] = []
    send = RankChannel.send

    def counted(self: RankChannel, kind: ChannelKind, payload: bytes = b"", *, fd: int | None = None) -> None:
        sent.append(kind)
        send(self, kind, payload, fd=fd)

    steps = []
    execute = parts.runner.execute
    monkeypatch.setattr(RankChannel, "send", counted)
    monkeypatch.setattr(parts.runner, "execute", lambda batch: steps.append(batch) or execute(batch))
    try:
        generate(parts, ODD)
        assert len(steps) >= OUTPUT
        assert sent == [ChannelKind.STEP] * len(steps)
    finally:
        parts.ranks.close()


def children() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if RANK_MODULE in " ".join(child.cmdline())]


@pytest.mark.parametrize(
    ("architecture", "size"),
    [("Qwen3ForCausalLM", 2)]
    + [pytest.param(name, size, marks=pytest.mark.slow) for name in ARCHITECTURES for size in (2, 4)],
)
def test_rank_group_tokens_equal_single_process(architecture: str, size: int, tmp_path: Path) -> None:
    model = reference_model(architecture, num_attention_heads=8, num_key_value_heads=4, head_dim=8)
    model.save_pretrained(tmp_path)
    alone = assemble(spec(tmp_path, 1))
    together = assemble(spec(tmp_path, size), pool=SharedPool)
    try:
        for params in (SamplingParams(temperature=0.0), SamplingParams(temperature=0.9, top_p=0.9, seed=7), ODD):
            assert generate(together, params) == generate(alone, params)
        compare_logprobs(say_with_logprobs(together), say_with_logprobs(alone))
        for ours, expected in zip(read_prompt(together), read_prompt(alone), strict=True):
            assert len(expected) > 0
            assert ours == pytest.approx(expected, abs=1e-4)
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


def test_ranks_offload_and_restore_their_parts_of_preempted_kv(tmp_path: Path) -> None:
    model = reference_model("Qwen3ForCausalLM", num_attention_heads=8, num_key_value_heads=4, head_dim=8)
    model.save_pretrained(tmp_path)
    alone = serve_all(assemble(spec(tmp_path, 1)))
    together = assemble(spec(tmp_path, 2, num_blocks=11, offload_bytes=1 << 20))
    try:
        offloading = together.scheduler.offloading
        assert offloading is not None
        offloading.rates = MeasuredRates(prefill_tokens_per_s=1.0, offload_bytes_per_s=1e12, load_bytes_per_s=1e12)
        assert serve_all(together) == alone
        assert together.facts()["offload_bytes"] > 0
    finally:
        together.ranks.close()


def test_ranks_keep_their_parts_of_evicted_blocks(tmp_path: Path) -> None:
    model = reference_model("Qwen3ForCausalLM", num_attention_heads=8, num_key_value_heads=4, head_dim=8)
    model.save_pretrained(tmp_path)
    alone = serve_all(assemble(spec(tmp_path, 1)))
    with pytest.raises(ConfigError, match="blocks on disk are for one rank"):
        assemble(spec(tmp_path, 2, host_cache_bytes=1 << 20, disk_cache_bytes=1 << 20, disk_cache_path=tmp_path))
    together = assemble(spec(tmp_path, 2, num_blocks=11, host_cache_bytes=1 << 20))
    try:
        tiers = together.scheduler.tiers
        assert tiers is not None
        tiers.costs.rates = MeasuredRates(prefill_tokens_per_s=1.0, offload_bytes_per_s=1e12, load_bytes_per_s=1e12)
        assert [serve_all(together) for _ in range(2)] == [alone, alone]
        assert tiers.counts()[0].hits > 0
        # Between steps nobody can tell the other ranks to save: what a hand-off overwrites is lost, and counted.
        other_request = request_of(range(3, 93), "stranger")
        together.scheduler.reservations.reserve(TransferId("t"), other_request)
        before = tiers.counts()[0]
        together.scheduler.reservations.bind(TransferId("t"))
        after = tiers.counts()[0]
        assert (after.stores, after.num_blocks) == (before.stores, before.num_blocks)
        assert after.dropped > before.dropped
        together.scheduler.reservations.cancel(TransferId("t"))
        together.scheduler.check_invariants()
    finally:
        together.ranks.close()


def request_of(tokens: Iterable[int], name: str) -> Request:
    ids = array("i", tokens)
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    return Request(
        request_id=RequestId(name),
        token_ids=ids,
        num_prompt_tokens=len(ids),
        params=params,
        hash_root=BlockHash(b"root"),
    )


def serve_all(parts: EngineParts) -> list[list[int]]:
    """Answers of four requests; with a host tier, some of them must have been offloaded and restored."""
    requests = []
    for i in range(4):
        prompt = array("i", [(13 * i + 5 * k) % 90 + 3 for k in range(20 + 9 * i)])
        requests.append(
            Request(
                request_id=RequestId(str(i)),
                token_ids=prompt,
                num_prompt_tokens=len(prompt),
                params=SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True),
                hash_root=BlockHash(b"root"),
                arrival_s=float(i),
            )
        )
        parts.scheduler.add(requests[-1])
    num_saved = num_loaded = 0
    while (batch := parts.scheduler.schedule(0.0)) is not None:
        num_saved += len(batch.offloads)
        num_loaded += len(batch.loads)
        parts.scheduler.commit(batch, parts.runner.execute(batch))
    if parts.scheduler.offloading is not None:
        assert num_saved >= num_loaded > 0
    return [list(request.token_ids[request.num_prompt_tokens :]) for request in requests]


def test_invalid_shard_is_refused_by_its_rank_and_all_ranks_end(tmp_path: Path) -> None:
    reference_model("LlamaForCausalLM", num_attention_heads=8, num_key_value_heads=4).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.mlp.down_proj.weight"][3, -1] = float("inf")  # in rank 1's columns alone
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, file)
    with pytest.raises(ConfigError, match=r"rank 1: checkpoint: model\.layers\.1\.mlp\.down_proj\.weight has values"):
        assemble(spec(tmp_path, 2))
    assert children() == []


def test_indivisible_model_is_refused_before_ranks_start() -> None:
    with pytest.raises(ConfigError, match=r"tensor_parallel_size is 3: it must divide config\.json's num_attention"):
        assemble(spec(BUILTIN, 3))


def test_memory_limit_is_divided_among_ranks() -> None:
    with pytest.raises(ConfigError, match=r"not enough memory.*\(memory 8\.0 MiB"):
        assemble(spec(BUILTIN, 2, memory_bytes=16 << 20, num_blocks=None, max_model_len=2048))
    assert children() == []


def test_killed_rank_ends_group() -> None:
    parts = assemble(spec(BUILTIN, 2), pool=SharedPool)
    losses = queue.SimpleQueue()
    parts.ranks.watch(lambda lost: losses.put((lost, time.monotonic())))
    (pid,) = parts.ranks.pids.values()
    started = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    lost, ended = losses.get(timeout=WAIT_S)
    print(f"told after {(ended - started) * 1e3:.0f} ms")
    assert str(lost) == f"rank 1 (pid {pid}) was ended by SIGKILL"
    with pytest.raises(RankLost):
        generate(parts, SamplingParams(temperature=0.0))
    parts.ranks.close()
    assert children() == []


def test_frozen_rank_does_not_hang_leader() -> None:
    options = BackendOptions(device=torch.device("cpu"), dtype="float32", kernels="torch")
    setup = RankSetup(rank=0, size=2, model_path=BUILTIN, backend=options, log_level="INFO", timeout_s=3.0)
    leader = Leader(setup)
    try:
        (pid,) = leader.pids.values()
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(RankLost, match="rank 0 lost the other ranks"):
            leader.group.all_reduce_(torch.ones(4))
    finally:
        leader.close()
    assert children() == []


LEADER = """
import sys
from tests.integration.engine.test_ranks import BUILTIN, assemble, spec
parts = assemble(spec(BUILTIN, 2))
print(*parts.ranks.pids.values(), flush=True)
sys.stdin.read()
"""


def test_ranks_end_with_killed_leader() -> None:
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
