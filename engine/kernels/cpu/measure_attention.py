"""Measures the speed of CPU attention: `python -m engine.kernels.cpu.measure_attention`.

Layers are visited in turn, each with its own blocks in random order, so that the keys of a step come from memory as
they do in a model. Kernels, those over caches in codes and the torch backend take turns within a round, and the best
round counts.
"""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.kernels.cpu.attention import CpuAttentionShape, PagedAttention
from engine.kernels.cpu.attention_codes import CODE_DTYPES, CodedLayer, PagedCodeAttention
from engine.kernels.cpu.elementwise import CpuElementwise
from engine.kernels.cpu.library import KernelLibrary, load_kernels
from engine.kv_storage.paged_cache import PagedKVCache
from engine.model.config import parse_model_config
from engine.model.layers.attention import AttentionSpec
from engine.model.layers.rope import RotaryEmbedding
from engine.model.layers.torch_attention import TorchAttention
from engine.model.spec import ModelSpec
from engine.types.step_inputs import IntArray, StepInputs
from tandem.values.kv_layout import KVLayout

MAX_CACHE_BYTES = 10**9
DECODE = tuple((batch, length) for batch in (1, 4, 16) for length in (512, 1024, 2048))
PREFILL = ((0, 512), (2048, 512), (0, 2048))  # tokens before the chunk, tokens of the chunk


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionFigures:
    """Figures of one case, per layer. Bytes count the keys and values in view, FLOP the visible pairs."""

    name: str
    attend_s: float
    layer_s: float
    """Time including rotation and the write into the cache."""
    torch_s: float
    """Time of the torch backend for the same."""
    coded_s: Mapping[str, float]
    """Time of attention alone over a cache in codes, by its dtype."""
    gb_per_s: float
    gflop_per_s: float


