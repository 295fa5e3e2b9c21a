"""An engine is assembled, or refused with the figures."""

import socket
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine import assembly
from engine.assembly import _engine_config, _is_pipelined, assemble
from engine.backends.options import BackendOptions
from engine.distributed.ranks import follower
from engine.distributed.ranks.messages import RankFacts, RankSetup
from engine.distributed.ranks.ranks import RegionLink, SoloRanks
from engine.model.decoder import Decoder
from engine.spec import EngineSpec
from engine.types.config import SpeculationConfig
from tandem.errors import ConfigError
from tandem.model_path import BUILTIN, model_directory
from tests.support.engine.families import FAMILY_CASES
from tests.support.engine.quantized_writers import FORMATS, write_llama
from tests.support.node_processes import group

SPEC = EngineSpec(
    model_path=model_directory(BUILTIN),
    dtype="float32",
    max_model_len=None,
    device="cpu",
    block_size=16,
    num_blocks=8,
    memory_bytes=256 << 20,
    max_batched_tokens=64,
    prefill_chunk_tokens=64,
    max_running_requests=4,
    max_waiting_requests=4,
    eviction="lru",
    max_overtakes=8,
    priority_aging_s=None,
    num_threads=1,
    kernels="torch",
    quantization="none",
    deterministic=False,
    num_workers_here=1,
    secret=b"0123456789abcdef",
)


def test_assembly_step_time_bound_reaches_scheduler() -> None:
    assert _engine_config(SPEC, 64, 8, frozenset(), None).max_step_s is None
    assert _engine_config(replace(SPEC, max_step_s=0.2), 64, 8, frozenset(), None).max_step_s == 0.2


def test_assembly_configured_pool_size_is_used() -> None:
    parts = assemble(SPEC)
    assert parts.facts()["num_blocks"] == parts.runner.kv_cache.num_blocks == 8


def test_assembly_pool_beyond_memory_is_refused_before_allocation() -> None:
    with pytest.raises(ConfigError, match=r"engine\.num_blocks is 100000000; memory holds"):
        assemble(replace(SPEC, num_blocks=100_000_000))


def test_assembly_budget_includes_compiled_grammars() -> None:
    parts = assemble(SPEC)
    assert parts.budget.grammar_bytes == parts.facts()["grammar_bytes"] == SPEC.memory_bytes // 8
    assert any(line.startswith("grammars   32.0 MiB") for line in parts.budget.lines())
    widest = assemble(replace(SPEC, num_blocks=None)).budget
    used = widest.weights_bytes + widest.workspace_bytes + widest.headroom_bytes + widest.kv_bytes
    assert widest.limit_bytes - widest.block_bytes < used + widest.grammar_bytes <= widest.limit_bytes


