"""Every model family in compiled kernels: transformers' logits, the bits of eager steps when recorded, int8 caches."""

import random

import pytest
import torch

from engine.backends.options import BackendOptions
from engine.backends.select import select_backend
from engine.model.loader import load_model
from tests.support.engine.families import FAMILY_CASES
from tests.support.engine.paged_harness import Session, load_plain, random_tokens, reference_logits


def load(path, **options):
    chosen = BackendOptions(device=torch.device("cpu"), num_threads=1, **{"dtype": "float32", **options})
    return load_model(path, backend=select_backend(chosen))


@pytest.fixture(scope="module", params=FAMILY_CASES, ids=lambda case: case.name)
def family(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param.name)
    reference = request.param.model()
    request.param.save(reference, path)
    return request.param, reference, path


def test_cpu_families_equal_transformers(family):
    case, reference, path = family
    rng = random.Random(case.name)
    tokens = random_tokens(rng, 70)
    expected = reference_logits(reference, tokens[:60])
    session = Session(load(path), num_blocks=60, block_size=16)
    assert session.runner.model.backend.name == "cpu-vectors"
    request = session.request(tokens[:60], capacity=64)
    for count in (37, 9, 1, 13):
        start = request.num_computed_tokens
        found = session.logits(request, count)
        torch.testing.assert_close(found, expected[start : start + count], atol=1e-4, rtol=0.0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_cpu_families_recorded_steps_equal_eager_ones(family, dtype):
    case, _, path = family
    answers = []
    for records in (False, True):
        session = Session(load(path, dtype=dtype), num_blocks=60, block_size=16)
        replays = []
        if records:
            session.runner.record_graphs(max_rows=3, max_tokens=64, max_length=128)
            replay = session.runner.graphs.replay
            session.runner.graphs.replay = lambda program, run=replay, seen=replays: (
                seen.append(program),
                run(program),
            )
        requests = [session.request(random_tokens(random.Random(i), 5 + 11 * i), capacity=70) for i in range(3)]
        session.run(requests, 20, chunk=13, rng=random.Random(case.name))
        assert not records or len(replays) > 3
        kv = [session.cache.tensor[:, r.block_table.ids].clone() for r in requests]
        answers.append(([list(r.token_ids) for r in requests], kv))
    assert answers[0][0] == answers[1][0]
    for eager, recorded in zip(answers[0][1], answers[1][1], strict=True):
        assert torch.equal(eager, recorded)


@pytest.mark.parametrize("dtype", ["bfloat16"])
def test_cpu_families_agree_with_torch_over_int8_caches(family, dtype):
    case, _, path = family
    tokens = random_tokens(random.Random(case.name), 50)
    found = []
    for model in (load(path, dtype=dtype, kv_dtype="int8"), load_plain(path, dtype=dtype)):
        session = Session(model, num_blocks=60, block_size=16, kv_dtype="int8")
        request = session.request(tokens, capacity=64)
        found.append(torch.cat([session.logits(request, count) for count in (40, 1, 9)]))
    scale = found[1].std()
    assert (found[0] - found[1]).abs().mean() < 0.1 * scale


# Kernel calls of a layer: two norms, four products, rotation with the write, attention; and what a family adds to them.
CALLS = {
    "phi3": 8,
    "granite": 8,
    "olmo2": 12,  # norms of queries, keys and both results; what stands for a norm still adds and copies
    "smollm3": 8,
    "stablelm": 8,
    "cohere2": 7,
    "glm4": 10,
    "gemma2": 11,  # GELU's gate is a call of its own
    "gemma3": 11,
    "mixtral": 7,  # experts are one call
    "olmoe": 9,  # norms of queries and of keys
}


def case_name(case):
    return case.name


@pytest.mark.parametrize(
    "family", [case for case in FAMILY_CASES if case.name in CALLS], indirect=True, ids=case_name, scope="module"
)
def test_cpu_families_make_few_kernel_calls(family):
    case, _, path = family
    model = load(path)
    session = Session(model, num_blocks=20, block_size=16)
    session.runner.record_graphs(max_rows=1, max_tokens=64, max_length=64)
    request = session.request(random_tokens(random.Random(1), 9), capacity=32)
    programs = []
    session.runner.graphs.replay = lambda program: (programs.append(program), program.run())
    session.run([request], 4, chunk=9)
    ends = 2 + (model.config.logit_cap is not None)  # last norm, head, cap
    assert len(programs[-1]) == CALLS[case.name] * model.config.num_layers + ends
