"""The CUDA backend in Triton's interpreter, on CPU tensors: the torch backend's tokens in float32, in every mode."""

import random
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from tests.unit.engine.kernels.triton_interpreter import interpreted  # isort: skip
from engine.backends.cuda.attention import CudaAttention, StepLayout, upload
from engine.backends.cuda.backend import CudaBackend
from engine.backends.cuda.graphs import CudaStepGraphs, graph_batch_sizes, graph_chunk_sizes
from engine.backends.options import BackendOptions
from engine.kernels.triton import flash_decode
from engine.kernels.triton.tuning import LaunchTable, load_table
from engine.model.backend import ProjectionRole
from engine.model.config import parse_model_config
from engine.model.loader import load_model
from engine.runner.step_input_builder import build_step_inputs
from engine.types.request import Batch, BatchItem
from tandem.errors import ConfigError
from tandem.values.sampling import SamplingParams
from tests.support.engine.families import FAMILY_CASES
from tests.support.engine.paged_harness import Session, random_tokens, reference_logits, reference_model, save_and_load

__all__ = ["interpreted"]

CPU = torch.device("cpu")


def backend(**options):
    return CudaBackend(BackendOptions(device=CPU, num_threads=1, **{"dtype": "float32", **options}))


@pytest.fixture(scope="module", params=["MistralForCausalLM", "Qwen3ForCausalLM"])
def case(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param)
    is_qwen = request.param == "Qwen3ForCausalLM"
    own = {"tie_word_embeddings": True} if is_qwen else {"sliding_window": 12, "num_attention_heads": 6}
    reference = reference_model(request.param, num_hidden_layers=2, **own)
    return reference, path, save_and_load(reference, path)


def test_cuda_backend_logits_equal_transformers(case):
    reference, path, _ = case
    model = load_model(path, backend=backend())
    tokens = random_tokens(random.Random(0), 24)
    expected = reference_logits(reference, tokens)
    for cuts in ([24], [13, 7, 1, 3]):
        session = Session(model, block_size=16)
        request = session.request(tokens)
        ours = torch.cat([session.logits(request, n) for n in cuts])
        assert (ours - expected).abs().max() < 1e-4


@pytest.mark.in_turns
@pytest.mark.parametrize("family", FAMILY_CASES, ids=lambda family: family.name)
def test_cuda_backend_families_equal_transformers(family, tmp_path):
    reference = family.model(num_hidden_layers=2 if family.layers is None else family.layers)
    family.save(reference, tmp_path)
    tokens = random_tokens(random.Random(0), 24)
    expected = reference_logits(reference, tokens)
    session = Session(load_model(tmp_path, backend=backend()), block_size=16)
    request = session.request(tokens)
    ours = torch.cat([session.logits(request, n) for n in (13, 7, 1, 3)])
    assert (ours - expected).abs().max() < 1e-4


@pytest.mark.in_turns
@pytest.mark.parametrize("deterministic", [False, True])
def test_cuda_backend_tokens_equal_torch_in_any_batch(case, deterministic):
    """Greedy and sampled, in mixed batches of chunks and single rows."""
    _, path, plain = case
    answers = []
    for model in (plain, load_model(path, backend=backend(deterministic=deterministic))):
        session = Session(model, num_blocks=40, block_size=16)
        params = [SamplingParams(temperature=t, top_k=20, top_p=0.9, seed=9) for t in (0.0, 0.8, 1.0)]
        requests = [session.request(random_tokens(random.Random(i), 5 + 9 * i), p) for i, p in enumerate(params)]
        session.run(requests, 6, chunk=9, rng=random.Random(1))
        answers.append([list(r.token_ids) for r in requests])
    assert answers[0] == answers[1]


def test_cuda_backend_deterministic_mode_is_bitwise_reproducible(case):
    """Logits and KV of a token are the same for any chunks: decoded KV equals recomputed KV."""
    _, path, _ = case
    model = load_model(path, backend=backend(deterministic=True))
    assert model.backend.name == "triton-deterministic"
    tokens = random_tokens(random.Random(2), 20)
    seen = []
    for cuts in ([20], [9, 1, 1, 9]):
        session = Session(model, block_size=16)
        request = session.request(tokens)
        logits = torch.cat([session.logits(request, n) for n in cuts])
        blocks = torch.tensor(list(request.block_table.ids))
        seen.append((logits, session.cache.tensor[:, blocks].clone()))
    assert torch.equal(seen[0][0], seen[1][0])
    assert torch.equal(seen[0][1], seen[1][1])


