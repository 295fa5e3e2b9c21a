"""`python -m cluster.kv_arithmetic`: KV memory of a model, the tokens that a worker can hold, the size of a hand-off.

Reads only a model's `config.json` and uses the engine's own layout, so its figures are those that a worker reports at
start; only weights and workspace are estimates.
"""

import argparse
import json
import sys
from dataclasses import dataclass
from math import prod
from pathlib import Path

from engine.model.config import load_model_config, parse_model_config
from engine.model.memory_budget import estimate_workspace_bytes, kv_layout
from engine.model.parameters import expected_shapes
from engine.model.spec import ModelSpec
from tandem.config.engine import EngineSection
from tandem.config.source.regular_file import read_regular_text
from tandem.errors import ConfigError
from tandem.model_path import BUILTIN, BUILTIN_DTYPE, is_local_model, model_directory
from tandem.values.kv_layout import AUTO_DTYPE, DTYPE_BITS, QUANTISED_DTYPES, KVLayout

HEADROOM = 0.05
"""Share of a worker's memory that the engine leaves unused."""
_BLOCK_SIZE = 16
_GB = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class SizingOptions:
    """Parameters of the figures besides the model."""

    dtype: str = "bfloat16"
    kv_dtype: str = AUTO_DTYPE
    tensor_parallel_size: int = 1
    rank_bytes: int = 80 * 10**9
    """Memory of each rank, as `engine.memory_bytes`."""
    context: int = 4096
    """Tokens of the sequence to compute figures for, prompt and answer together."""
    link_gbytes: float = 10.0
    """Bandwidth between two workers, in GB/s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRoom:
    """Capacity of one worker, all its ranks together."""

    bytes_per_token: int
    block_bytes: int
    weights_bytes: int
    workspace_bytes: int
    num_blocks: int
    context: int
    hand_off_s: float
    """Duration of transferring one prompt of `context` tokens, if no computation hides it."""

    @property
    def kv_tokens(self) -> int:
        """Tokens that the pool holds: `kv_tokens` of `tandem plan --worker`."""
        return self.num_blocks * _BLOCK_SIZE

    @property
    def sequences(self) -> int:
        """Maximum concurrent sequences of `context` tokens; each takes whole blocks."""
        return self.num_blocks // -(-self.context // _BLOCK_SIZE)

    def lines(self) -> list[str]:
        """Render the figures, one per line."""
        prompt_bytes = self.bytes_per_token * self.context
        return [
            f"KV of a token        {self.bytes_per_token:,} B ({self.bytes_per_token / 1024:g} KiB)",
            f"KV of {self.context:,} tokens   {prompt_bytes / _GB:.3f} GB; "
            f"their hand-off takes {1e3 * self.hand_off_s:.1f} ms if no computation hides it",
            f"weights              {self.weights_bytes / _GB:.2f} GB",
            f"workspace            {self.workspace_bytes / _GB:.2f} GB at most",
            f"KV pool              {self.num_blocks:,} blocks of {_BLOCK_SIZE}: kv_tokens={self.kv_tokens}",
            f"sequences at once    {self.sequences:,} of {self.context:,} tokens",
        ]


def num_parameters(model: ModelSpec) -> int:
    """Count the weights of the model from its parameter table."""
    return sum(prod(shape) for shape in expected_shapes(model).values())


def layout_of(model: ModelSpec, options: SizingOptions) -> KVLayout:
    """Return the layout that the engine would choose."""
    return kv_layout(
        model,
        fingerprint="",
        dtype=options.dtype,
        block_size=_BLOCK_SIZE,
        tp_size=options.tensor_parallel_size,
        kv_dtype=options.kv_dtype,
    )


def room(model: ModelSpec, options: SizingOptions) -> WorkerRoom:
    """Compute the figures. Raises ConfigError if weights and workspace alone exceed the memory."""
    layout, defaults, ranks = layout_of(model, options), EngineSection(), options.tensor_parallel_size
    context = min(model.max_context, options.context)
    weights_bytes = num_parameters(model) * DTYPE_BITS[options.dtype] // 8
    workspace_bytes = estimate_workspace_bytes(
        model,
        dtype=options.dtype,
        max_batch_tokens=defaults.max_batched_tokens,
        max_num_seqs=defaults.max_running_requests,
        max_context=context,
        kv_dtype=options.kv_dtype,
    )
    rest = int(options.rank_bytes * (1 - HEADROOM)) - weights_bytes // ranks - workspace_bytes
    if rest < layout.block_bytes:
        raise ConfigError(
            f"no memory left for KV: of {options.rank_bytes / _GB:.1f} GB a rank, weights take "
            f"{weights_bytes / ranks / _GB:.1f}, the workspace at most {workspace_bytes / _GB:.1f}, "
            f"headroom {HEADROOM:.0%}"
        )
    bytes_per_token = layout.worker_block_bytes // _BLOCK_SIZE
    return WorkerRoom(
        bytes_per_token=bytes_per_token,
        block_bytes=layout.worker_block_bytes,
        weights_bytes=weights_bytes,
        workspace_bytes=workspace_bytes * ranks,
        num_blocks=rest // layout.block_bytes,
        context=context,
        hand_off_s=bytes_per_token * context / (options.link_gbytes * _GB),
    )


def read_model(text: str) -> ModelSpec:
    """Read `builtin`, a model's directory or GGUF file, or a `config.json`. Raises ConfigError."""
    if is_local_model(text):
        return load_model_config(model_directory(text))
    try:
        return parse_model_config(json.loads(read_regular_text(Path(text))), {})
    except ValueError as error:
        raise ConfigError(f"{text}: {error}") from error


def parser() -> argparse.ArgumentParser:
    defaults = SizingOptions()
    made = argparse.ArgumentParser(prog="python -m cluster.kv_arithmetic", description=__doc__)
    made.add_argument("model", help="`builtin`, a directory in Hugging Face layout, a GGUF file, or a config.json")
    made.add_argument(
        "--dtype",
        choices=(AUTO_DTYPE, "float32", "bfloat16", "float16"),
        default=AUTO_DTYPE,
        help="as model.dtype; auto: that of config.json (else bfloat16), or float32 for the built-in model",
    )
    made.add_argument("--kv-dtype", choices=(AUTO_DTYPE, *QUANTISED_DTYPES), default=defaults.kv_dtype)
    made.add_argument("--tensor-parallel", type=int, default=1, help="ranks per worker")
    made.add_argument("--memory-gb", type=float, default=defaults.rank_bytes / _GB, help="memory per rank, in GB")
    made.add_argument("--context", type=int, default=defaults.context, help="tokens per sequence")
    made.add_argument(
        "--link-gbytes", type=float, default=defaults.link_gbytes, help="bandwidth between two workers, in GB/s"
    )
    return made


def _computed_in(model: ModelSpec, options: argparse.Namespace) -> str:
    if options.dtype != AUTO_DTYPE:
        return str(options.dtype)
    return BUILTIN_DTYPE if options.model == BUILTIN else model.stored_dtype or SizingOptions().dtype


def main(arguments: list[str] | None = None) -> int:
    """Print the figures and return the exit code: 2 for invalid input."""
    options = parser().parse_args(arguments)
    try:
        model = read_model(options.model)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    sizing = SizingOptions(
        dtype=_computed_in(model, options),
        kv_dtype=options.kv_dtype,
        tensor_parallel_size=options.tensor_parallel,
        rank_bytes=int(options.memory_gb * _GB),
        context=options.context,
        link_gbytes=options.link_gbytes,
    )
    try:
        print("\n".join(room(model, sizing).lines()))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
