"""The tensor half of the engine on CUDA: the same answers as on the CPU."""

import random

import pytest
import torch

from engine.backends.options import BackendOptions
from engine.backends.select import select_backend
from engine.model.loader import load_model
from engine.runner.device_queue import CudaQueue
from engine.runner.pending_samples import PendingSamples
from engine.sampling.backend import gumbel_noise
from engine.sampling.sampler import Sampler, SampleRow
from tandem.values.sampling import SamplingParams
from tests.support.engine import ledger
from tests.support.engine.paged_harness import Session, load_plain, random_tokens, reference_model
from tests.support.engine.serve import Serve, every_way_to_sample

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    overrides = {"use_sliding_window": True, "sliding_window": 11, "max_window_layers": 1}
    reference_model("Qwen3ForCausalLM", **overrides).save_pretrained(path)
    return path


def test_cuda_logits_equal_cpu(model_path):
    tokens = random_tokens(random.Random(0), 45)
    rows = []
    for device in ("cpu", "cuda:0"):
        session = Session(load_plain(model_path, device=device))
        request = session.request(tokens)
        rows.append(torch.cat([session.logits(request, n).cpu() for n in (20, 17, 7, 1)]))
    torch.testing.assert_close(rows[0], rows[1], atol=1e-4, rtol=0.0)


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 0.9, "top_p": 0.9, "top_k": 40, "seed": 5}])
def test_tokens_equal_the_cpu(model_path, params):
    prompts = [random_tokens(random.Random(i), 3 + 7 * i) for i in range(5)]
    outputs = []
    for device in ("cpu", "cuda:0"):
        session = Session(load_plain(model_path, device=device), num_blocks=160)
        requests = [session.request(p, SamplingParams(**params), capacity=64) for p in prompts]
        session.run(requests, num_output=12, chunk=16)
        outputs.append([list(r.token_ids) for r in requests])
    assert outputs[0] == outputs[1]


def test_noise_equals_the_cpu():
    rows = [torch.tensor(v, dtype=torch.int64) for v in ([-1, 2**63 - 1, 0], [0, 7, 2**31], [0, 1, 2])]
    ours = gumbel_noise(*(row.cuda() for row in rows), 999).cpu()
    torch.testing.assert_close(ours, gumbel_noise(*rows, 999), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_cuda_half_precision_yields_finite_kv(model_path, dtype):
    session = Session(load_plain(model_path, device="cuda:0", dtype=dtype), num_blocks=160)
    requests = [session.request(random_tokens(random.Random(i), 5 + i), capacity=40) for i in range(4)]
    session.run(requests, num_output=8, chunk=4)
    assert all(r.num_output_tokens >= 8 for r in requests)
    assert torch.isfinite(session.cache.tensor).all()


def test_cuda_pipelined_tokens_are_equal_with_and_without_graphs(model_path):
    """With all sampling parameters: penalty counts never leave the device."""
    answers = []
    model = load_model(
        model_path, backend=select_backend(BackendOptions(device=torch.device("cuda", 0), dtype="float32"))
    )
    for pipelined, graphs in ((False, False), (True, False), (True, True)):
        with Serve(model, pipelined=pipelined, graphs=graphs, num_blocks=14, prefill_chunk_tokens=20) as serve:
            finished = serve.run(every_way_to_sample(random.Random(4), 14))
        answers.append([(answer.ids, answer.reason) for answer in finished])
    assert answers[0] == answers[1] == answers[2]


def test_cuda_nan_rows_have_no_token(model_path):
    model = load_model(
        model_path, backend=select_backend(BackendOptions(device=torch.device("cuda", 0), dtype="float32"))
    )
    logits = torch.randn(4, 97, device="cuda:0")
    logits[1, 5], logits[2] = float("nan"), float("-inf")
    params = SamplingParams(temperature=0.0)
    rows = [SampleRow(ledger.request([5, 6, 7], params=params), 3) for _ in range(4)]
    kernels = model.backend.sampling(model.config.vocab_size)
    chosen = Sampler(eos_token_ids=(2,), device="cuda", kernels=kernels).choose(logits, rows)
    tokens = PendingSamples(CudaQueue(torch.device("cuda", 0)), chosen).tokens()
    assert [token is None for token in tokens] == [False, True, True, False]
