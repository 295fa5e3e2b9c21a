"""Recorded decoding steps give the same bits as eager ones; steps that cannot be recorded are not."""

import random

import pytest
import torch

from engine.backends.options import BackendOptions
from engine.backends.select import select_backend
from engine.kernels.cpu.library import KernelCall, load_kernels
from engine.kernels.cpu.program import CannotRecord, KernelProgram
from engine.model.loader import load_model
from tandem.errors import InvariantError
from tests.support.engine.paged_harness import (
    ARCHITECTURES,
    Session,
    random_tokens,
    reference_model,
    save_and_load,
)


def backend(**options):
    return select_backend(BackendOptions(device=torch.device("cpu"), num_threads=1, **{"dtype": "float32", **options}))


@pytest.fixture(scope="module", params=ARCHITECTURES)
def path(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param)
    window = {"sliding_window": 12} if request.param == "MistralForCausalLM" else {}
    save_and_load(reference_model(request.param, tie_word_embeddings="Qwen" in request.param, **window), path)
    return path


@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16"}, {"dtype": "bfloat16", "deterministic": True}])
def test_cpu_programs_equal_eager_tokens_and_kv(path, options):
    answers = []
    for records in (False, True):
        model = load_model(path, backend=backend(**options))
        session = Session(model, num_blocks=120, block_size=16)
        if records:
            session.runner.record_graphs(max_rows=3, max_tokens=64, max_length=128)
            assert session.runner.graphs is not None
        replays = count_replays(session.runner.graphs)
        requests = [session.request(random_tokens(random.Random(i), 5 + 11 * i), capacity=90) for i in range(5)]
        # Random company: chunks between decoding steps make buffers grow, and four rows or five are not recorded.
        session.run(requests, 24, chunk=13, rng=random.Random(1))
        assert not records or replays[0] > 10
        kv = [session.cache.tensor[:, r.block_table.ids].clone() for r in requests]
        answers.append(([list(r.token_ids) for r in requests], kv))
    assert answers[0][0] == answers[1][0]
    for eager, recorded in zip(answers[0][1], answers[1][1], strict=True):
        assert torch.equal(eager, recorded)


def test_cpu_programs_moved_buffer_drops_programs(path):
    """The one-row program was recorded over buffers that a long chunk has replaced."""
    model = load_model(path, backend=backend())
    session = Session(model, num_blocks=60, block_size=16)
    session.runner.record_graphs(max_rows=4, max_tokens=64, max_length=400)
    plain = Session(load_model(path, backend=backend()), num_blocks=60, block_size=16)
    first, long = random_tokens(random.Random(0), 9), random_tokens(random.Random(1), 300)
    tokens = []
    for one in (session, plain):
        request, other = one.request(first, capacity=64), one.request(long, capacity=310)
        one.run([request], 4, chunk=9)
        one.step([(other, 300)])
        one.run([request], 8, chunk=1)
        tokens.append(list(request.token_ids))
    assert tokens[0] == tokens[1]


def test_cpu_programs_two_pools_have_separate_programs(path):
    model = load_model(path, backend=backend())
    sessions = [Session(model, num_blocks=20, block_size=16, seed=seed) for seed in (1, 2)]
    for session in sessions:
        session.runner.record_graphs(max_rows=4, max_tokens=64, max_length=64)
    requests = [session.request(random_tokens(random.Random(3), 12)) for session in sessions]
    for _ in range(12):
        for session, request in zip(sessions, requests, strict=True):
            session.step([(request, request.num_uncomputed_tokens)])
    assert list(requests[0].token_ids) == list(requests[1].token_ids)


def test_cpu_embeddings_of_any_batch_share_one_buffer(path):
    """A program keeps its inputs: one tensor per number of rows would grow with the square of the largest."""
    model = load_model(path, backend=backend())
    found = model.embedding(torch.tensor([3, 1, 4])).clone()
    places = {model.embedding(torch.arange(count)).data_ptr() for count in (3, 2, 1)}
    assert len(places) == 1
    for row, token in enumerate((3, 1, 4)):
        assert torch.equal(model.embedding(torch.tensor([token]))[0], found[row])
    with pytest.raises((IndexError, InvariantError)):
        model.embedding(torch.tensor([model.config.vocab_size]))


def test_cpu_programs_unsupported_call_is_refused():
    library = load_kernels()
    with pytest.raises(CannotRecord, match="signature piipi"):
        KernelProgram(library, [KernelCall(address=1, signature="piipi", arguments=(0,) * 5)])
    with pytest.raises(CannotRecord, match="may not outlive"):
        KernelProgram(library, [KernelCall(address=1, signature="ppippf", arguments=(b"", 0, 0, 0, 0, 0.0))])


def count_replays(programs):
    count = [0]
    if programs is not None:
        replay = programs.replay

        def counted(program):
            count[0] += 1
            replay(program)

        programs.replay = counted
    return count


def test_cpu_program_of_a_layer_has_eight_calls(path):
    """Two norms, four products, rotation with the write of keys and values, attention: nothing may come between."""
    session = Session(load_model(path, backend=backend()), num_blocks=20, block_size=16)
    session.runner.record_graphs(max_rows=1, max_tokens=64, max_length=64)
    programs = []
    session.runner.graphs.replay = lambda program: (programs.append(program), program.run())
    session.run([session.request(random_tokens(random.Random(1), 9), capacity=32)], 4, chunk=9)
    assert len(programs[-1]) == 8 * session.runner.model.config.num_layers + 2