def step_over(
    starts: Sequence[int], counts: Sequence[int], block_size: int, blocks: IntArray, *, spare: int = 0
) -> StepInputs:
    """A step of sequences at `starts` with `counts` rows each, on the given blocks, in the order of StepInputs.

    `spare`: block id with which tables are padded.
    """
    order = sorted(range(len(starts)), key=lambda i: (counts[i] > 1, -starts[i]))
    begin = np.array([starts[i] for i in order], dtype=np.int64)
    rows = np.array([counts[i] for i in order], dtype=np.int64)
    needed = -(-(begin + rows) // block_size)
    tables = np.full((len(order), int(needed.max(initial=0))), spare, dtype=np.int64)
    offsets = np.cumsum(needed) - needed
    for i, (offset, count) in enumerate(zip(offsets, needed, strict=True)):
        tables[i, :count] = blocks[offset : offset + count]
    sequence = np.repeat(np.arange(len(order)), rows)
    positions = np.arange(rows.sum()) - np.repeat(np.cumsum(rows) - rows, rows) + begin[sequence]
    return StepInputs(
        token_ids=np.zeros(len(positions), dtype=np.int64),
        positions=positions,
        slots=tables[sequence, positions // block_size] * block_size + positions % block_size,
        tables=tables,
        starts=begin,
        counts=rows,
        num_single=int((rows == 1).sum()),
        sample_rows=np.cumsum(rows) - 1,
        block_size=block_size,
    )


class AttentionBench:
    """Attention of the reference shape: 16 query and 8 key-value heads of 64, bfloat16."""

    def __init__(self, library: KernelLibrary, num_threads: int, *, max_cache_bytes: int = MAX_CACHE_BYTES) -> None:
        self.shape = CpuAttentionShape(num_heads=16, num_kv_heads=8, head_dim=64, block_size=16, dtype=torch.bfloat16)
        self._library = library
        self._num_threads = num_threads
        self._max_cache_bytes = max_cache_bytes

    def measure(self, name: str, starts: Sequence[int], counts: Sequence[int], rounds: int = 5) -> AttentionFigures:
        """Best time per layer over `rounds` interleaved rounds."""
        shape = self.shape
        num_blocks = sum(-(-(s + c) // shape.block_size) for s, c in zip(starts, counts, strict=True))
        layer_bytes = num_blocks * 2 * shape.num_kv_heads * shape.block_size * shape.head_dim * 2
        config = _config(shape, max(1, min(24, self._max_cache_bytes // layer_bytes)))
        cache = _cache(config, shape.block_size, num_blocks)
        inputs = step_over(starts, counts, shape.block_size, np.random.default_rng(0).permutation(num_blocks))
        times = self._alternate(config, cache, inputs, rounds)
        pairs = int((inputs.counts * (inputs.starts + inputs.lengths + 1)).sum()) // 2
        return AttentionFigures(
            name=name,
            attend_s=times[0],
            layer_s=times[1],
            torch_s=times[2],
            coded_s=dict(zip(CODE_DTYPES, times[3:], strict=True)),
            gb_per_s=layer_bytes / times[0] / 1e9,
            gflop_per_s=4 * pairs * shape.num_heads * shape.head_dim / times[0] / 1e9,
        )

    def _alternate(self, config: ModelSpec, cache: PagedKVCache, inputs: StepInputs, rounds: int) -> list[float]:
        """Seconds per layer: attention, with the write, in torch, and attention over each kind of codes."""
        shape, rope = self.shape, RotaryEmbedding(config.ropes[0], config.head_dim)
        attention = PagedAttention(self._library, shape, num_threads=self._num_threads)
        elementwise = CpuElementwise(self._library, shape.dtype, num_threads=self._num_threads)
        angles = rope.half_angles(torch.from_numpy(inputs.positions))
        rotation, plan = elementwise.plan_rotation(shape, *angles, inputs.slots), attention.plan(inputs)
        layers = (0,) * config.num_layers
        spec = AttentionSpec(config=config, ropes=(rope,), rope_of_layer=layers, head_norms=None, dtype=shape.dtype)
        reference = TorchAttention(spec, cache).plan(inputs)
        heads = shape.num_heads + 2 * shape.num_kv_heads
        qkv = torch.randn(plan.num_rows, heads, shape.head_dim).to(shape.dtype)
        out = qkv.new_empty(plan.num_rows, shape.num_heads * shape.head_dim)

        def attend(layer: int) -> None:
            attention.attend(cache.layer(layer), qkv[:, : shape.num_heads], plan, None, out)

        def whole(layer: int) -> None:
            elementwise.qk_norm_rope_write(rotation, qkv, cache.layer(layer), None, 0.0)
            attend(layer)

        def with_torch(layer: int) -> None:
            reference.attend(layer, qkv.view(plan.num_rows, -1))

        queries = qkv[:, : shape.num_heads]
        over_codes = (self._over_codes(dtype, config, cache.num_blocks, inputs, queries, out) for dtype in CODE_DTYPES)
        works = (attend, whole, with_torch, *over_codes)
        times = [[_seconds(work, config.num_layers) for work in works] for _ in range(rounds)]
        return [min(column) / config.num_layers for column in zip(*times, strict=True)]

    def _over_codes(
        self,
        dtype: str,
        config: ModelSpec,
        num_blocks: int,
        inputs: StepInputs,
        queries: torch.Tensor,
        out: torch.Tensor,
    ) -> Callable[[int], None]:
        """Attention of one layer over random codes."""
        attention = PagedCodeAttention(self._library, self.shape, dtype, windows=(None,), num_threads=self._num_threads)
        plan, cache = attention.plan(inputs), _cache(config, self.shape.block_size, num_blocks, dtype)
        scales = [cache.layer_scales(i) for i in range(config.num_layers)]
        layers = [CodedLayer(cache.layer(i), s.fill_(0.1)) for i, s in enumerate(scales) if s is not None]
        return lambda layer: attention.attend(layers[layer], queries, plan, None, out)


def measure_all(library: KernelLibrary, num_threads: int) -> list[AttentionFigures]:
    """Measure every case of DECODE and PREFILL."""
    bench = AttentionBench(library, num_threads)
    decode = [bench.measure(f"decode {b} x {n}", [n - 1] * b, [1] * b) for b, n in DECODE]
    return decode + [bench.measure(f"{count} rows after {start}", [start], [count]) for start, count in PREFILL]


def _config(shape: CpuAttentionShape, num_layers: int) -> ModelSpec:
    return parse_model_config(
        {
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": 97,
            "hidden_size": shape.num_heads * shape.head_dim,
            "intermediate_size": 16,
            "num_hidden_layers": num_layers,
            "num_attention_heads": shape.num_heads,
            "num_key_value_heads": shape.num_kv_heads,
            "head_dim": shape.head_dim,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True,
        },
        {},
    )


def _cache(config: ModelSpec, block_size: int, num_blocks: int, dtype: str = "bfloat16") -> PagedKVCache:
    layout = KVLayout(
        model_fingerprint="",
        dtype=dtype,
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=block_size,
    )
    cache = PagedKVCache(layout, num_blocks=num_blocks)
    if layout.is_quantised:
        cache.layer(0).random_(0, 127)
    else:
        cache.layer(0).normal_()
    for layer in range(1, config.num_layers):
        cache.layer(layer).copy_(cache.layer(0))
    return cache


def _seconds(work: Callable[[int], None], num_layers: int) -> float:
    started = time.perf_counter()
    for layer in range(num_layers):
        work(layer)
    return time.perf_counter() - started


def main() -> None:
    num_threads = torch.get_num_threads()
    with torch.inference_mode():
        for f in measure_all(load_kernels(), num_threads):
            sys.stdout.write(
                f"{f.name:>20}: attend {f.attend_s * 1e3:7.3f} ms, layer {f.layer_s * 1e3:7.3f}, "
                f"torch {f.torch_s * 1e3:8.3f}; "
                f"{f.gb_per_s:5.1f} GB/s, {f.gflop_per_s:7.0f} GFLOP/s; "
                f"{', '.join(f'{name} {s * 1e3:.3f} ms' for name, s in f.coded_s.items())}\n"
            )


if __name__ == "__main__":
    main()
