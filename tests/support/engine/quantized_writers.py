"""Writers of quantized checkpoints, by the documented layouts of each format, with random codes.

They stand in for the tools, none of which is needed here: each returns the stored tensors of one matrix and the matrix
itself, computed in numpy from the codes that were drawn, before they are packed. Only what a tool would choose (which
codes, which scales) is random.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

Written = tuple[dict[str, Tensor], Tensor]
"""Stored tensors by what follows `MODULE.`, and the float32 matrix that they mean."""
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def pack_stream(codes: np.ndarray, bits: int) -> np.ndarray:
    """Pack each row of `[rows, count]` as one stream of bits, the first code lowest: int32 `[rows, words]`."""
    num_words = -(-codes.shape[1] * bits // 32)
    rows = []
    for row in codes:
        stream = sum(int(code) << (bits * index) for index, code in enumerate(row))
        rows.append([(stream >> (32 * word)) & 0xFFFFFFFF for word in range(num_words)])
    return np.array(rows, dtype=np.uint32).reshape(len(codes), num_words).view(np.int32)


def scales(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Positive float16 scales, so that stored bits and float32 values are the same numbers."""
    return rng.uniform(0.001, 0.02, shape).astype(np.float16)


def tensor(values: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values))


def gptq(
    rng: np.random.Generator, rows: int, columns: int, *, bits: int, group: int, v2: bool = False, order: bool = False
) -> Written:
    codes = rng.integers(0, 2**bits, (rows, columns))
    num_groups = -(-columns // group)
    zeros = rng.integers(0 if v2 else 1, 2**bits, (rows, num_groups))
    scale = scales(rng, rows, num_groups)
    groups = np.arange(columns) // group
    if order:
        groups = rng.permutation(groups)
    values = (codes - zeros[:, groups]).astype(np.float32) * scale.astype(np.float32)[:, groups]
    parts = {
        "qweight": tensor(pack_stream(codes, bits).T),
        "qzeros": tensor(pack_stream((zeros - (not v2)).T, bits)),
        "scales": tensor(scale.T),
        "g_idx": tensor(groups.astype(np.int32)),
    }
    return parts, tensor(values)


def awq(rng: np.random.Generator, rows: int, columns: int, *, group: int) -> Written:
    codes = rng.integers(0, 16, (rows, columns))
    zeros = rng.integers(0, 16, (rows, columns // group))
    scale = scales(rng, rows, columns // group)
    values = (codes - zeros.repeat(group, 1)).astype(np.float32) * scale.astype(np.float32).repeat(group, 1)

    def packed(of_outputs: np.ndarray) -> Tensor:
        words = np.zeros((of_outputs.shape[0], rows // 8), dtype=np.uint32)
        for nibble, output in enumerate(AWQ_ORDER):
            words |= of_outputs[:, output::8].astype(np.uint32) << np.uint32(4 * nibble)
        return tensor(words.view(np.int32))

    return {"qweight": packed(codes.T), "qzeros": packed(zeros.T), "scales": tensor(scale.T)}, tensor(values)


def aqlm(
    rng: np.random.Generator, rows: int, columns: int, *, bits: int, num_codebooks: int, group: tuple[int, int]
) -> Written:
    tall, wide = group
    codebooks = rng.normal(0, 1, (num_codebooks, 2**bits, tall, wide)).astype(np.float16)
    codes = rng.integers(0, 2**bits, (rows // tall, columns // wide, num_codebooks))
    scale = scales(rng, rows // tall)
    values = np.zeros((rows, columns), np.float32)
    for row in range(rows):
        for column in range(columns):
            entries = (
                codebooks[book, codes[row // tall, column // wide, book], row % tall, column % wide]
                for book in range(num_codebooks)
            )
            values[row, column] = sum(map(np.float32, entries), np.float32(0)) * np.float32(scale[row // tall])
    stored = np.where(codes >= 2 ** (bits - 1), codes - 2**bits, codes)
    parts = {
        "codebooks": tensor(codebooks),
        "codes": tensor(stored.astype(np.int8 if bits <= 8 else np.int16)),
        "scales": tensor(scale.reshape(-1, 1, 1, 1)),
    }
    return parts, tensor(values)


def sparse24(rng: np.random.Generator, rows: int, columns: int) -> Written:
    """compressed-tensors' sparse-24-bitmask."""
    values = rng.normal(0, 0.1, (rows, columns)).astype(np.float16)
    kept = np.zeros((rows, columns), bool)
    for row in kept:
        for begin in range(0, columns, 4):
            row[begin + rng.choice(4, 2, replace=False)] = True
    parts = {
        "compressed": tensor(np.stack([value[mask] for value, mask in zip(values, kept, strict=True)])),
        "bitmask": tensor(np.packbits(kept, axis=1, bitorder="little")),
        "shape": torch.tensor([[rows], [columns]]),
    }
    return parts, tensor(np.where(kept, values, np.float16(0)).astype(np.float32))


def packed_int(
    rng: np.random.Generator,
    rows: int,
    columns: int,
    *,
    bits: int,
    group: int | None,
    symmetric: bool = True,
    order: bool = False,
) -> Written:
    """compressed-tensors' pack-quantized."""
    half = 2 ** (bits - 1)
    size = group or columns
    num_groups = -(-columns // size)
    codes = rng.integers(-half, half, (rows, columns))
    zeros = np.zeros((rows, num_groups), int) if symmetric else rng.integers(-half, half, (rows, num_groups))
    scale = scales(rng, rows, num_groups)
    groups = np.arange(columns) // size
    if order:
        groups = rng.permutation(groups)
    parts = {
        "weight_packed": tensor(pack_stream(codes + half, bits)),
        "weight_scale": tensor(scale),
        "weight_shape": torch.tensor([rows, columns]),
    }
    if not symmetric:
        parts["weight_zero_point"] = tensor(pack_stream((zeros + half).T, bits).T)
    if order:
        parts["weight_g_idx"] = tensor(groups.astype(np.int32))
    values = (codes - zeros[:, groups]).astype(np.float32) * scale.astype(np.float32)[:, groups]
    return parts, tensor(values)


def plain_int8(
    rng: np.random.Generator,
    rows: int,
    columns: int,
    *,
    strategy: str,
    symmetric: bool = True,
    group: int = 32,
    bits: int = 8,
) -> Written:
    """compressed-tensors' int-quantized: codes of fewer bits are in bytes, too."""
    codes = rng.integers(-(2 ** (bits - 1)), 2 ** (bits - 1), (rows, columns)).astype(np.int8)
    shape = {"tensor": (1,), "channel": (rows, 1), "group": (rows, columns // group)}[strategy]
    scale = scales(rng, *shape).astype(np.float32)
    zeros = np.zeros(shape, np.int8) if symmetric else rng.integers(-128, 128, shape).astype(np.int8)

    def spread(of_groups: np.ndarray) -> np.ndarray:
        return of_groups.repeat(group, 1) if strategy == "group" else of_groups

    values = (codes.astype(np.float32) - spread(zeros).astype(np.float32)) * spread(scale)
    parts = {"weight": tensor(codes), "weight_scale": tensor(scale)}
    return parts | ({} if symmetric else {"weight_zero_point": tensor(zeros)}), tensor(values)


def float8(
    rng: np.random.Generator,
    rows: int,
    columns: int,
    *,
    name: str = "weight_scale",
    kind: str = "tensor",
    block: tuple[int, int] = (1, 1),
    dtype: torch.dtype = torch.float8_e4m3fn,
) -> Written:
    codes = torch.from_numpy(rng.normal(0.0, 1.0, (rows, columns)).astype(np.float32)).to(dtype)
    if kind == "powers":
        exponents = rng.integers(115, 125, (-(-rows // block[0]), -(-columns // block[1]))).astype(np.uint8)
        spread = np.exp2(exponents.astype(np.float32) - 127.0).repeat(block[0], 0)[:rows].repeat(block[1], 1)
        return {"weight": codes, name: tensor(exponents).view(torch.float8_e8m0fnu)}, codes.float() * torch.from_numpy(
            spread[:, :columns]
        )
    if kind == "block":
        scale = scales(rng, -(-rows // block[0]), -(-columns // block[1])).astype(np.float32)
        spread = scale.repeat(block[0], 0)[:rows].repeat(block[1], 1)[:, :columns]
    else:
        scale = scales(rng, *{"tensor": (1,), "row": (rows, 1)}[kind]).astype(np.float32)
        spread = scale.reshape(-1, 1)
    return {"weight": codes, name: tensor(scale)}, codes.float() * torch.from_numpy(spread)


def microscaling(rng: np.random.Generator, rows: int, columns: int, *, blocks: bool) -> Written:
    """MXFP4 as gpt-oss (`blocks`) or compressed-tensors stores it."""
    codes = rng.integers(0, 16, (rows, columns))
    exponents = rng.integers(115, 125, (rows, columns // 32)).astype(np.uint8)
    table = np.array([*E2M1, *(-value for value in E2M1)], np.float32)
    values = table[codes] * np.exp2(exponents.astype(np.float32) - 127.0).repeat(32, 1)
    packed = (codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8)
    if blocks:
        packed = packed.reshape(rows, columns // 32, 16)
        return {"weight_blocks": tensor(packed), "weight_scales": tensor(exponents)}, tensor(values)
    return {"weight_packed": tensor(packed), "weight_scale": tensor(exponents)}, tensor(values)


def microscaled8(rng: np.random.Generator, rows: int, columns: int) -> Written:
    """compressed-tensors' mxfp8-quantized."""
    parts, values = float8(rng, rows, columns, kind="powers", block=(1, 32))
    return parts | {"weight_scale": parts["weight_scale"].view(torch.uint8)}, values


def nvfp4(rng: np.random.Generator, rows: int, columns: int) -> Written:
    """compressed-tensors' nvfp4-pack-quantized."""
    codes = rng.integers(0, 16, (rows, columns))
    stored = torch.from_numpy(rng.uniform(1.0, 448.0, (rows, columns // 16)).astype(np.float32)).to(torch.float8_e4m3fn)
    overall = np.float32(rng.uniform(2000.0, 20000.0))
    table = np.array([*E2M1, *(-value for value in E2M1)], np.float32)
    values = table[codes] * (stored.float().numpy() / overall).repeat(16, 1)
    parts = {
        "weight_packed": tensor((codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8)),
        "weight_scale": stored,
        "weight_global_scale": torch.tensor([float(overall)]),
    }
    return parts, tensor(values)


def bitsandbytes4(rng: np.random.Generator, rows: int, columns: int, *, nested: bool, kind: str = "nf4") -> Written:
    block, nested_block = 64, 4
    count = rows * columns
    codes = rng.integers(0, 16, count)
    table = np.sort(rng.uniform(-1.0, 1.0, 16)).astype(np.float32)
    num_blocks = -(-count // block)
    state: dict[str, Any] = {
        "quant_type": kind,
        "blocksize": block,
        "dtype": "bfloat16",
        "shape": [rows, columns],
    }
    parts = {"weight.quant_map": tensor(table)}
    if nested:
        levels = np.sort(rng.uniform(-0.5, 0.5, 256)).astype(np.float32)
        stored = rng.integers(0, 256, num_blocks).astype(np.uint8)
        outer = rng.uniform(0.1, 0.2, -(-num_blocks // nested_block)).astype(np.float32)
        state |= {"nested_blocksize": nested_block, "nested_dtype": "float32", "nested_offset": 0.25}
        absmax = levels[stored] * outer[np.arange(num_blocks) // nested_block] + np.float32(0.25)
        parts["weight.absmax"] = tensor(stored)
        parts |= {"weight.nested_absmax": tensor(outer), "weight.nested_quant_map": tensor(levels)}
    else:
        absmax = rng.uniform(0.05, 0.3, num_blocks).astype(np.float32)
        parts["weight.absmax"] = tensor(absmax)
    pairs = np.concatenate([codes, np.zeros(count % 2, int)])
    parts["weight"] = tensor((pairs[::2] << 4 | pairs[1::2]).astype(np.uint8)[:, None])
    text = np.frombuffer(json.dumps(state).encode(), np.uint8)
    parts[f"weight.quant_state.bitsandbytes__{kind}"] = tensor(text.copy())
    return parts, tensor((table[codes] * absmax[np.arange(count) // block]).reshape(rows, columns))


def llm_int8(rng: np.random.Generator, rows: int, columns: int) -> Written:
    codes = rng.integers(-127, 128, (rows, columns)).astype(np.int8)
    largest = rng.uniform(0.1, 0.5, rows).astype(np.float32)
    values = codes.astype(np.float32) * (largest / np.float32(127.0))[:, None]
    format_code = torch.tensor(0, dtype=torch.uint8)
    return {"weight": tensor(codes), "SCB": tensor(largest), "weight_format": format_code}, tensor(values)


def _compressed(layout: str, inputs: dict[str, Any] | None = None, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


def _gptq(**settings: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False, **settings}


def _nf4(**settings: Any) -> dict[str, Any]:
    return {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "load_in_8bit": False,
        "bnb_4bit_quant_type": "nf4",
        **settings,
    }


@dataclass(frozen=True)
class WrittenFormat:
    """A format with its settings: what config.json says, and what writes a matrix."""

    config: dict[str, Any]
    write: Callable[..., Written]
    options: dict[str, Any] = field(default_factory=dict)
    mentions: str = ""
    """Text that the log has to contain."""

    def matrix(self, rng: np.random.Generator, rows: int, columns: int) -> Written:
        return self.write(rng, rows, columns, **self.options)


_INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
_TOKENS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
_FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True}
FORMATS: dict[str, WrittenFormat] = {
    **{
        f"gptq-{bits}": WrittenFormat(_gptq(bits=bits), gptq, {"bits": bits, "group": 32}, f"GPTQ, {bits} bits")
        for bits in (2, 3, 4, 8)
    },
    "gptq-order": WrittenFormat(
        _gptq(desc_act=True), gptq, {"bits": 4, "group": 32, "order": True}, "activation order"
    ),
    "gptq-v2": WrittenFormat(_gptq(checkpoint_format="gptq_v2"), gptq, {"bits": 4, "group": 32, "v2": True}),
    "gptq-row": WrittenFormat(_gptq(group_size=-1), gptq, {"bits": 4, "group": 2**20}, "one scale per row"),
    "awq": WrittenFormat(
        {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
        awq,
        {"group": 32},
        "AWQ, 4 bits, groups of 32",
    ),
    "w4a16": WrittenFormat(
        _compressed("pack-quantized", num_bits=4, type="int", symmetric=True, strategy="group", group_size=32),
        packed_int,
        {"bits": 4, "group": 32},
        "compressed-tensors pack-quantized, 4 bits",
    ),
    "w4a16-zeros": WrittenFormat(
        _compressed("pack-quantized", num_bits=4, type="int", symmetric=False, strategy="group", group_size=32),
        packed_int,
        {"bits": 4, "group": 32, "symmetric": False},
    ),
    "w4a16-order": WrittenFormat(
        _compressed(
            "pack-quantized", num_bits=4, type="int", symmetric=True, strategy="group", group_size=32, actorder="group"
        ),
        packed_int,
        {"bits": 4, "group": 32, "order": True},
    ),
    "w8a16": WrittenFormat(
        _compressed("pack-quantized", num_bits=8, type="int", symmetric=True, strategy="channel"),
        packed_int,
        {"bits": 8, "group": None},
    ),
    **{
        f"w{bits}a16": WrittenFormat(
            _compressed(
                "pack-quantized", num_bits=bits, type="int", symmetric=bits > 5, strategy="group", group_size=32
            ),
            packed_int,
            {"bits": bits, "group": 32, "symmetric": bits > 5},
            f"compressed-tensors pack-quantized, {bits} bits",
        )
        for bits in (3, 5, 6, 7)
    },
    "w8a8": WrittenFormat(
        _compressed("int-quantized", _TOKENS, **_INT8), plain_int8, {"strategy": "channel"}, "int-quantized"
    ),
    "w8a8-tensor": WrittenFormat(
        _compressed("int-quantized", _TOKENS, **_INT8 | {"strategy": "tensor"}), plain_int8, {"strategy": "tensor"}
    ),
    "w8": WrittenFormat(_compressed("int-quantized", **_INT8), plain_int8, {"strategy": "channel"}),
    "w8a8-zeros": WrittenFormat(
        _compressed("int-quantized", _TOKENS, **_INT8 | {"symmetric": False}),
        plain_int8,
        {"strategy": "channel", "symmetric": False},
    ),
    "w8-group": WrittenFormat(
        _compressed("naive-quantized", **_INT8 | {"strategy": "group", "group_size": 32}),
        plain_int8,
        {"strategy": "group"},
    ),
    "ct-fp8-row": WrittenFormat(
        _compressed("float-quantized", **_FLOAT8, strategy="channel"), float8, {"kind": "row"}, "float-quantized"
    ),
    "ct-fp8-block": WrittenFormat(
        _compressed("float-quantized", **_FLOAT8, strategy="block", block_structure=[16, 24]),
        float8,
        {"kind": "block", "block": (16, 24)},
    ),
    "ct-mxfp4": WrittenFormat(
        _compressed("mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32),
        microscaling,
        {"blocks": False},
    ),
    "ct-mxfp8": WrittenFormat(
        _compressed("mxfp8-quantized", num_bits=8, type="float", strategy="group", group_size=32),
        microscaled8,
        {},
        "compressed-tensors mxfp8-quantized, 8 bits, groups of 32",
    ),
    "ct-nvfp4": WrittenFormat(
        _compressed("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16),
        nvfp4,
        {},
        "compressed-tensors nvfp4-pack-quantized, 4 bits, groups of 16",
    ),
    "w4afp8": WrittenFormat(
        _compressed(
            "int-quantized", _TOKENS | {"type": "float"}, num_bits=4, type="int", strategy="group", group_size=32
        ),
        plain_int8,
        {"strategy": "group", "bits": 4},
        "compressed-tensors int-quantized, 4 bits",
    ),
    "fp8-tensor": WrittenFormat({"quant_method": "fp8", "activation_scheme": "static"}, float8, {}, "FP8, scales of"),
    "fp8-row": WrittenFormat({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, float8, {"kind": "row"}),
    "fp8-block": WrittenFormat(
        {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [24, 40]},
        float8,
        {"name": "weight_scale_inv", "kind": "block", "block": (24, 40)},
        "FP8, blocks of 24×40",
    ),
    "fp8-powers": WrittenFormat(
        {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [16, 32]},
        float8,
        {"name": "weight_scale_inv", "kind": "powers", "block": (16, 32)},
    ),
    "fp8-e5m2": WrittenFormat({"quant_method": "fp8", "fmt": "e5m2"}, float8, {"dtype": torch.float8_e5m2}),
    "mxfp4": WrittenFormat({"quant_method": "mxfp4"}, microscaling, {"blocks": True}, "MXFP4"),
    "sparse-24": WrittenFormat(
        {
            "quant_method": "compressed-tensors",
            "format": "dense",
            "config_groups": {},
            "sparsity_config": {"format": "sparse-24-bitmask", "sparsity_structure": "2:4", "targets": ["Linear"]},
        },
        sparse24,
        {},
        "compressed-tensors sparse-24-bitmask",
    ),
    "aqlm-2x8": WrittenFormat(
        {"quant_method": "aqlm", "num_codebooks": 2, "nbits_per_codebook": 8},
        aqlm,
        {"bits": 8, "num_codebooks": 2, "group": (1, 8)},
        "AQLM, 2 codebooks of 8 bits, groups of 1×8",
    ),
    "aqlm-1x11": WrittenFormat(
        {"quant_method": "aqlm", "out_group_size": 2, "in_group_size": 4, "nbits_per_codebook": 11},
        aqlm,
        {"bits": 11, "num_codebooks": 1, "group": (2, 4)},
    ),
    "nf4": WrittenFormat(_nf4(), bitsandbytes4, {"nested": False}, "bitsandbytes NF4"),
    "nf4-nested": WrittenFormat(_nf4(bnb_4bit_use_double_quant=True), bitsandbytes4, {"nested": True}),
    "fp4": WrittenFormat(_nf4(bnb_4bit_quant_type="fp4"), bitsandbytes4, {"nested": False, "kind": "fp4"}),
    "llm-int8": WrittenFormat(
        {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_threshold": 6.0}, llm_int8, {}, "LLM.int8"
    ),
}

_HIDDEN, _INNER, _VOCAB, _HEADS, _KV_HEADS, _HEAD_DIM = 64, 96, 97, 4, 2, 16
PROJECTIONS = {
    "self_attn.q_proj": (_HEADS * _HEAD_DIM, _HIDDEN),
    "self_attn.k_proj": (_KV_HEADS * _HEAD_DIM, _HIDDEN),
    "self_attn.v_proj": (_KV_HEADS * _HEAD_DIM, _HIDDEN),
    "self_attn.o_proj": (_HIDDEN, _HEADS * _HEAD_DIM),
    "mlp.gate_proj": (_INNER, _HIDDEN),
    "mlp.up_proj": (_INNER, _HIDDEN),
    "mlp.down_proj": (_HIDDEN, _INNER),
}


NUM_EXPERTS = 3
_EXPERT = {"w1": (_INNER, _HIDDEN), "w3": (_INNER, _HIDDEN), "w2": (_HIDDEN, _INNER)}
_EXPERTS = "block_sparse_moe.experts"
EXPERT_MATRICES = {name: shape for name, shape in PROJECTIONS.items() if not name.startswith("mlp.")} | {
    f"{_EXPERTS}.{index}.{name}": shape for index in range(NUM_EXPERTS) for name, shape in _EXPERT.items()
}


def write_mixtral(path: Path, written: WrittenFormat) -> Path:
    """Write a tiny Mixtral likewise; its router is stored dense, as tools do."""
    return write_llama(path, written, matrices=EXPERT_MATRICES, architecture="MixtralForCausalLM")


def write_llama(
    path: Path,
    written: WrittenFormat,
    *,
    num_layers: int = 1,
    seed: int = 0,
    matrices: dict[str, tuple[int, int]] = PROJECTIONS,
    architecture: str = "LlamaForCausalLM",
) -> Path:
    """Write a tiny Llama to `path/quantized`, and the same with restored weights to `path/dense`. Returns `path`."""
    rng = np.random.default_rng(seed)
    shared: dict[str, Tensor] = {
        "model.embed_tokens.weight": tensor(rng.normal(0, 0.5, (_VOCAB, _HIDDEN)).astype(np.float32)),
        "lm_head.weight": tensor(rng.normal(0, 0.2, (_VOCAB, _HIDDEN)).astype(np.float32)),
        "model.norm.weight": tensor(rng.normal(1, 0.1, _HIDDEN).astype(np.float32)),
    }
    stored: dict[str, Tensor] = {}
    dense: dict[str, Tensor] = {}
    for layer in range(num_layers):
        prefix = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shared[f"{prefix}{norm}.weight"] = tensor(rng.normal(1, 0.1, _HIDDEN).astype(np.float32))
        if matrices is EXPERT_MATRICES:
            router = rng.normal(0, 0.3, (NUM_EXPERTS, _HIDDEN)).astype(np.float32)
            shared[f"{prefix}block_sparse_moe.gate.weight"] = tensor(router)
        for name, (rows, columns) in matrices.items():
            parts, values = written.matrix(rng, rows, columns)
            stored |= {f"{prefix}{name}.{part}": value for part, value in parts.items()}
            dense[f"{prefix}{name}.weight"] = values
    config = {
        "architectures": [architecture],
        "num_local_experts": NUM_EXPERTS,
        "hidden_size": _HIDDEN,
        "intermediate_size": _INNER,
        "num_hidden_layers": num_layers,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "vocab_size": _VOCAB,
        "max_position_embeddings": 64,
        "torch_dtype": "float16",
        "eos_token_id": 2,
    }
    for name, tensors, settings in (
        ("quantized", stored, {"quantization_config": written.config}),
        ("dense", dense, {}),
    ):
        folder = path / name
        folder.mkdir(parents=True)
        save_file({key: value.contiguous() for key, value in (shared | tensors).items()}, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(config | settings))
    return path