class EagerRecorder:
    """Stands in for CUDA graphs: repeats the work into the same memory, as they do."""

    def __init__(self):
        self.replays = 0

    def record(self, work):
        work()

        def replay():
            self.replays += 1
            work()

        return replay


def decoding(session, requests):
    items = tuple(BatchItem(request=r, start=r.num_tokens - 1, num_tokens=1, samples=True) for r in requests)
    return build_step_inputs(Batch(items=items), session.cache.block_size)


def replayed(graphs, inputs):
    """Token ids come from the device, not from the host's view; rows in the batch's order."""
    token_ids = torch.from_numpy(inputs.token_ids.copy())
    inputs.token_ids[:] = 0
    return graphs.logits(inputs, token_ids, torch.from_numpy(inputs.sample_rows))


@pytest.mark.parametrize("least_uneven", [16, 512])
@torch.inference_mode()
def test_cuda_graph_padded_replay_equals_eager_step(case, least_uneven, monkeypatch):
    monkeypatch.setattr(flash_decode, "_LEAST_UNEVEN_KEYS", least_uneven)
    _, path, _ = case
    model = load_model(path, backend=backend())
    session = Session(model, num_blocks=40, block_size=16)
    requests = [session.request(random_tokens(random.Random(i), 4 + 9 * i)) for i in range(3)]
    session.step([(r, r.num_tokens) for r in requests])
    recorder = EagerRecorder()
    attention = CudaAttention(model.attention_spec, session.cache, model.backend._table)
    before = session.cache.tensor.clone()
    graphs = CudaStepGraphs(model, attention, recorder, batch_sizes=(1, 4), max_length=64, block_size=16)
    assert replayed(graphs, decoding(session, requests)) is None  # nothing captured yet
    graphs.capture()
    assert torch.equal(session.cache.tensor, before)
    for company, uneven in ((requests, True), (requests[:1], False), (requests[1:], False)):
        inputs = decoding(session, company)
        assert graphs._graph_of(inputs, True).cut.num_splits == (0 if uneven and least_uneven == 16 else 1)
        before = session.cache.tensor.clone()
        expected = session.runner.compute(inputs).clone()
        kv = session.cache.tensor.clone()
        session.cache.tensor.copy_(before)
        logits = replayed(graphs, inputs)
        torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(session.cache.tensor, kv, atol=1e-5, rtol=1e-5)
    assert recorder.replays == 3
    ids = torch.zeros(3, dtype=torch.int64)
    places = [graphs.logits(decoding(session, requests[:n]), ids[:n], None).data_ptr() for n in (1, 3)]
    assert places[0] == places[1], "graphs of all sizes take the memory of the largest"
    many = decoding(session, [requests[0]] * 5)
    assert replayed(graphs, many) is None
    chunk = Batch(items=(BatchItem(request=requests[1], start=0, num_tokens=3, samples=False),))
    assert replayed(graphs, build_step_inputs(chunk, 16)) is None


def test_cuda_graph_in_deterministic_mode_has_room_for_some_runs_of_keys(case):
    """Of 512 keys, the first of each sequence not counted; a step with more is launched."""
    _, path, _ = case
    model = load_model(path, backend=backend(deterministic=True))
    session = Session(model, num_blocks=160, block_size=16)
    attention = CudaAttention(model.attention_spec, session.cache, model.backend._table, deterministic=True)
    assert attention.further_runs(np.array([1, 512, 513, 1025])) == 3
    assert attention.most_further_runs(2, 512) == 0
    assert attention.most_further_runs(2, 1025) == 4
    assert attention.most_further_runs(4, 1025) == 5, "those for which the pool has room"
    graphs = CudaStepGraphs(model, attention, EagerRecorder(), batch_sizes=(4,), max_length=1025, block_size=16)
    with torch.inference_mode():
        graphs.capture()
    requests = [session.request([1] * 20) for _ in range(4)]
    inputs = decoding(session, requests)
    for lengths, is_recorded in (([1024] * 4, True), ([1025, 1025, 513, 1], True), ([1025, 1025, 1025, 1], False)):
        inputs.starts[:] = np.array(lengths) - 1
        assert list(inputs.lengths) == lengths
        assert (graphs._graph_of(inputs, True) is not None) == is_recorded


