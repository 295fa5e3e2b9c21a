"""A quantized checkpoint serves as the dense one of its restored weights does; what is damaged is refused by name."""

import collections
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.backends.options import BackendOptions
from engine.backends.select import select_backend
from engine.kernels.cpu.gemm import Arithmetic
from engine.model.checkpoints.registry import parse_format
from engine.model.checkpoints.restored import RestoredCheckpoint
from engine.model.checkpoints.stored_matrix import StoredMatrix
from engine.model.config import load_model_config
from engine.model.dtype import resolve_dtype
from engine.model.loader import load_model
from tandem.errors import ConfigError
from tests.support.engine.paged_harness import LoadingRank, Session, load_plain, needs, on_kernels
from tests.support.engine.quantized_writers import FORMATS, PROJECTIONS, write_llama

TOKENS = [5, 17, 3, 80, 41, 8, 8, 96]
Q_PROJ = "model.layers.0.self_attn.q_proj"


AS_STORED = dict.fromkeys(
    (
        *("gptq-2", "gptq-3", "gptq-4", "gptq-8", "gptq-v2", "gptq-row", "awq"),
        *("w4a16", "w4a16-zeros", "w8a16", "w8a8", "w8a8-tensor", "w8a8-zeros", "w8-group"),
        *("w3a16", "w5a16", "w6a16", "w7a16", "w4afp8"),
        *("ct-fp8-row", "fp8-tensor", "fp8-row"),
    ),
    len(PROJECTIONS),
) | dict.fromkeys(("nf4", "nf4-nested", "fp4"), 1)  # tables differ, and 64 does not divide all rows
"""How many matrices are kept, of formats of which any are."""


@pytest.fixture
def folder(tmp_path: Path) -> Callable[[str], Path]:
    """Writes a tiny Llama in a format, and returns the folder of the quantized one."""

    def write(name: str) -> Path:
        return write_llama(tmp_path / name, FORMATS[name]) / "quantized"

    return write


def set_config(path: Path, **settings: Any) -> None:
    file = path / "config.json"
    raw = json.loads(file.read_text())
    raw["quantization_config"] |= settings
    file.write_text(json.dumps(raw))


def change(path: Path, **tensors: Tensor | None) -> None:
    """Rewrite the weights with some tensors changed, or dropped when None."""
    file = path / "model.safetensors"
    stored = {name: value.clone() for name, value in load_file(file).items()}
    changed = {name: value for name, value in (stored | tensors).items() if value is not None}
    save_file({name: value.contiguous() for name, value in changed.items()}, file)


def refused(path: Path, match: str) -> None:
    with pytest.raises(ConfigError, match=match) as caught:
        load_plain(path)
    assert "\n" not in str(caught.value)


def logits(path: Path, dtype: str = "float32") -> Tensor:
    session = Session(load_plain(path, dtype=dtype))
    return session.logits(session.request(TOKENS), len(TOKENS)).clone()


