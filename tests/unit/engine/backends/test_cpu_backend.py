"""The compiled backend against transformers and plain torch: same tokens in float32, in every batch and chunk."""

import random

import pytest
import torch

from engine.backends.options import BackendOptions
from engine.backends.select import select_backend
from engine.kernels.cpu.gemm import Arithmetic
from engine.model.loader import load_model
from tandem.errors import ConfigError
from tests.support.engine.paged_harness import (
    ARCHITECTURES,
    Session,
    load_plain,
    needs,
    random_tokens,
    reference_logits,
    reference_model,
    save_and_load,
)

CPU = torch.device("cpu")


def backend(**options):
    return select_backend(BackendOptions(device=CPU, num_threads=1, **{"dtype": "float32", **options}))


@pytest.fixture(scope="module", params=ARCHITECTURES)
def case(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param)
    window = {"sliding_window": 12} if request.param == "MistralForCausalLM" else {}
    reference = reference_model(request.param, tie_word_embeddings=request.param == "Qwen3ForCausalLM", **window)
    return reference, path, save_and_load(reference, path)


def test_cpu_backend_logits_equal_transformers(case):
    reference, path, _ = case
    model = load_model(path, backend=backend())
    assert model.backend.name == "cpu-vectors"
    tokens = random_tokens(random.Random(0), 40)
    expected = reference_logits(reference, tokens)
    for cuts in ([40], [13, 7, 1, 19], [1] * 40):
        session = Session(model, block_size=16)
        request = session.request(tokens)
        ours = torch.cat([session.logits(request, n) for n in cuts])
        assert (ours - expected).abs().max() < 1e-4


def test_cpu_backend_tokens_equal_torch_in_any_batch(case):
    _, path, plain = case
    answers = []
    for model in (plain, load_model(path, backend=backend())):
        session = Session(model, num_blocks=80, block_size=16)
        requests = [session.request(random_tokens(random.Random(i), 5 + 7 * i)) for i in range(6)]
        session.run(requests, 24, chunk=9, rng=random.Random(1))
        answers.append([list(r.token_ids) for r in requests])
    assert answers[0] == answers[1]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_cpu_backend_deterministic_mode_is_bitwise_reproducible(case, dtype):
    """KV and logits of a token are the same for every chunking and every batch."""
    _, path, _ = case
    model = load_model(path, backend=backend(dtype=dtype, deterministic=True))
    rng = random.Random(2)
    tokens = random_tokens(rng, 45)
    seen = []
    for cuts in ([45], [1] * 45, [17, 1, 1, 20, 6]):
        session = Session(model, num_blocks=64, block_size=16)
        request = session.request(tokens)
        ours = torch.cat([session.logits(request, n) for n in cuts])
        seen.append((ours, kv_of(session, request)))
    session = Session(model, num_blocks=64, block_size=16)
    request = session.request(tokens)
    company = [session.request(random_tokens(rng, 70)) for _ in range(5)]
    while request.num_computed_tokens < len(tokens):
        work = [(r, min(rng.randint(1, 9), r.num_uncomputed_tokens)) for r in company if r.num_uncomputed_tokens]
        session.step([*work, (request, min(rng.randint(1, 9), len(tokens) - request.num_computed_tokens))])
    seen.append((seen[0][0], kv_of(session, request)))
    for logits, kv in seen[1:]:
        assert torch.equal(logits, seen[0][0])
        assert torch.equal(kv, seen[0][1])


def kv_of(session, request):
    """Keys and values of the request's first 45 tokens, whatever blocks they lie in."""
    blocks = torch.tensor(list(request.block_table)[:3])
    kv = session.cache.tensor[:, blocks]  # [layers, blocks, 2, heads, 16, head_dim]
    return kv.permute(0, 2, 3, 1, 4, 5).flatten(3, 4)[:, :, :, :45].clone()


def test_cpu_backend_bfloat16_stays_close_to_float32(case):
    reference, path, _ = case
    tokens = random_tokens(random.Random(3), 40)
    expected = reference_logits(reference, tokens)
    spread = expected.std()
    plain = error_of(load_plain(path, dtype="bfloat16"), tokens, expected) / spread
    ours = error_of(load_model(path, backend=backend(dtype="bfloat16")), tokens, expected) / spread
    assert ours < max(1.2 * plain, 0.05)  # fewer roundings than the torch operators make


@pytest.mark.parametrize(("quantization", "bound"), [("int8", 0.25), ("int4", 0.5), ("fp8", 0.3), ("nf4", 0.5)])
def test_cpu_backend_quantization_error_is_small(case, quantization, bound):
    needs(Arithmetic.INT8_VECTORS)
    reference, path, _ = case
    tokens = random_tokens(random.Random(3), 40)
    expected = reference_logits(reference, tokens)
    model = load_model(path, backend=backend(dtype="bfloat16", quantization=quantization))
    whole = load_model(path, backend=backend(dtype="bfloat16"))
    assert model.layers[0].down.nbytes < whole.layers[0].down.nbytes
    assert model.head.nbytes < 0.6 * whole.head.nbytes
    assert error_of(model, tokens, expected) < bound * expected.std()


def error_of(model, tokens, expected):
    """Root mean square difference of the logits."""
    session = Session(model, block_size=16)
    return (session.logits(session.request(tokens), len(tokens)) - expected).square().mean().sqrt()


def test_cpu_backend_nan_request_leaves_no_nan_in_cache(case):
    _, path, _ = case
    model = load_model(path, backend=backend())
    session = Session(model, block_size=16)
    model.layers[0].attention_norm.weight.fill_(float("inf"))
    session.logits(session.request([5, 5, 5]), 3)
    assert torch.isfinite(session.cache.tensor).all()


def test_cpu_backend_unsupported_options_are_refused(case):
    _, _path, _ = case
    with pytest.raises(ConfigError, match=r"quantization needs compiled kernels.*model\.dtype to bfloat16"):
        backend(quantization="int8")
    assert backend(dtype="float16").name == "torch"
    with pytest.raises(ConfigError, match=r"deterministic needs compiled kernels.*not float16"):
        backend(dtype="float16", deterministic=True)
