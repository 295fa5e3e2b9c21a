"""Producers and consumers of tiles agree in every model: a batch gives each row's own output."""

import random

import pytest
import torch

from engine.backends.options import BackendOptions
from engine.backends.select import select_backend
from engine.kernels.cpu.elementwise import CpuElementwise
from engine.kernels.cpu.gemm import FEW_ROWS, Arithmetic
from engine.model.loader import load_model
from tests.support.engine.paged_harness import Session, needs, random_tokens, reference_model
from tests.support.engine.thread_ranks import run_ranks

LENGTH = 70
CUTS = ([LENGTH], [1] * LENGTH, [FEW_ROWS + 1, FEW_ROWS, 5], [34, 36], [31, 39])
SIZES = [(64, 96), (64, 80), (48, 96), (96, 64)]
"""Hidden and inner, of which tiles may hold both, one, the other."""


@pytest.fixture(scope="module", params=SIZES, ids=str)
def case(request, tmp_path_factory):
    needs(Arithmetic.BF16)
    hidden, inner = request.param
    path = tmp_path_factory.mktemp("model")
    reference_model(
        "Qwen3ForCausalLM" if hidden == inner - 32 else "LlamaForCausalLM",
        hidden_size=hidden,
        intermediate_size=inner,
        tie_word_embeddings=hidden == 64,
    ).save_pretrained(path)
    options = BackendOptions(device=torch.device("cpu"), num_threads=2, dtype="bfloat16", deterministic=True)
    return hidden, load_model(path, backend=select_backend(options))


def test_cpu_tiles_prompt_in_any_chunks_gives_same_output(case, monkeypatch):
    """More rows than `FEW_ROWS` are passed as tiles, fewer are not: the same bits."""
    hidden, model = case
    tiled = []
    norm_to_tiles = CpuElementwise.norm_to_tiles
    monkeypatch.setattr(
        CpuElementwise, "norm_to_tiles", lambda *given: tiled.append(len(given[1])) or norm_to_tiles(*given)
    )
    tokens = random_tokens(random.Random(1), LENGTH)
    answers = []
    for cuts in CUTS:
        session = Session(model, num_blocks=64, block_size=16)
        request = session.request(tokens)
        answers.append(torch.cat([session.logits(request, count) for count in cuts]))
    assert all(torch.equal(answers[0], other) for other in answers[1:])
    expected = {count for cuts in CUTS for count in cuts if count > FEW_ROWS} if hidden % 32 == 0 else set()
    assert set(tiled) == expected


@pytest.mark.in_turns
def test_cpu_tiles_many_decoding_rows_give_same_output(case):
    """As recorded programs, too."""
    _, model = case
    answers = []
    for group in (FEW_ROWS + 8, 8):
        session = Session(model, num_blocks=400, block_size=16)
        requests = [session.request(random_tokens(random.Random(i), 5 + i % 7)) for i in range(FEW_ROWS + 8)]
        for begin in range(0, len(requests), group):
            session.run(requests[begin : begin + group], 12, chunk=200, rng=random.Random(1))
        answers.append([list(request.token_ids) for request in requests])
    assert answers[0] == answers[1]


@pytest.mark.parametrize("inner", [96, 128])
def test_cpu_tiles_two_ranks_give_same_output(inner, tmp_path):
    """With halves of the inner size that are whole tiles, or not."""
    needs(Arithmetic.BF16)
    reference_model("LlamaForCausalLM", hidden_size=64, intermediate_size=inner).save_pretrained(tmp_path)
    tokens = random_tokens(random.Random(2), LENGTH)

    def work(group):
        options = BackendOptions(device=torch.device("cpu"), num_threads=1, dtype="bfloat16", deterministic=True)
        model = load_model(tmp_path, backend=select_backend(options), group=group)
        answers = []
        for cuts in CUTS:
            session = Session(model, num_blocks=64, block_size=16)
            request = session.request(tokens)
            answers.append([session.logits(request, count) for count in cuts])
        return answers if group.rank == 0 else None

    first, *others = run_ranks(2, work, fixed_order=True)[0]
    assert all(torch.equal(torch.cat(first), torch.cat(other)) for other in others)