@pytest.mark.parametrize("name", FORMATS)
def test_quantized_llama_has_logits_of_restored_weights(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_llama(tmp_path, FORMATS[name])
    with caplog.at_level(logging.INFO):
        found = logits(tmp_path / "quantized")
    assert torch.equal(found, logits(tmp_path / "dense"))
    lines = [line for line in caplog.messages if line.startswith("weights are restored to float32 from ")]
    assert len(lines) == 1
    assert FORMATS[name].mentions in lines[0]
    assert f"{len(PROJECTIONS)} of {len(PROJECTIONS) + 2} matrices" in lines[0]
    assert load_model_config(tmp_path / "quantized").weight_format in lines[0]


def test_quantized_llama_has_logits_of_restored_weights_in_bfloat16(tmp_path: Path) -> None:
    write_llama(tmp_path, FORMATS["w4a16"])
    assert torch.equal(logits(tmp_path / "quantized", "bfloat16"), logits(tmp_path / "dense", "bfloat16"))


@pytest.mark.parametrize("name", ["gptq-3", "nf4"])
def test_quantized_llama_on_cpu_kernels_has_logits_of_restored_weights(name: str, tmp_path: Path) -> None:
    write_llama(tmp_path, FORMATS[name])
    found = []
    for kind in ("quantized", "dense"):
        backend = select_backend(BackendOptions(device=torch.device("cpu"), dtype="float32", num_threads=1))
        session = Session(load_model(tmp_path / kind, backend=backend))
        found.append(session.logits(session.request(TOKENS), len(TOKENS)).clone())
    assert torch.equal(*found)


@pytest.mark.parametrize("name", FORMATS)
def test_quantized_llama_in_bfloat16_is_multiplied_as_stored_where_kernels_can(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    needs(Arithmetic.INT4)
    write_llama(tmp_path, FORMATS[name])
    with caplog.at_level(logging.INFO):
        model = on_kernels(tmp_path / "quantized", "stored")
    restored = on_kernels(tmp_path / "quantized", "none")
    assert model.num_kept == AS_STORED.get(name, 0)
    assert restored.num_kept == 0
    line = f"but {model.num_kept} matrices are multiplied as they are stored"
    assert (line in caplog.messages) == (name in AS_STORED)
    assert (model.weights_bytes < 0.75 * restored.weights_bytes) == (model.num_kept == len(PROJECTIONS))
    session, other = Session(model), Session(restored)
    found = session.logits(session.request(TOKENS), len(TOKENS))
    expected = other.logits(other.request(TOKENS), len(TOKENS))
    # Inputs are in eight bits, by rows or by groups; random zeros make weights so large that attention turns on it.
    bound = 0.25 if name == "w8a8-zeros" else 0.06
    assert (found - expected).square().mean().sqrt() < bound * expected.std()
    assert torch.equal(found, expected) == (name not in AS_STORED)


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_quantized_codes_that_are_no_numbers_are_refused_where_they_are_kept(code: int, tmp_path: Path) -> None:
    needs(Arithmetic.FP8)
    path = write_llama(tmp_path, FORMATS["fp8-row"]) / "quantized"
    name = "model.layers.0.mlp.down_proj.weight"
    codes = load_file(path / "model.safetensors")[name].view(torch.uint8).clone()
    codes[5, 7] = code
    change(path, **{name: codes.view(torch.float8_e4m3fn)})
    with pytest.raises(ConfigError, match=f"checkpoint: {name} has codes that are not finite"):
        on_kernels(path, "stored")


@pytest.mark.parametrize("name", ["awq", "gptq-row", "w8a8"])
def test_quantized_ranks_multiply_their_parts_as_stored(name: str, tmp_path: Path) -> None:
    needs(Arithmetic.INT4)
    path = write_llama(tmp_path, FORMATS[name]) / "quantized"
    whole, ranks = on_kernels(path, "stored"), [on_kernels(path, "stored", rank, 2) for rank in range(2)]
    assert all(rank.num_kept >= whole.num_kept - 1 for rank in ranks)  # a cut through a group restores a matrix
    x = torch.randn(5, 64).bfloat16()
    heads = [layer.qkv(x).clone() for layer in (whole.layers[0], *(rank.layers[0] for rank in ranks))]
    head_dim = whole.config.head_dim
    queries, keys = whole.config.num_heads * head_dim, whole.config.num_kv_heads * head_dim
    parts = [found.split([queries // 2, keys // 2, keys // 2], dim=1) for found in heads[1:]]
    assert torch.equal(heads[0], torch.cat([part for pair in zip(*parts, strict=True) for part in pair], dim=1))
    # Columns cut between the ranks: each multiplies its part, and the sum is the whole but for one more rounding.
    y = torch.randn(5, whole.config.num_heads * head_dim).bfloat16()
    expected = torch.zeros(5, 64).bfloat16()
    whole.layers[0].output(y, expected)
    found = sum(
        rank.layers[0].output._part(part.contiguous()).float() for rank, part in zip(ranks, y.chunk(2, 1), strict=True)
    )
    bound = 0.03 if name == "w8a8" else 0.01  # a row's scale is that of its part
    assert (found - expected.float()).abs().max() <= bound * expected.float().abs().max()


def test_quantized_matrices_are_read_once_and_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: collections.Counter[str] = collections.Counter()
    forgotten: set[str] = set()
    whole, forget = RestoredCheckpoint._whole, RestoredCheckpoint.forget

    def reads(self: RestoredCheckpoint, name: str) -> StoredMatrix:
        read[name] += 1
        return whole(self, name)

    def forgets(self: RestoredCheckpoint, name: str) -> None:
        forgotten.add(name)
        forget(self, name)

    monkeypatch.setattr(RestoredCheckpoint, "_whole", reads)
    monkeypatch.setattr(RestoredCheckpoint, "forget", forgets)
    path = write_llama(tmp_path, FORMATS["w8a8"]) / "quantized"
    for load in (lambda: load_plain(path), lambda: on_kernels(path, "stored"), lambda: on_kernels(path, "none")):
        read.clear()
        forgotten.clear()
        load()
        assert set(read.values()) == {1}
        assert len(read) == len(PROJECTIONS)
        assert read.keys() <= forgotten


@pytest.mark.parametrize("size", [1, 4])
def test_quantized_output_head_is_restored(size: int, tmp_path: Path) -> None:
    write_llama(tmp_path, FORMATS["llm-int8"])
    parts, values = FORMATS["llm-int8"].matrix(np.random.default_rng(7), 97, 64)
    change(tmp_path / "quantized", **{f"lm_head.{part}": value for part, value in parts.items()})
    change(tmp_path / "dense", **{"lm_head.weight": values})
    for rank in range(size):
        group = LoadingRank(rank, size) if size > 1 else None
        mine, other = (load_plain(tmp_path / kind, group=group).head for kind in ("quantized", "dense"))
        assert torch.equal(getattr(mine, "_part", mine).weight, getattr(other, "_part", other).weight)


@pytest.mark.parametrize("name", ["gptq-order", "awq", "w4a16-zeros", "fp8-block", "nf4-nested", "w8a8"])
@pytest.mark.parametrize("size", [2, 4])
def test_quantized_rank_has_its_part_of_restored_weights(name: str, size: int, tmp_path: Path) -> None:
    write_llama(tmp_path, FORMATS[name])
    for rank in range(size):
        mine, other = (load_plain(tmp_path / kind, group=LoadingRank(rank, size)) for kind in ("quantized", "dense"))
        assert mine.weights_bytes == other.weights_bytes
        for ours, theirs in zip(mine.layers, other.layers, strict=True):
            for part in ("qkv", "gate_up"):
                assert torch.equal(getattr(ours, part).weight, getattr(theirs, part).weight)
            for part in ("output", "down"):
                assert torch.equal(getattr(ours, part)._part.weight, getattr(theirs, part)._part.weight)


def test_quantized_fingerprint_covers_stored_bytes_and_settings(folder: Callable[[str], Path]) -> None:
    path = folder("gptq-4")
    first = load_plain(path).fingerprint
    assert load_plain(path, dtype="bfloat16").fingerprint == first
    assert load_plain(path.parent / "dense").fingerprint != first
    set_config(path, damp_percent=0.01)
    assert load_plain(path).fingerprint == first
    set_config(path, checkpoint_format="gptq_v2")
    second = load_plain(path).fingerprint
    assert second != first
    scales = load_file(path / "model.safetensors")[Q_PROJ + ".scales"]
    change(path, **{Q_PROJ + ".scales": scales * 1.01})
    assert load_plain(path).fingerprint not in (first, second)


def test_quantized_dtype_auto_is_stated_or_that_of_dense_tensors(folder: Callable[[str], Path]) -> None:
    path = folder("w4a16")
    assert resolve_dtype("auto", str(path)) == "float16"
    raw = json.loads((path / "config.json").read_text())
    del raw["torch_dtype"]
    (path / "config.json").write_text(json.dumps(raw))
    assert resolve_dtype("auto", str(path)) == "float32"  # embeddings', not that of scales


def test_quantized_surplus_zero_biases_are_ignored_and_others_refused(folder: Callable[[str], Path]) -> None:
    path = folder("gptq-4")
    change(path, **{Q_PROJ + ".bias": torch.zeros(64)})
    load_plain(path)
    change(path, **{Q_PROJ + ".bias": torch.ones(64)})
    refused(path, r"1 tensors do not belong to LlamaForCausalLM .*q_proj\.bias")


def test_quantized_scales_of_activations_are_ignored(folder: Callable[[str], Path]) -> None:
    path = folder("fp8-tensor")
    change(path, **{Q_PROJ + ".input_scale": torch.tensor(0.5)})
    assert torch.equal(logits(path), logits(path.parent / "dense"))
    path = folder("gptq-4")
    change(path, **{Q_PROJ + ".input_scale": torch.tensor(0.5)})
    refused(path, r"1 tensors do not belong to LlamaForCausalLM .*q_proj\.input_scale")


def test_quantized_kv_scales_beside_weights_are_read(folder: Callable[[str], Path]) -> None:
    path = folder("w8a8")
    set_config(path, kv_cache_scheme={"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False})
    change(path, **{"model.layers.0.self_attn.k_scale": torch.tensor([0.25])})
    model = load_plain(path)
    assert model.layers[0].kv_scales is not None
    assert model.layers[0].kv_scales[0].tolist() == [0.25, 0.25]
    set_config(path, kv_cache_scheme={"num_bits": 4, "type": "int"})
    refused(path, "kv_cache_scheme must be static, symmetric fp8")


def test_quantized_config_without_quantized_tensors_is_refused(folder: Callable[[str], Path]) -> None:
    path = folder("gptq-4")
    (path / "model.safetensors").write_bytes((path.parent / "dense" / "model.safetensors").read_bytes())
    refused(path, "quantization_config declares GPTQ, 4 bits, groups of 32, but no tensor is stored that way")


def test_quantized_tensors_without_config_are_refused(folder: Callable[[str], Path]) -> None:
    for name, match in (
        ("w8a8", r"q_proj\.weight is stored as I8"),
        ("gptq-4", r"q_proj\.weight is missing"),
    ):
        path = folder(name)
        raw = json.loads((path / "config.json").read_text())
        del raw["quantization_config"]
        (path / "config.json").write_text(json.dumps(raw))
        refused(path, match)


@pytest.mark.parametrize(
    ("name", "part", "spoil", "match"),
    [
        ("gptq-4", "qweight", lambda t: t[:-1], r"q_proj\.qweight has shape \[7, 64\], config.json implies \[8, 64\]"),
        ("gptq-4", "qweight", lambda t: t.to(torch.int64), r"q_proj\.qweight is stored as I64, not as I32"),
        ("gptq-4", "qzeros", lambda _: None, r"tensor .*q_proj\.qzeros is missing"),
        ("gptq-4", "scales", lambda t: t * float("nan"), r"q_proj\.scales has values that are not finite"),
        ("gptq-4", "scales", lambda t: t.t(), r"q_proj\.scales has shape \[64, 2\]"),
        ("gptq-4", "g_idx", lambda t: t - 1, r"q_proj\.g_idx names groups -1 to 0, there are 2"),
        ("gptq-4", "g_idx", lambda t: t + 1, r"q_proj\.g_idx names groups 1 to 2, there are 2"),
        ("gptq-4", "qweight", lambda _: None, r"q_proj\.weight is missing"),
        ("gptq-order", "g_idx", lambda _: None, r"tensor .*q_proj\.g_idx is missing"),
        ("awq", "qzeros", lambda t: t[:1], r"q_proj\.qzeros has shape \[1, 8\]"),
        ("awq", "scales", lambda t: t / 0, r"q_proj\.scales has values that are not finite"),
        ("w4a16", "weight_shape", lambda t: t + 1, r"weight_shape is \[65, 65\], config.json implies \[64, 64\]"),
        ("w4a16", "weight_packed", lambda t: t[:, 1:], r"weight_packed has shape \[64, 7\]"),
        ("w4a16-order", "weight_g_idx", lambda _: None, r"weight_g_idx is missing"),
        ("w4a16-order", "weight_g_idx", lambda t: t * 2, r"weight_g_idx names groups 0 to 2"),
        ("w4a16-zeros", "weight_zero_point", lambda _: None, r"weight_zero_point is missing"),
        ("w8a8", "weight_scale", lambda t: t[:5], r"weight_scale has shape \[5, 1\], config.json implies \[64, 1\] or"),
        ("w8a8", "weight", lambda t: t.to(torch.uint8), r"q_proj\.weight is stored as U8, not as F32"),
        ("ct-mxfp4", "weight_scale", lambda t: t * 0 + 255, r"weight_scale has scales that are not finite"),
        ("ct-mxfp8", "weight_scale", lambda t: t * 0 + 255, r"weight_scale has scales that are not finite"),
        ("ct-nvfp4", "weight_global_scale", lambda t: t * 0, r"weight_scale has scales that are not finite"),
        ("ct-nvfp4", "weight_global_scale", lambda _: None, r"weight_global_scale is missing"),
        ("ct-nvfp4", "weight_scale", lambda t: t.float(), r"weight_scale is stored as F32, not as F8_E4M3"),
        ("fp8-block", "weight_scale_inv", lambda t: t[1:], r"weight_scale_inv has shape"),
        ("fp8-block", "weight_scale_inv", lambda _: None, r"weight_scale_inv is missing"),
        (
            "fp8-powers",
            "weight_scale_inv",
            lambda t: torch.full(t.shape, 255, dtype=torch.uint8).view(t.dtype),
            r"weight_scale_inv has scales that are not finite",
        ),
        ("fp8-tensor", "weight_scale", lambda t: t * float("inf"), r"weight_scale has values that are not finite"),
        ("nf4", "weight.absmax", lambda t: t[1:], r"weight\.absmax has 63 scales, not one for each block of 64"),
        ("nf4", "weight", lambda t: t[1:], r"q_proj\.weight has shape \[2047, 1\]"),
        ("nf4", "weight.quant_map", lambda _: None, r"weight\.quant_map is missing"),
        ("nf4", "weight.absmax", lambda _: None, r"weight\.absmax is missing"),
        ("nf4-nested", "weight.nested_absmax", lambda _: None, r"nested_absmax is missing"),
        ("nf4-nested", "weight.nested_absmax", lambda t: t[1:], r"nested_absmax has 15 scales"),
        ("sparse-24", "compressed", lambda t: t[:, 1:], r"q_proj\.compressed has shape \[64, 31\]"),
        ("sparse-24", "bitmask", lambda t: t | 1, r"q_proj\.bitmask does not keep 2 of every 4 columns"),
        ("sparse-24", "shape", lambda t: t + 1, r"q_proj\.shape is \[65, 65\], config\.json implies \[64, 64\]"),
        ("aqlm-2x8", "codes", lambda t: t[1:], r"q_proj\.codes has shape \[63, 8, 2\]"),
        ("aqlm-2x8", "codes", lambda t: t.short(), r"q_proj\.codes .*I16"),
        ("aqlm-2x8", "codebooks", lambda _: None, r"q_proj\.codebooks is missing"),
        ("aqlm-2x8", "codebooks", lambda t: t * float("nan"), r"q_proj\.codebooks has values that are not finite"),
        ("aqlm-1x11", "scales", lambda t: t * float("inf"), r"q_proj\.scales has values that are not finite"),
        ("llm-int8", "SCB", lambda _: None, r"q_proj\.SCB is missing"),
        ("llm-int8", "weight_format", lambda t: t + 1, r"weight_format must be 0"),
    ],
)
def test_quantized_damaged_tensors_are_refused_by_name(
    name: str, part: str, spoil: Callable[[Tensor], Tensor | None], match: str, folder: Callable[[str], Path]
) -> None:
    path = folder(name)
    stored = load_file(path / "model.safetensors")[f"{Q_PROJ}.{part}"]
    change(path, **{f"{Q_PROJ}.{part}": spoil(stored)})
    refused(path, match)


@pytest.mark.parametrize(
    ("state", "match"),
    [
        (b"{", "is not valid JSON"),
        (b"[]", "must be a JSON object"),
        (b'{"quant_type": "fp4"}', "quant_type must be one of nf4, is 'fp4'"),
        (b'{"quant_type": "nf4", "shape": [64, 65]}', r"shape is \[64, 65\], config.json implies \[64, 64\]"),
        (b'{"quant_type": "nf4", "shape": [64, 64], "blocksize": 0}', "blocksize must be an integer in"),
        (b'{"quant_type": "nf4", "shape": [64, 64], "blocksize": 32}', "not one for each block of 32"),
    ],
)
def test_bitsandbytes_damaged_state_is_refused(state: bytes, match: str, folder: Callable[[str], Path]) -> None:
    path = folder("nf4")
    name = f"{Q_PROJ}.weight.quant_state.bitsandbytes__nf4"
    change(path, **{name: torch.frombuffer(bytearray(state), dtype=torch.uint8)})
    refused(path, match)


@pytest.mark.parametrize(
    ("name", "settings", "match"),
    [
        ("gptq-4", {"bits": 5}, "bits must be one of 2, 3, 4, 8, is 5"),
        ("gptq-4", {"bits": True}, "bits must be one of"),
        ("gptq-4", {"bits": None}, "bits must be one of 2, 3, 4, 8, is 0"),
        ("gptq-4", {"bits": [4]}, "bits must be one of"),
        ("gptq-4", {"bits": 4.0}, "bits must be one of 2, 3, 4, 8, is 4.0"),
        ("gptq-4", {"group_size": 0}, "group_size must be an integer in"),
        ("gptq-4", {"checkpoint_format": "marlin"}, "checkpoint_format must be one of gptq, gptq_v2, is 'marlin'"),
        ("gptq-4", {"dynamic": {"-:.*": {}}}, "'dynamic' is not a setting of gptq that is supported"),
        ("gptq-4", {"is_marlin_format": True}, "'is_marlin_format' is not a setting of gptq"),
        ("gptq-4", {"desc_act": 1}, "desc_act must be true or false"),
        ("awq", {"bits": 3}, "bits must be one of 4, is 3"),
        ("awq", {"version": "gemv"}, "version must be gemm, is 'gemv'"),
        ("awq", {"checkpoint_format": "gemv_fast"}, "checkpoint_format must be gemm"),
        ("awq", {"zero_point": False}, "zero_point must be true"),
        ("w4a16", {"format": "marlin-24"}, "format must be one of pack-quantized, int-quantized"),
        ("w4a16", {"format": "nvfp4-pack-quantized"}, "type is int, which is not stored as nvfp4-pack-quantized"),
        (
            "ct-nvfp4",
            {"config_groups": {"a": {"weights": {"num_bits": 4, "type": "float", "strategy": "group"}}}},
            "strategy must be one of tensor_group, is 'group'",
        ),
        (
            "ct-mxfp8",
            {"config_groups": {"a": {"weights": {"type": "float", "group_size": 64}}}},
            "group_size must be 32 for mxfp8-quantized, is 64",
        ),
        ("w4a16", {"sparsity_config": {"format": "sparse-24-bitmask"}}, "'sparsity_config' is not a setting of"),
        ("sparse-24", {"sparsity_config": {"format": "sparse-24-bitmask", "x": 1}}, "sparsity_config: 'x' is not a"),
        (
            "sparse-24",
            {"sparsity_config": {"format": "sparse-24-bitmask", "sparsity_structure": "4:8"}},
            "sparsity_structure must be one of 2:4, is '4:8'",
        ),
        ("sparse-24", {"sparsity_config": {"format": "sparse-bitmask"}}, "'sparsity_config' is not a setting of"),
        ("w4a16", {"transform_config": {"config_groups": {}}}, "'transform_config' is not a setting of"),
        ("w4a16", {"quantization_status": "frozen"}, "quantization_status must be one of compressed"),
        ("w4a16", {"config_groups": [1]}, "config_groups must be a non-empty object"),
        ("w4a16", {"config_groups": {"a": {"weights": 3}}}, "config_groups: a: weights must be an object"),
        ("w4a16", {"config_groups": {"a": {"weights": {"num_bits": 9}}}}, "num_bits must be one of 2, 3, .*, 8, is 9"),
        ("w4a16", {"config_groups": {"a": {"weights": {"strategy": "tensor_group"}}}}, "strategy must be one of"),
        ("w4a16", {"config_groups": {"a": {"weights": {"type": "float"}}}}, "type is float, which is not stored as"),
        (
            "w4a16",
            {"config_groups": {bits: {"weights": {"num_bits": int(bits)}} for bits in "48"}},
            "must store all weights alike",
        ),
        ("aqlm-2x8", {"nbits_per_codebook": 17}, r"nbits_per_codebook must be an integer in \[1, 16\], is 17"),
        ("aqlm-2x8", {"in_group_size": 0}, "in_group_size must be an integer in"),
        ("aqlm-2x8", {"num_codebooks": "2"}, "num_codebooks must be an integer in"),
        ("aqlm-2x8", {"beam_size": 1}, "'beam_size' is not a setting of aqlm"),
        ("fp8-block", {"weight_block_size": [0, 4]}, "weight_block_size must be"),
        ("fp8-block", {"weight_block_size": 128}, "weight_block_size must be"),
        ("fp8-block", {"fmt": "e3m4"}, "fmt must be one of e4m3"),
        ("fp8-block", {"activation_scheme": "static", "store_dtype": "x"}, "'store_dtype' is not a setting of fp8"),
        ("nf4", {"bnb_4bit_quant_type": "nf3"}, "bnb_4bit_quant_type must be one of nf4, fp4, is 'nf3'"),
        ("nf4", {"bnb_4bit_quant_storage": "bfloat16"}, "bnb_4bit_quant_storage must be one of uint8"),
        ("nf4", {"load_in_8bit": True}, "load_in_4bit or load_in_8bit must be true, and not both"),
        ("gptq-4", {"quant_method": "torchao"}, "quant_method must be one of aqlm, awq, bitsandbytes, .* is 'torchao'"),
        ("gptq-4", {"quant_method": ["gptq"]}, "quant_method must be one of"),
    ],
)
def test_quantization_settings_not_supported_are_refused_by_name(
    name: str, settings: dict[str, Any], match: str
) -> None:
    with pytest.raises(ConfigError, match=match) as caught:
        parse_format(FORMATS[name].config | settings)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("config.json: quantization_config: ")


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every entry of nested objects: its object and its key."""
    if not isinstance(value, dict):
        return []
    return [(value, key) for key in value] + [place for inner in value.values() for place in places(inner)]


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 300)
    | st.floats(allow_nan=False)
    | st.sampled_from(["", "gptq", "int"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["weights", "a"]), inner, max_size=2),
    max_leaves=4,
)


@settings(max_examples=300, deadline=None)
@given(name=st.sampled_from(sorted(FORMATS)), data=st.data())
def test_quantization_settings_of_any_kind_are_read_or_refused(name: str, data: st.DataObject) -> None:
    config = json.loads(json.dumps(FORMATS[name].config))
    holder, key = data.draw(st.sampled_from(places(config)))
    holder[key] = data.draw(JSON)
    try:
        found = parse_format(config)
    except ConfigError:
        return
    assert found is not None
    assert "\n" not in found.description
    hash(found)