@pytest.mark.in_turns
@pytest.mark.parametrize("deterministic", [False, True])
@torch.inference_mode()
def test_cuda_graph_of_chunks_equals_eager_step(case, deterministic):
    """Decodes, chunks and whole prompts in random company, with fewer rows and sequences than there is room for."""
    _, path, _ = case
    model = load_model(path, backend=backend(deterministic=deterministic))
    session = Session(model, num_blocks=60, block_size=16)
    rng = random.Random(5)
    decoded = [session.request(random_tokens(rng, 4 + 9 * i)) for i in range(3)]
    session.step([(r, r.num_tokens) for r in decoded])
    prompts = [session.request(random_tokens(rng, 40)) for _ in range(3)]
    session.step([(prompts[0], 17)])
    recorder = EagerRecorder()
    table = model.backend._table
    attention = CudaAttention(model.attention_spec, session.cache, table, deterministic=deterministic)
    graphs = CudaStepGraphs(
        model, attention, recorder, batch_sizes=(4,), chunk_sizes=(8, 24), max_length=64, block_size=16
    )
    before = session.cache.tensor.clone()
    graphs.capture()
    assert torch.equal(session.cache.tensor, before)
    company = (
        [(decoded[0], 1), (decoded[1], 1), (prompts[0], 5)],
        [(prompts[1], 3), (decoded[2], 1), (prompts[0], 2), (prompts[2], 13), (decoded[0], 1)],
        [(prompts[2], 24)],
    )
    for spans in company:
        items = tuple(
            BatchItem(
                request=r, start=r.num_tokens - 1 if n == 1 else r.num_computed_tokens, num_tokens=n, samples=True
            )
            for r, n in spans
        )
        inputs = build_step_inputs(Batch(items=items), 16)
        before = session.cache.tensor.clone()
        expected = session.runner.compute(inputs).clone()
        kv = session.cache.tensor.clone()
        session.cache.tensor.copy_(before)
        logits = replayed(graphs, inputs)
        if deterministic:
            assert torch.equal(logits, expected)
            assert torch.equal(session.cache.tensor, kv)
        torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(session.cache.tensor, kv, atol=1e-5, rtol=1e-5)
    assert recorder.replays == len(company)
    large = Batch(items=(BatchItem(request=prompts[1], start=0, num_tokens=25, samples=True),))
    assert replayed(graphs, build_step_inputs(large, 16)) is None
    crowd = [(prompts[1], 2)] * 5  # more sequences with several rows than the largest batch
    items = tuple(BatchItem(request=r, start=0, num_tokens=n, samples=True) for r, n in crowd)
    assert replayed(graphs, build_step_inputs(Batch(items=items), 16)) is None


def test_cuda_graph_packed_step_matches_inputs(case):
    _, _, plain = case
    session = Session(plain, num_blocks=40, block_size=4)
    requests = [session.request(random_tokens(random.Random(i), 11), capacity=12) for i in range(3)]
    spans = ((10, 1), (2, 5), (0, 3))
    items = tuple(
        BatchItem(request=r, start=start, num_tokens=count, samples=False)
        for r, (start, count) in zip(requests, spans, strict=True)
    )
    inputs = build_step_inputs(Batch(items=items), 4)
    layout = StepLayout(num_rows=12, num_single=2, num_several=3)
    assert layout.holds(inputs)
    step = layout.views(*upload(inputs, layout, CPU))
    assert step.slots.tolist() == [*inputs.slots.tolist(), -1, -1, -1]
    assert step.token_ids.tolist() == [*inputs.token_ids.tolist(), 0, 0, 0]
    assert step.positions.tolist() == [*inputs.positions.tolist(), 0, 0, 0]
    assert step.lengths.tolist() == [11, 0]
    assert step.starts.tolist() == [2, 0, 0]
    assert step.row_starts.tolist() == [1, 6, 9, 9]
    assert step.tables.tolist() == inputs.tables.tolist()


