"""A GGUF file as a source of tensors, stored or restored, under Hugging Face's names and in its order of rows.

llama.cpp rotates pairs of neighbouring elements of a head where transformers rotates an element and the one half a
head further. For Llama and Mistral its converter reorders the rows of queries and keys accordingly, which is undone
here; Qwen's it leaves alone.
"""

import hashlib
import json
from collections.abc import Mapping

import torch
from torch import Tensor

from engine.model.checkpoints.gguf.blocks import block_matrix
from engine.model.checkpoints.gguf.file import GgufFile
from engine.model.checkpoints.stored_matrix import StoredMatrix
from engine.model.families.registry import FAMILIES, family_of
from engine.model.rope_config import RopeType
from engine.model.shard import TensorSlice
from engine.model.spec import ModelSpec
from tandem.errors import ConfigError
from tandem.gguf.container import GgufTensor

_COMPUTED_FACTORS = (RopeType.LLAMA3, RopeType.FACTORS)
"""Rotations whose configuration has the factors, or how they are computed."""
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_ROPE_FACTORS = "rope_freqs.weight"


class GgufSource:
    """Implements `sources.CheckpointSource`. Its file stays open for as long as it is used."""

    def __init__(
        self, file: GgufFile, config: ModelSpec, shapes: Mapping[str, tuple[int, ...]], *, dtype: torch.dtype
    ) -> None:
        """`shapes`: all tensors of the model, by Hugging Face's names; `dtype`: of restored tensors.

        Raises ConfigError for a file of another architecture.
        """
        self._file = file
        self._config = config
        self._dtype = dtype
        family = family_of(config.architecture)
        found, wanted = file.header.metadata.get("general.architecture"), None if family is None else family.gguf
        if family is None or wanted is None:
            readable = ", ".join(name for name, one in FAMILIES.items() if one.gguf is not None)
            raise ConfigError(f"{file.name}: weights of {config.architecture} are not read from GGUF, only {readable}")
        if found != wanted:
            raise ConfigError(f"{file.name}: general.architecture must be {wanted}, is {found!r:.40}")
        self._is_reordered = family.gguf_reorders
        mapped = {
            name: file.header.tensors[stored]
            for name in shapes
            if (stored := _stored_name(name)) in file.header.tensors
        }
        self._tensors: dict[str, GgufTensor] = mapped
        rest = file.header.tensors.keys() - {tensor.name for tensor in mapped.values()}
        if any(rope is not None and rope.rope_type in _COMPUTED_FACTORS for rope in config.ropes):
            rest -= {_ROPE_FACTORS}
        if config.tie_embeddings:
            rest -= {_stored_name("lm_head.weight")}
        self.names = frozenset(mapped.keys() | rest)

    @property
    def summary(self) -> str:
        """One line for the log: from what the weights are restored."""
        types = sorted({tensor.block_type.name for tensor in self._file.header.tensors.values()})
        size = sum(tensor.end - tensor.begin for tensor in self._file.header.tensors.values())
        dtype = str(self._dtype).removeprefix("torch.")
        return f"weights are restored to {dtype} from GGUF, {', '.join(types)}: {size / 2**20:.1f} MiB of files"

    def require(self, name: str, shape: tuple[int, ...]) -> None:
        """Check that a tensor exists with this shape; ConfigError otherwise."""
        if name not in self._tensors:
            raise ConfigError(f"{self._file.name}: tensor {_stored_name(name)} ({name}) is missing")
        stored = self._tensors[name]
        if stored.shape != shape:
            raise ConfigError(
                f"{self._file.name}: {stored.name} has shape {list(stored.shape)}, config.json implies {list(shape)}"
            )
        if len(shape) == 1 and stored.block_type.num_values > 1:
            raise ConfigError(f"{self._file.name}: {stored.name} is a vector, stored as {stored.block_type.name}")

    def tensor(self, name: str, part: TensorSlice | None = None) -> Tensor:
        """A tensor, or a part of it, restored. Raises ConfigError for scales that are not finite."""
        values = self.matrix(name, part).dequantized(self._dtype)
        return values.flatten() if len(self._tensors[name].shape) == 1 else values

    def matrix(self, name: str, part: TensorSlice | None = None) -> StoredMatrix:
        """See TensorSource; a vector is a column. Raises ConfigError for scales that are not finite."""
        stored = self._tensors[name]
        raw = self._file.raw(stored)
        if len(stored.shape) == 1:
            raw = raw.view(stored.shape[0], -1)
        order = self._row_order(name, stored.shape[0])
        rows = slice(part.begin, part.end) if part is not None and part.dim == 0 else slice(None)
        raw = raw[rows] if order is None else raw[order[rows]]
        try:
            matrix = block_matrix(stored.block_type.name, raw)
        except ValueError as error:
            raise ConfigError(f"{self._file.name}: {stored.name} {error}") from error
        return matrix.columns(part.begin, part.end) if part is not None and part.dim == 1 else matrix

    def forget(self, name: str) -> None:
        """Release a tensor that has been copied."""
        self._file.forget(self._tensors[name])

    def fingerprint(self, config: ModelSpec) -> str:
        """Name of this model's computation; covers configuration, names, types, shapes and samples of all tensors."""
        digest = hashlib.sha256(config.digest())
        for name in sorted(self._tensors):
            stored = self._tensors[name]
            digest.update(json.dumps([name, stored.block_type.name, stored.shape]).encode())
            digest.update(self._file.sample(stored))
        return digest.hexdigest()[:32]

    def _row_order(self, name: str, num_rows: int) -> Tensor | None:
        """For each row in Hugging Face's order, its place in the file; None where they are the same."""
        module = name.split(".")[-2]
        if not self._is_reordered or module not in ("q_proj", "k_proj"):
            return None
        num_heads = self._config.num_heads if module == "q_proj" else self._config.num_kv_heads
        # In the file a head's rows alternate between its halves.
        return torch.arange(num_rows).view(num_heads, -1, 2).transpose(1, 2).flatten()


def _stored_name(name: str) -> str:
    """Name in a GGUF file of a tensor's name in Hugging Face's."""
    module, _, kind = name.rpartition(".")
    if not module.startswith("model.layers."):
        return f"{_NAMES.get(module, module)}.{kind}"
    index, _, inner = module.removeprefix("model.layers.").partition(".")
    return f"blk.{index}.{_NAMES.get(inner, inner)}.{kind}"