def test_assembly_memory_beyond_machine_is_refused_before_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a zero too many the out-of-memory killer would choose a victim anywhere on the host."""
    monkeypatch.setattr(assembly, "load_model", lambda *_, **__: pytest.fail("loaded"))
    message = rf"engine\.memory_bytes is {1 << 50} for each worker: .* may take {1 << 50} bytes, and it has \d+ \("
    with pytest.raises(ConfigError, match=message):
        assemble(replace(SPEC, memory_bytes=1 << 50))
    monkeypatch.setattr(assembly, "memory_capacity_bytes", lambda: 700 << 20)
    together = replace(SPEC, memory_here_bytes=3 * (256 << 20))
    message = rf"engine\.memory_bytes is {256 << 20} .* may take {768 << 20} bytes, and it has {700 << 20}"
    with pytest.raises(ConfigError, match=message):
        assemble(together)


def test_assembly_pool_beyond_free_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assembly, "free_memory_bytes", lambda: 100 << 20)
    message = (
        rf"engine\.memory_bytes is {256 << 20}: .*\(\d+ of them for KV\), and {100 << 20} bytes of memory are free"
    )
    with pytest.raises(ConfigError, match=message):
        assemble(replace(SPEC, num_blocks=None))
    assert assemble(SPEC).budget.num_blocks == 8


def test_assembly_smallest_rank_sizes_pool_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    class LimitedRanks(SoloRanks):
        def wait_loaded(self, own: RankFacts) -> RankFacts:
            return replace(own, limit_bytes=160 << 20)

    monkeypatch.setattr(assembly, "open_ranks", lambda *_: LimitedRanks())
    assert assemble(replace(SPEC, memory_bytes=None)).budget.limit_bytes == 160 << 20


def test_assembly_remote_rank_without_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    options = BackendOptions(device=torch.device("cpu"), dtype="float32")
    setup = RankSetup(
        rank=1, size=2, model_path=SPEC.model_path, backend=options, log_level="INFO", timeout_s=1.0, num_nodes=2
    )
    monkeypatch.setattr(follower, "free_memory_bytes", lambda: 200 << 20)
    assert follower._limit_bytes(setup, options.device) == int(0.8 * (200 << 20))
    assert follower._limit_bytes(replace(setup, configured_bytes=128 << 20), options.device) == 128 << 20
    message = rf"engine\.memory_bytes: each rank may take {256 << 20} bytes; one has {200 << 20} bytes of memory free"
    with pytest.raises(ConfigError, match=message):
        follower._limit_bytes(replace(setup, configured_bytes=256 << 20), options.device)


def test_assembly_without_limit_uses_share_of_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assembly, "free_memory_bytes", lambda: 1 << 30)
    alone = assemble(replace(SPEC, memory_bytes=None)).budget.limit_bytes
    shared = assemble(replace(SPEC, memory_bytes=None, num_workers_here=2)).budget.limit_bytes
    assert (alone, shared) == (int(0.8 * (1 << 30)), int(0.8 * (1 << 29)))
    with pytest.raises(ConfigError, match="1073741824 bytes of memory are free"):
        assemble(replace(SPEC, offload_bytes=2 << 30))


def test_assembly_first_node_has_room_for_kv_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assembly, "_workspace_bytes", lambda *_: 1 << 20)
    monkeypatch.setattr(assembly, "open_ranks", lambda *_: SoloRanks())
    here = assemble(replace(SPEC, num_blocks=None)).budget.num_blocks
    spread = assemble(replace(SPEC, num_blocks=None, nodes=group(size=4, num_nodes=4))).budget.num_blocks
    assert spread == here // 4 > 0


def test_assembly_first_node_has_its_own_kv_alone_where_ranks_have_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    class Apart(SoloRanks):
        def __init__(self) -> None:
            super().__init__()
            self.region_links = {1: RegionLink(sock=socket.socket())}

    apart = Apart()
    monkeypatch.setattr(assembly, "_workspace_bytes", lambda *_: 1 << 20)
    monkeypatch.setattr(assembly, "open_ranks", lambda *_: SoloRanks())
    here = assemble(replace(SPEC, num_blocks=None)).budget.num_blocks
    monkeypatch.setattr(assembly, "open_ranks", lambda *_: apart)
    spread = assemble(replace(SPEC, num_blocks=None, nodes=group(size=4, num_nodes=4))).budget.num_blocks
    apart.region_links[1].sock.close()
    assert spread == here > 0


def test_assembly_context_beyond_models_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_model_len is 4096; the model's own context is 2048"):
        assemble(replace(SPEC, max_model_len=4096))


@pytest.mark.parametrize("wish", [{"deterministic": True}, {"quantization": "int8"}, {"quantization": "fp8"}])
def test_assembly_unsupported_by_torch_backend_is_refused_by_name(wish: dict[str, object]) -> None:
    (field,) = wish
    with pytest.raises(ConfigError, match=rf"engine\.{field} needs compiled kernels.*engine\.kernels is torch"):
        assemble(replace(SPEC, **wish))


def test_assembly_quantized_checkpoint_takes_the_memory_of_restored_weights(tmp_path: Path) -> None:
    write_llama(tmp_path, FORMATS["gptq-4"])
    quantized, dense = (
        assemble(replace(SPEC, model_path=tmp_path / kind, num_blocks=8, max_model_len=None))
        for kind in ("quantized", "dense")
    )
    assert quantized.budget.weights_bytes == dense.budget.weights_bytes == dense.runner.model.weights_bytes
    assert quantized.facts()["weight_format"] == "GPTQ, 4 bits, groups of 32"
    assert "weight_format" not in dense.facts()


def test_assembly_workspace_is_measured_from_largest_steps() -> None:
    small = assemble(SPEC).budget.workspace_bytes
    large = assemble(replace(SPEC, max_batched_tokens=4096, prefill_chunk_tokens=1024)).budget.workspace_bytes
    assert 0 < small < large < 256 << 20


def test_assembly_pipelines_on_request_but_not_over_ranks(caplog: pytest.LogCaptureFixture) -> None:
    assert not assemble(SPEC).is_pipelined
    assert assemble(replace(SPEC, pipelined="on")).is_pipelined
    cuda = torch.device("cuda")
    assert _is_pipelined(replace(SPEC, pipelined="auto"), cuda)
    assert not _is_pipelined(replace(SPEC, pipelined="off"), cuda)
    with caplog.at_level("INFO"):
        assert not _is_pipelined(replace(SPEC, pipelined="on", tensor_parallel_size=2), cuda)
    assert "several ranks" in caplog.text


def test_assembly_model_of_nan_still_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its requests fail one by one; the dry run samples nothing."""
    logits = Decoder.logits
    monkeypatch.setattr(Decoder, "logits", lambda self, hidden: logits(self, hidden) * float("nan"))
    assert assemble(SPEC).budget.workspace_bytes > 0


def test_assembly_speculation_reaches_scheduler_and_makes_room_for_its_rows(caplog: pytest.LogCaptureFixture) -> None:
    drafts = SpeculationConfig(sources=("lookup",), max_draft_tokens=6, adaptive=True)
    assert (SPEC.max_step_rows, replace(SPEC, speculation=drafts).max_step_rows) == (4, 4 + 4 * 6)
    assert replace(SPEC, speculation=drafts, max_running_requests=100).max_step_rows == 100 + 16 * 6
    assert assemble(SPEC).scheduler._speculation is None
    assert assemble(replace(SPEC, speculation=drafts)).scheduler._speculation is not None
    assert _is_pipelined(replace(SPEC, pipelined="on"), torch.device("cpu"))
    with caplog.at_level("INFO"):
        assert not _is_pipelined(replace(SPEC, pipelined="on", speculation=drafts), torch.device("cpu"))
    assert "not pipelined with speculation" in caplog.text


@pytest.mark.parametrize(("num_blocks", "max_model_len", "needed"), [(3, None, 2), (20, 128, 128)])
def test_assembly_pool_without_room_for_windows_is_refused(
    num_blocks: int, max_model_len: int | None, needed: int, tmp_path: Path
) -> None:
    (case,) = (case for case in FAMILY_CASES if case.name == "gemma3")
    case.save(case.model(), tmp_path)
    spec = replace(SPEC, model_path=tmp_path, windowed_layers="apart")
    with pytest.raises(ConfigError, match=rf"engine\.num_blocks is {num_blocks}: .* of {needed} tokens takes"):
        assemble(replace(spec, num_blocks=num_blocks, max_model_len=max_model_len))
