"""Every family on CUDA against transformers, in float32; and drafts, which change no answer."""

import random
from pathlib import Path

import pytest
import torch

from engine.backends.options import BackendOptions
from engine.backends.select import select_backend
from engine.model.loader import load_model
from tests.support.engine.families import FAMILY_CASES, FamilyCase
from tests.support.engine.paged_harness import Session, random_tokens, reference_logits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("case", FAMILY_CASES, ids=lambda case: case.name)
def test_families_on_cuda_equal_transformers(case: FamilyCase, deterministic: bool, tmp_path: Path) -> None:
    reference = case.model()
    case.save(reference, tmp_path)
    options = BackendOptions(device=torch.device("cuda", 0), dtype="float32", deterministic=deterministic)
    session = Session(load_model(tmp_path, backend=select_backend(options)), block_size=16)
    tokens = random_tokens(random.Random(case.name), 45)
    request = session.request(tokens, capacity=48)
    ours = torch.cat([session.logits(request, count).cpu() for count in (20, 17, 7, 1)])
    torch.testing.assert_close(ours, reference_logits(reference, tokens), atol=1e-4, rtol=0.0)
