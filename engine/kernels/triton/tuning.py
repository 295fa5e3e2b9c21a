"""Launch parameters by GPU and shape, from JSON tables beside this module.

Of the shipped tables, entries that say "timed" were the fastest of several on an H200; others were chosen from the
shapes and from resource counts of ahead-of-time compilation for sm_90 (registers, spills, shared memory; `python -m
engine.kernels.triton.aot`). `python -m engine.kernels.triton.tune` times candidates on the GPU at hand and writes a
table of its own.

A table is `{"gpu": name or prefix, "source": how it was made, "prefill": [...], "decode": [...], "fixed": [...],
"gemm": [...]}`, where "fixed" is used by both kinds of attention in deterministic mode; an entry holds a launch's
fields and, for attention, the shape it serves: `head_dim`, the largest padded head size, `eight_bit` and `wide`
(float32 queries). Of "decode", entries of one shape follow each other, each for more sequences than the one before. In
"few_rows" and "one_row", which a table may lack, it holds `gated` and the sizes of a matrix: at least `least_features`
and at most `features` of output, at most `depth`. The first entry that fits is used, so their order matters. In
"quantized" it holds the `arithmetic`, whether it is `fixed`, for deterministic mode, and at most how many `rows` it is
for, ever more.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from tandem.errors import ConfigError

TABLES = Path(__file__).parent / "tables"
DEFAULT_TABLE = "default"
_MOST_SPLITS, _LEAST_STEPS = 8, 4
"""Of a product's depth: most parts, and fewest steps for which one is worthwhile."""
FIXED_KEYS = 512
"""Keys per run in deterministic mode: a multiple of every table's `block_n`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillLaunch:
    """Launch of paged prefill."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    fixed_keys: int = 0
    """Keys per run; above zero, results do not depend on chunking."""
    timed: bool = False
    """Whether it was the fastest of several on a GPU, so that what it spills is known to be worth it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeLaunch:
    """Launch of flash decoding."""

    block_n: int
    num_warps: int
    num_stages: int
    block_m: int = 16
    programs_per_sm: int = 2
    """Programs for each multiprocessor up to which sequences of about equal lengths are split, and up to which it is
    used where a later launch is for more of them."""
    uneven_programs_per_sm: int = 4
    """The same of unequal lengths."""
    min_keys: int = 128
    """Fewest keys for which a program of its own is worthwhile."""
    fixed_keys: int = 0
    """Keys per run; above zero, results do not depend on lengths."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmLaunch:
    """Launch of the batch-invariant product."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FewRowsLaunch:
    """Launch of the product for few rows."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    num_splits: int = 1
    """Parts of the depth."""
    prefetch_lines: int = 0
    """Lines of memory of each feature's weights to fetch before waiting for the kernel before; a power of two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OneRowLaunch:
    """Launch of the product for one row."""

    block_n: int
    block_k: int
    num_warps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedLaunch:
    """Launch of a product of quantized weights."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    block_k: int = 0
    """Depth of a step, where the packing of the weights does not decide it."""
    rows: int = 0
    """Most rows that it is for; 0: any number."""
    programs_per_sm: int = 0
    """Programs for each multiprocessor up to which the depth is split; 0: never."""
    prefetch_lines: int = 0
    """Lines of memory of each feature's weights to fetch before waiting for the kernel before; a power of two."""

    def num_splits(self, features: int, num_steps: int, num_sms: int) -> int:
        """Parts of a depth of `num_steps` steps, a power of two; one where rows may need several tiles."""
        tiles, splits = -(-features // self.block_n), 1
        if not 0 < self.rows <= self.block_m:
            return splits
        while splits < _MOST_SPLITS and tiles * splits < self.programs_per_sm * num_sms:
            if num_steps < 2 * splits * _LEAST_STEPS:
                break
            splits *= 2
        return splits


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """Properties on which a launch of attention depends."""

    head_dim: int
    eight_bit: bool = False
    """True when the cache is quantised."""
    wide: bool = False
    """True when queries are float32."""


_Product = TypeVar("_Product", FewRowsLaunch, OneRowLaunch)
_Launch = TypeVar("_Launch", PrefillLaunch, DecodeLaunch, GemmLaunch, FewRowsLaunch, OneRowLaunch, QuantizedLaunch)


class LaunchTable:
    """Launch parameters of the kernels on one kind of GPU."""

    def __init__(self, raw: dict[str, Any]) -> None:
        self.gpu = str(raw.get("gpu", ""))
        self.source = str(raw.get("source", ""))
        self._raw = raw

    def prefill(self, shape: AttentionShape, *, deterministic: bool = False) -> PrefillLaunch:
        """Launch of paged prefill. Raises ConfigError when the table has no entry that fits."""
        if not deterministic:
            return _launch(PrefillLaunch, self._fitting("prefill", shape))
        return replace(_launch(PrefillLaunch, self._fitting("fixed", shape)), fixed_keys=FIXED_KEYS)

    def decode(self, shape: AttentionShape, *, deterministic: bool = False) -> tuple[DecodeLaunch, ...]:
        """Launches of flash decoding for ever more sequences, the last for any number: see `choose_launch`.

        In deterministic mode one, with the tiles of prefill, whose results it must equal.
        """
        if not deterministic:
            head_dim = self._fitting("decode", shape)["head_dim"]
            entries = (entry for entry in self._of_kind("decode", shape) if entry["head_dim"] == head_dim)
            return tuple(_launch(DecodeLaunch, entry) for entry in entries)
        prefill = self.prefill(shape, deterministic=True)
        launch = DecodeLaunch(
            block_m=prefill.block_m,
            block_n=prefill.block_n,
            num_warps=prefill.num_warps,
            num_stages=prefill.num_stages,
            fixed_keys=prefill.fixed_keys,
        )
        return (launch,)

    def gemm(self, *, wide: bool) -> GemmLaunch:
        """Launch of the batch-invariant product; `wide`: for float32."""
        for entry in self._entries("gemm"):
            if bool(entry.get("wide")) == wide:
                return _launch(GemmLaunch, entry)
        raise ConfigError(f"the launch table of {self.gpu!r:.60} has no gemm entry for wide={wide}")

    def few_rows(self, features: int, depth: int, *, gated: bool = False) -> FewRowsLaunch | None:
        """Launch of the product for few rows: of the first entry for such a matrix whose tiles divide its depth.

        None when there is none: a product left to the vendor's library is no error. Raises ConfigError for a gate with
        splits, whose parts cannot be added.
        """
        launch = next(self._products(FewRowsLaunch, "few_rows", features, depth, gated=gated), None)
        if launch is not None and gated and launch.num_splits > 1:
            raise ConfigError(f"the launch table of {self.gpu!r:.60} splits a gated product: num_splits must be 1")
        return launch

    def one_row(self, features: int, depth: int, *, gated: bool = False) -> OneRowLaunch | None:
        """The same of the product for one row."""
        return next(self._products(OneRowLaunch, "one_row", features, depth, gated=gated), None)

    def quantized(self, arithmetic: str, *, deterministic: bool = False) -> tuple[QuantizedLaunch, ...]:
        """Launches of products of quantized weights, for ever more rows, the last for any number.

        `arithmetic`: "groups" (`group_gemm`) or "bytes" (`byte_gemm`). In deterministic mode one. Raises ConfigError
        when the table, which may be older, has none.
        """
        found = [
            _launch(QuantizedLaunch, entry)
            for entry in self._entries("quantized")
            if entry.get("arithmetic") == arithmetic and bool(entry.get("fixed")) == deterministic
        ]
        if not found or found[-1].rows:
            raise ConfigError(
                f"the launch table of {self.gpu!r:.60} has no quantized entry for {arithmetic} of any rows"
            )
        return tuple(found)

    def _products(
        self, kind: type[_Product], name: str, features: int, depth: int, *, gated: bool
    ) -> Iterator[_Product]:
        for entry in self._raw.get(name, []):
            fits = int(entry["least_features"]) <= features <= int(entry["features"])
            fits = fits and depth <= int(entry.get("depth", depth))
            if fits and bool(entry.get("gated")) == gated:
                launch = _launch(kind, entry)
                if depth % launch.block_k == 0:
                    yield launch

    def as_json(self) -> dict[str, Any]:
        """The table as read; not to be changed."""
        return self._raw

    def _fitting(self, kernel: str, shape: AttentionShape) -> dict[str, Any]:
        for entry in self._of_kind(kernel, shape):
            if shape.head_dim <= int(entry["head_dim"]):
                return entry
        raise ConfigError(f"the launch table of {self.gpu!r:.60} has no {kernel} entry for {shape}")

    def _of_kind(self, kernel: str, shape: AttentionShape) -> Iterator[dict[str, Any]]:
        """Entries for the dtypes of a shape, of any head size."""
        for entry in self._entries(kernel):
            if bool(entry.get("eight_bit")) == shape.eight_bit and bool(entry.get("wide")) == shape.wide:
                yield entry

    def _entries(self, kernel: str) -> list[dict[str, Any]]:
        entries = self._raw.get(kernel)
        if not isinstance(entries, list):
            raise ConfigError(f"the launch table of {self.gpu!r:.60} has no list {kernel!r}")
        return entries


def load_table(gpu_name: str, directory: Path = TABLES) -> LaunchTable:
    """The table whose `gpu` is the longest prefix of `gpu_name` (torch.cuda.get_device_name()); else the default one.

    Raises ConfigError when a table cannot be read.
    """
    tables = [LaunchTable(_read(path)) for path in sorted(directory.glob("*.json"))]
    fit = [table for table in tables if gpu_name.startswith(table.gpu) or table.gpu == DEFAULT_TABLE]
    if not fit:
        raise ConfigError(f"no launch table in {directory}")
    return max(fit, key=lambda table: 0 if table.gpu == DEFAULT_TABLE else len(table.gpu))


def _read(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"launch table {path}: {error}") from error
    if not isinstance(raw, dict) or not raw.get("gpu"):
        raise ConfigError(f"launch table {path}: must be an object that names its gpu")
    return raw


def _launch(kind: type[_Launch], entry: dict[str, Any]) -> _Launch:
    names = {field.name for field in fields(kind)}
    try:
        values: dict[str, Any] = {name: int(value) for name, value in entry.items() if name in names}
        return kind(**values)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"launch table entry {entry}: {error}") from error
