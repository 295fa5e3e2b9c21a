"""Mixtures of experts in one call against plain torch and against their own products; a row alone, bit for bit."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kernels.cpu.gemm import CACHE_LINE_BYTES, Arena, Arithmetic, Epilogue, PackedLinear, stored_arithmetic
from engine.kernels.cpu.mixture import PackedExpert, PackedMixture
from engine.model.checkpoints.on_load import WeightScheme
from engine.model.layers.linear import GatedLinear, Linear
from engine.model.layers.mixture import Expert, ExpertRouter, GroupedMixture, route
from engine.model.spec import MoeSpec
from tandem.errors import InvariantError
from tests.support.engine.paged_harness import needs

FLOAT32, INT4, BF16 = Arithmetic.FLOAT32, Arithmetic.INT4, Arithmetic.BF16_VECTORS
DENSE = (
    *(Arithmetic.FLOAT32, Arithmetic.BF16, Arithmetic.BF16_DOT, Arithmetic.BF16_VECTORS),
    *(Arithmetic.INT8, Arithmetic.INT8_DOT, Arithmetic.INT8_VECTORS, Arithmetic.INT4),
)
CODES = ((WeightScheme.FP8, torch.float32), (WeightScheme.NF4, torch.bfloat16))


class Made:
    """Random matrices of a mixture, and the same packed."""

    def __init__(self, library, moe, hidden, *, arithmetic=FLOAT32, scheme=None, dtype=None, threads=2, seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.moe, self.hidden = moe, hidden
        self.dtype = dtype or arithmetic.dtype
        self.threads = threads
        self._arena = Arena(library)
        self._library, self._arithmetic, self._scheme = library, arithmetic, scheme

        def matrix(rows, columns):
            return (torch.randn(rows, columns, generator=generator) / columns**0.5).to(self.dtype)

        sizes = [moe.expert_size] * moe.num_experts + [moe.shared_size] * moe.has_shared
        self.router = matrix(len(sizes), hidden) * 3
        self.experts = [(matrix(2 * size, hidden), matrix(hidden, size)) for size in sizes]
        plain = FLOAT32 if self.dtype is torch.float32 else BF16
        self.packed_router = PackedLinear(
            library, self.router, arithmetic=plain, epilogue=Epilogue.STORE_FLOAT32, num_threads=threads
        )
        self.packed = [
            PackedExpert(gate_up=self.pack(gate_up, Epilogue.GATED), down=self.pack(down, Epilogue.STORE_FLOAT32))
            for gate_up, down in self.experts
        ]
        self.mixture = PackedMixture(library, moe, self.packed_router, self.packed, num_threads=threads)

    def pack(self, weight, epilogue):
        arithmetic = self._arithmetic
        if self._scheme is not None:
            weight = self._scheme.quantize(weight)
            arithmetic = stored_arithmetic(self._library.features, weight, self.dtype)
        return PackedLinear(
            self._library,
            weight,
            arithmetic=arithmetic,
            epilogue=epilogue,
            num_threads=self.threads,
            arena=self._arena,
        )

    def plain(self):
        """In torch operators."""
        experts = [Expert(gate_up=GatedLinear(gate_up, None), down=Linear(down)) for gate_up, down in self.experts]
        return GroupedMixture(self.moe, ExpertRouter(self.router), experts)

    def rows(self, count, seed=1):
        return torch.randn(count, self.hidden, generator=torch.Generator().manual_seed(seed)).to(self.dtype)

    def __call__(self, x):
        out = torch.full(x.shape, float("nan"), dtype=self.dtype)
        self.mixture(x, out, torch.empty(len(x) * self.mixture.scratch_bytes, dtype=torch.uint8))
        return out

    def by_products(self, x):
        """Row by row from the packed matrices, their results weighted and summed in double."""
        results = torch.zeros(len(x), self.hidden, dtype=torch.float64)
        for row in range(len(x)):
            one = x[row : row + 1]
            logits = torch.empty(1, len(self.experts))
            self.packed_router(one, logits)
            chosen, weights = route(logits, self.moe)
            for number, weight in zip(chosen[0].tolist(), weights[0].double(), strict=True):
                expert = self.packed[number]
                gate = torch.empty(1, expert.gate_up.columns, dtype=self.dtype)
                found = torch.empty(1, self.hidden)
                expert.gate_up(one, gate)
                expert.down(gate, found)
                results[row] += weight * found[0].double()
        return results.to(self.dtype)


def spec(experts=6, per_token=2, size=48, *, normalizes=True, shared=None):
    return MoeSpec(
        num_experts=experts,
        experts_per_token=per_token,
        expert_size=size,
        normalizes_weights=normalizes,
        shared_size=shared,
    )


@settings(max_examples=60, deadline=None)
@given(
    experts=st.integers(1, 20),
    chosen=st.floats(0, 1),
    size=st.integers(1, 70),
    hidden=st.integers(1, 90),
    shared=st.none() | st.integers(1, 100),
    normalizes=st.booleans(),
    rows=st.integers(0, 70),
    threads=st.integers(1, 2),
)
def test_cpu_mixture_equals_plain_torch(library, experts, chosen, size, hidden, shared, normalizes, rows, threads):
    moe = spec(experts, max(1, round(chosen * experts)), size, normalizes=normalizes, shared=shared)
    made = Made(library, moe, hidden, threads=threads, seed=experts)
    x = made.rows(rows)
    torch.testing.assert_close(made(x), made.plain()(x), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("arithmetic", DENSE)
@pytest.mark.parametrize("shared", [None, 96])
def test_cpu_mixture_is_the_weighted_sum_of_its_products(library, arithmetic, shared):
    needs(arithmetic)
    made = Made(library, spec(7, 3, 64, normalizes=False, shared=shared), 128, arithmetic=arithmetic)
    x = made.rows(40)
    tolerance = 1e-6 if made.dtype is torch.float32 else 2**-7
    torch.testing.assert_close(made(x), made.by_products(x), atol=1e-5, rtol=tolerance)


@pytest.mark.parametrize(("scheme", "dtype"), CODES)
def test_cpu_mixture_of_codes_is_the_weighted_sum_of_its_products(library, scheme, dtype):
    needs(Arithmetic.FP8)
    made = Made(library, spec(5, 2, 64), 128, scheme=scheme, dtype=dtype)
    x = made.rows(23)
    torch.testing.assert_close(made(x), made.by_products(x), atol=1e-5, rtol=1e-6 if dtype is torch.float32 else 2**-7)


@pytest.mark.parametrize("arithmetic", DENSE)
def test_cpu_mixture_row_is_independent_of_batch_and_threads(library, arithmetic):
    needs(arithmetic)
    moe = spec(5, 2, 160, shared=96)
    alone, together = (Made(library, moe, 544, arithmetic=arithmetic, threads=threads) for threads in (1, 2))
    x = alone.rows(300)
    single = torch.cat([alone(x[row : row + 1]) for row in range(0, 300, 7)])
    for begin, end in ((0, 300), (0, 20), (28, 47), (0, 77), (100, 290)):
        found = together(x[begin:end])
        for place, row in enumerate(range(0, 300, 7)):
            if begin <= row < end:
                assert torch.equal(found[row - begin], single[place]), (begin, end, row)


def test_cpu_mixture_experts_may_differ_in_form(library):
    """Checkpoints may keep some matrices in more bits."""
    needs(Arithmetic.INT8_VECTORS)
    moe = spec(4, 2, 64)
    of_four, of_eight = (Made(library, moe, 128, arithmetic=one) for one in (INT4, Arithmetic.INT8_VECTORS))
    of_four.packed[1:3] = of_eight.packed[1:3]
    of_four.mixture = PackedMixture(library, moe, of_four.packed_router, of_four.packed, num_threads=2)
    x = of_four.rows(30)
    torch.testing.assert_close(of_four(x), of_four.by_products(x), atol=1e-5, rtol=2**-7)


def test_cpu_mixture_equal_logits_choose_the_first_experts(library):
    made = Made(library, spec(8, 3), 32)
    made.router[:] = made.router[0]
    packed = PackedLinear(library, made.router, arithmetic=FLOAT32, epilogue=Epilogue.STORE_FLOAT32)
    made.mixture = PackedMixture(library, made.moe, packed, made.packed, num_threads=1)
    x = made.rows(5)
    torch.testing.assert_close(made(x), made.plain()(x), atol=2e-5, rtol=1e-4)
    chosen, weights = route(torch.zeros(2, 8), made.moe)
    assert chosen.tolist() == [[0, 1, 2]] * 2
    torch.testing.assert_close(weights, torch.full((2, 3), 1 / 3))


def test_cpu_mixture_nan_affects_its_row_only(library):
    made = Made(library, spec(shared=40), 64)
    x = made.rows(20)
    clean = made(x)
    x[7, 3] = float("nan")
    found = made(x)
    assert found[7].isnan().all()
    others = [row for row in range(20) if row != 7]
    assert torch.equal(found[others], clean[others])


def test_cpu_mixture_neither_reads_nor_writes_gaps_between_rows(library):
    made = Made(library, spec(), 50)
    wide_x, wide_out = torch.full((21, 60), float("nan")), torch.full((21, 57), 7.0)
    x, out = wide_x[:20, :50].copy_(made.rows(20)), wide_out[:20, :50]
    room = torch.full((20 * made.mixture.scratch_bytes + 64,), 99, dtype=torch.uint8)
    made.mixture(x, out, room[: 20 * made.mixture.scratch_bytes])
    assert torch.equal(out, made(made.rows(20)))
    assert (wide_out[:, 50:] == 7).all()
    assert (wide_out[20] == 7).all()
    assert (room[-64:] == 99).all()


def test_cpu_mixture_refuses_what_does_not_fit(library):
    made = Made(library, spec(), 32)
    x, room = made.rows(4), torch.empty(4 * made.mixture.scratch_bytes, dtype=torch.uint8)
    for rows, out, scratch in (
        (x[:, :16], x, room),
        (x, torch.empty(3, 32), room),
        (x.double(), torch.empty(4, 32), room),
        (x, torch.empty(4, 32), room[:-1]),
    ):
        with pytest.raises(InvariantError):
            made.mixture(rows, out, scratch)
    with pytest.raises(InvariantError, match="a router of 6 columns"):
        PackedMixture(library, made.moe, made.packed_router, made.packed[:-1], num_threads=1)
    other = Made(library, spec(size=40), 16)
    with pytest.raises(InvariantError, match="an expert from 16 to 16 values in rows of 32"):
        PackedMixture(library, made.moe, made.packed_router, [*made.packed[:-1], other.packed[0]], num_threads=1)
    bfloat16 = Made(library, spec(), 32, arithmetic=BF16)
    with pytest.raises(InvariantError, match="an expert that computes in"):
        PackedMixture(library, made.moe, made.packed_router, bfloat16.packed, num_threads=1)


def test_arena_gives_separate_memory_by_cache_lines(library):
    arena = Arena(library)
    sizes = [1, 64, 65, 70_000, 40 << 20, 40 << 20, 3, 100 << 20, 5]
    parts = [arena.allocate(size) for size in sizes]
    assert [part.nbytes for part in parts] == sizes
    assert all(part.data_ptr() % CACHE_LINE_BYTES == 0 for part in parts)
    ends = sorted((part.data_ptr(), part.data_ptr() + part.nbytes) for part in parts)
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(ends))
    assert parts[2].data_ptr() - parts[0].data_ptr() == 128
