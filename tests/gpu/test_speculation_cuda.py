"""Drafts on CUDA: verified steps change no answer, whoever else is in the batch."""

from dataclasses import replace
from random import Random

import pytest
import torch

from engine.assembly import assemble
from tests.support.engine import drafts
from tests.unit.engine import test_speculation as plain
from tests.unit.engine.test_assembly import SPEC

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_speculation_on_cuda_changes_no_answer(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In deterministic mode every value is equal, log probabilities too."""
    on_gpu = replace(SPEC, device="cuda", memory_bytes=2 << 30)
    monkeypatch.setattr(plain, "SPEC", on_gpu)
    monkeypatch.setattr(plain, "assemble", assemble)
    model = plain.Model("auto", dtype)
    for chunk in (80, 7):
        oracle = drafts.speculation(drafts.Oracle(model.known), most=4)
        half = drafts.speculation(drafts.HalfRight(model.known, plain.VOCAB, Random(1)), most=4)
        for speculation in (oracle, half):
            requests = [model.request(number) for number in range(len(plain.WAYS))]
            run = model.run(requests, speculation, prefill_chunk_tokens=chunk)
            model.assert_same(run.answers, model.expected)
            assert run.num_accepted > 20
