"""Cases of transfers: adjacent or scattered blocks of real models, and the byte ranges that they are. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from tandem_bench.shapes import REFERENCE, SHAPES

_BLOCK_SIZE = 16
_BF16_BYTES = 2
POOL_OF_PAYLOAD = 2
"""Ratio of the pool to the payload, so that scattered blocks have room to scatter."""

Copy = tuple[int, int, int]
"""Copy as (offset in the source pool, offset in the target pool, length) in bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """Shape of a KV pool: bytes `[layer, block, layer_block_bytes]`."""

    name: str
    num_layers: int
    layer_block_bytes: int

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        return self.num_layers * self.layer_block_bytes

    @classmethod
    def of_shape(cls, name: str) -> "Geometry":
        """Return the geometry of a named model, in bf16 and blocks of 16 tokens."""
        shape = SHAPES[name]
        size = 2 * shape.num_kv_heads * _BLOCK_SIZE * shape.head_dim * _BF16_BYTES
        return cls(name=name, num_layers=shape.num_layers, layer_block_bytes=size)


GEOMETRIES = (
    # 32 layers of 4 KV heads of 128: the 1 MiB blocks for which rates are usually quoted.
    Geometry(name="1mb", num_layers=32, layer_block_bytes=2 * 4 * _BLOCK_SIZE * 128 * _BF16_BYTES),
    Geometry.of_shape(REFERENCE),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Hand-off: which blocks of the source pool become which of the target pool."""

    geometry: Geometry
    is_scattered: bool
    pool_blocks: int
    sources: tuple[int, ...]
    targets: tuple[int, ...]

    @property
    def name(self) -> str:
        return f"{self.geometry.name}.{'scattered' if self.is_scattered else 'adjacent'}"

    @property
    def num_bytes(self) -> int:
        return len(self.sources) * self.geometry.block_bytes

    def copies(self) -> list[Copy]:
        """Return the copies by layer, then by block; ranges adjacent on both sides are one copy."""
        size = self.geometry.layer_block_bytes
        runs = list(_runs(self.sources, self.targets))
        return [
            ((plane + source) * size, (plane + target) * size, count * size)
            for plane in range(0, self.geometry.num_layers * self.pool_blocks, self.pool_blocks)
            for source, target, count in runs
        ]

    def message(self) -> dict[str, Any]:
        """Return the case as it is sent to the processes."""
        return {
            "name": self.name,
            "num_layers": self.geometry.num_layers,
            "layer_block_bytes": self.geometry.layer_block_bytes,
            "pool_blocks": self.pool_blocks,
            "sources": self.sources,
            "targets": self.targets,
            "copies": self.copies(),
        }


def _runs(sources: Sequence[int], targets: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    start = 0
    for i in range(1, len(sources) + 1):
        is_end = i == len(sources) or sources[i] != sources[i - 1] + 1 or targets[i] != targets[i - 1] + 1
        if is_end:
            yield sources[start], targets[start], i - start
            start = i


def make_cases(payload_bytes: int, geometries: Sequence[Geometry] = GEOMETRIES) -> tuple[Case, ...]:
    """Return each geometry with adjacent and with scattered blocks, in pools of `pool_bytes(payload_bytes)`.

    Raises ValueError when not even two blocks of some geometry fit into the payload.
    """
    cases = []
    for geometry in geometries:
        count = payload_bytes // geometry.block_bytes
        if count < 2:
            raise ValueError(
                f"{payload_bytes} bytes hold {count} blocks of {geometry.block_bytes}; at least 2 are needed"
            )
        pool_blocks = pool_bytes(payload_bytes) // geometry.block_bytes
        rng = Random(f"bench:transfer:{geometry.name}:{count}")
        for sources, targets in (
            (tuple(range(count)), tuple(range(pool_blocks - count, pool_blocks))),
            (tuple(rng.sample(range(pool_blocks), count)), tuple(rng.sample(range(pool_blocks), count))),
        ):
            is_scattered = sources[0] != 0 or sources[-1] != count - 1
            cases.append(
                Case(
                    geometry=geometry,
                    is_scattered=is_scattered,
                    pool_blocks=pool_blocks,
                    sources=sources,
                    targets=targets,
                )
            )
    return tuple(cases)


def pool_bytes(payload_bytes: int) -> int:
    return POOL_OF_PAYLOAD * payload_bytes