def llama_of(**sizes):
    raw = {"architectures": ["LlamaForCausalLM"], "vocab_size": 100, "num_hidden_layers": 2, **sizes}
    return parse_model_config({**raw, "num_attention_heads": 32, "num_key_value_heads": 8}, {})


def test_graph_chunk_sizes_bound_padding():
    small = llama_of(hidden_size=2048, intermediate_size=8192)
    assert graph_chunk_sizes(20, small) == (20,)
    assert graph_chunk_sizes(100, small) == (32, 64, 96, 100)
    sizes = graph_chunk_sizes(8192, small)
    assert sizes[-1] == 1024
    assert all(later - earlier <= max(32, later / 2.9) for earlier, later in pairwise(sizes))
    large = llama_of(hidden_size=4096, intermediate_size=14_336)
    assert graph_chunk_sizes(8192, large)[-1] < 300 < graph_chunk_sizes(8192, small)[-1]


def test_graph_batch_sizes_bound_padding():
    assert graph_batch_sizes(1) == (1,)
    assert graph_batch_sizes(20) == (1, 2, 4, 8, 16, 20)
    sizes = graph_batch_sizes(256)
    assert sizes[-1] == 256
    assert all(later - earlier <= max(8, later // 3) for earlier, later in pairwise(sizes[3:]))


@pytest.mark.parametrize("rows", [1, 5, 17])
@pytest.mark.parametrize("with_one_row", [False, True])
def test_cuda_products_of_few_rows_equal_library(rows, with_one_row, monkeypatch):
    """Our kernels for few rows, which the closing projection adds to the residual, and the library for more."""
    tiles = {"least_features": 1, "features": 4096, "block_n": 32, "block_k": 32, "num_warps": 4}
    few = {**tiles, "num_stages": 2}
    own = {"few_rows": [{**few, "num_splits": 2}, {**few, "gated": True}]}
    if with_one_row:
        own["one_row"] = [tiles, {**tiles, "gated": True}]
    table = LaunchTable(load_table("").as_json() | own)
    monkeypatch.setattr("engine.backends.cuda.backend.load_table", lambda gpu: table)
    ours = backend(dtype="float16")
    torch.manual_seed(rows)
    x, weight, bias = torch.randn(rows, 64).half(), torch.randn(96, 64).half() / 8, torch.randn(96).half()
    expected = F.linear(x.float(), weight.float(), bias.float())
    close = {"atol": 1e-2, "rtol": 1e-2}
    # The second projection needs more memory for its parts than the first.
    first, head = ours.projection(weight[:32], bias[:32], ProjectionRole.QKV), ours.head(weight)
    torch.testing.assert_close(first(x).float(), expected[:, :32], **close)
    assert head(x).dtype == torch.float32
    torch.testing.assert_close(head(x), expected - bias.float(), **close)
    residual = torch.randn(rows, 96).half()
    added = residual.float() + expected
    delta = ours.closing(weight, bias, ProjectionRole.OUTPUT)(x, residual)
    assert (delta is None) == (rows <= 16)
    torch.testing.assert_close((residual if delta is None else residual + delta).float(), added, **close)
    gate, up = F.linear(x.float(), weight.float()).chunk(2, 1)
    torch.testing.assert_close(ours.gated(weight, None)(x).float(), F.silu(gate) * up, **close)
    gate, up = expected.chunk(2, 1)
    torch.testing.assert_close(ours.gated(weight, bias)(x).float(), F.silu(gate) * up, **close)


@pytest.mark.parametrize("quantization", ["fp8", "nf4", "int3"])
def test_cuda_backend_quantization_of_cpu_kernels_is_refused(quantization):
    with pytest.raises(ConfigError, match=rf"engine\.quantization '{quantization}' is not made by the GPU kernels"):
        backend(quantization=quantization)
