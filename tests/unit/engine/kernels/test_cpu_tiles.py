"""Rows passed on as tiles give the same bits as rows that every product packs for itself."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kernels.cpu.elementwise import CpuElementwise
from engine.kernels.cpu.gemm import FEW_ROWS, Arithmetic, Epilogue, PackedLinear, Tiles, whole_tiles
from engine.kernels.cpu.library import load_kernels
from tandem.errors import InvariantError
from tests.support.engine.paged_harness import needs

EPS = 1e-6
NAN = float("nan")


@pytest.fixture(scope="module")
def library():
    needs(Arithmetic.BF16)
    return load_kernels()


def noise(generator, *shape):
    return torch.randn(*shape, generator=generator).to(torch.bfloat16)


def tiled(rows, columns):
    """Memory for tiles; unwritten parts are NaN, which must not propagate."""
    return torch.full((whole_tiles(rows), columns), NAN, dtype=torch.bfloat16)[:rows]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    rows=st.integers(1, 1500),
    hidden=st.integers(1, 40),
    inner=st.integers(1, 90),
    threads=st.integers(1, 2),
    adds=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_cpu_tiles_norm_gate_and_residual_match_reference(library, rows, hidden, inner, threads, adds, seed):
    """Few rows stay rows; without tiles all do."""
    generator = torch.Generator().manual_seed(seed)
    hidden, inner = 32 * hidden, 32 * inner
    rows = min(rows, 1 + 2**25 // (hidden * inner))
    kernels = CpuElementwise(library, torch.bfloat16, num_threads=threads)
    stream, scale = noise(generator, rows, hidden + 32), noise(generator, hidden)
    delta = noise(generator, rows, hidden) if adds else None
    up, down = noise(generator, 2 * inner, hidden) / 8, noise(generator, hidden, inner) / 8
    results = []
    for given_, taken in ((Tiles.NOTHING, Tiles.NOTHING), (Tiles.INPUT | Tiles.OUTPUT, Tiles.INPUT)):
        gates = PackedLinear(
            library, up, arithmetic=Arithmetic.BF16, epilogue=Epilogue.GATED, tiles=given_, num_threads=threads
        )
        closing = PackedLinear(
            library, down, arithmetic=Arithmetic.BF16, epilogue=Epilogue.ADD, tiles=taken, num_threads=threads
        )
        residual = stream.clone()[:, :hidden]
        normed, activated = tiled(rows, hidden), tiled(rows, inner)
        norm = kernels.norm_to_tiles if taken and rows > FEW_ROWS else kernels.add_rms_norm
        norm(residual, delta, scale, EPS, normed)
        gates(normed, activated)
        closing(activated, residual)
        results.append(residual)
    assert not results[0].isnan().any()
    assert torch.equal(*results)


def test_cpu_tiles_unsupported_shape_is_refused(library):
    weight = torch.zeros(64, 64, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="only gates give them"):
        PackedLinear(library, weight, arithmetic=Arithmetic.BF16, tiles=Tiles.OUTPUT)
    with pytest.raises(ValueError, match="only bf16"):
        PackedLinear(library, weight.float(), arithmetic=Arithmetic.FLOAT32, tiles=Tiles.INPUT)
    with pytest.raises(ValueError, match="whole 32 elements"):
        PackedLinear(library, weight[:, :48], arithmetic=Arithmetic.BF16, tiles=Tiles.INPUT)
    with pytest.raises(ValueError, match="whole 32 elements"):
        PackedLinear(library, weight[:32], arithmetic=Arithmetic.BF16, epilogue=Epilogue.GATED, tiles=Tiles.OUTPUT)
    kernels = CpuElementwise(library, torch.bfloat16, num_threads=1)
    rows = torch.zeros(33, 48, dtype=torch.bfloat16)
    with pytest.raises(InvariantError, match="does not become tiles"):
        kernels.norm_to_tiles(rows, None, rows[0], EPS, tiled(33, 48))


def test_cpu_tiles_memory_too_small_for_whole_tiles_is_refused(library):
    weight = torch.zeros(64, 64, dtype=torch.bfloat16)
    both = Tiles.INPUT | Tiles.OUTPUT
    gates = PackedLinear(library, weight, arithmetic=Arithmetic.BF16, epilogue=Epilogue.GATED, tiles=both)
    short, enough = (torch.zeros(count, 64, dtype=torch.bfloat16) for count in (47, 48))
    narrow = torch.zeros(47, 32, dtype=torch.bfloat16)
    for x, out in ((short[:33], enough[:33, :32]), (enough[:33], narrow[:33])):
        with pytest.raises(ValueError, match="does not fit into memory"):
            gates(x, out)
    kernels = CpuElementwise(library, torch.bfloat16, num_threads=1)
    with pytest.raises(ValueError, match="does not fit into memory"):
        kernels.norm_to_tiles(enough[:33], None, enough[0], EPS, short[:33])
