"""GGUF files: every type of block, the order of rows, and hostile containers.

The container is written here by its documentation; references of the block types are the `gguf` package's, where it is
installed.
"""

import struct
import tempfile
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from engine.model.checkpoints.gguf.blocks import block_matrix
from engine.model.checkpoints.gguf.file import GgufFile
from engine.model.checkpoints.gguf.source import GgufSource
from engine.model.config import load_model_config, parse_model_config
from engine.model.dtype import resolve_dtype
from engine.model.parameters import expected_shapes
from engine.model.shard import TensorSlice
from tandem.errors import ConfigError
from tandem.gguf.container import BLOCK_TYPES
from tests.support.engine.paged_harness import Session, load_plain
from tests.support.engine.quantized_writers import FORMATS, write_llama

TOKENS = [5, 17, 3, 80, 41, 8, 8, 96]
NUMBERS = {block_type.name: number for number, block_type in BLOCK_TYPES.items()}
PROJECTIONS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
Stored = tuple[int, tuple[int, ...], bytes]
"""Type, shape with rows first, bytes."""


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def container(
    tensors: Mapping[str, Stored],
    *,
    architecture: str = "llama",
    metadata: bytes = b"",
    num_metadata: int = 0,
    offsets: Mapping[str, int] | None = None,
) -> bytes:
    """A GGUF file; `metadata` is appended to the architecture's, as encoded."""
    header = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), 1 + num_metadata)
    header += text("general.architecture") + struct.pack("<I", 8) + text(architecture) + metadata
    data = b""
    for name, (number, shape, stored) in tensors.items():
        data += b"\0" * (-len(data) % 32)
        header += text(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        header += struct.pack("<IQ", number, (offsets or {}).get(name, len(data)))
        data += stored
    return header + b"\0" * (-len(header) % 32) + data


def float32(values: Tensor) -> Stored:
    return NUMBERS["F32"], tuple(values.shape), values.contiguous().numpy().tobytes()


def random_blocks(type_name: str, rows: int, columns: int, seed: int) -> np.ndarray:
    """Random bytes, uint8 `[rows, bytes]`, whose float16 scales are finite."""
    rng = np.random.default_rng(seed)
    block = BLOCK_TYPES[NUMBERS[type_name]]
    raw = rng.integers(0, 256, (rows, columns // block.num_values, block.num_bytes)).astype(np.uint8)
    scales = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}.get(type_name, (0,))
    for begin in scales:
        values = rng.uniform(0.001, 0.01, raw.shape[:2]).astype(np.float16)
        raw[:, :, begin : begin + 2] = values[:, :, None].view(np.uint8)
    return raw.reshape(rows, -1)


@pytest.mark.parametrize("type_name", [name for name in NUMBERS if name not in ("F32", "F16", "BF16")])
@pytest.mark.parametrize(("rows", "columns"), [(8, 256), (5, 1024)])
def test_gguf_block_types_equal_reference(type_name: str, rows: int, columns: int) -> None:
    gguf = pytest.importorskip("gguf", reason="the reference of ggml's types")
    raw = random_blocks(type_name, rows, columns, seed=rows)
    expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[type_name])
    matrix = block_matrix(type_name, torch.from_numpy(raw))
    assert matrix.shape == (rows, columns)
    assert np.array_equal(matrix.dequantized().numpy(), expected)
    for begin, end in ((0, columns // 2), (columns // 4, columns // 2), (columns - 48, columns)):
        assert np.array_equal(matrix.columns(begin, end).dequantized().numpy(), expected[:, begin:end])


def test_gguf_types_are_those_of_the_package() -> None:
    gguf = pytest.importorskip("gguf", reason="the reference of ggml's types")
    for number, block in BLOCK_TYPES.items():
        assert gguf.GGMLQuantizationType(number).name == block.name
        assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(number)] == (block.num_values, block.num_bytes)


@pytest.mark.parametrize(
    ("type_name", "dtype"), [("F32", torch.float32), ("F16", torch.float16), ("BF16", torch.bfloat16)]
)
def test_gguf_dense_types_are_read_as_they_are(type_name: str, dtype: torch.dtype) -> None:
    values = torch.randn(3, 7, generator=torch.Generator().manual_seed(1)).to(dtype)
    matrix = block_matrix(type_name, values.view(torch.uint8))
    assert torch.equal(matrix.dequantized(), values.float())


def q8_0(seed: int, rows: int, columns: int) -> tuple[np.ndarray, Tensor]:
    """Stored rows, uint8 `[rows, bytes]`, and their values."""
    rng = np.random.default_rng(seed)
    scale = rng.uniform(0.001, 0.01, (rows, columns // 32, 1)).astype(np.float16)
    codes = rng.integers(-128, 128, (rows, columns // 32, 32)).astype(np.int8)
    raw = np.concatenate([scale.view(np.uint8), codes.view(np.uint8)], axis=2).reshape(rows, -1)
    values = codes.astype(np.float32) * scale.astype(np.float32)
    return raw, torch.from_numpy(values.reshape(rows, columns))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Stored]]:
    """A tiny Llama with restored weights, in a folder `dense`, and the tensors of the same as GGUF."""
    from safetensors.torch import save_file

    path = write_llama(tmp_path_factory.mktemp("gguf"), FORMATS["w8a8"])
    dense = load_file(path / "dense" / "model.safetensors")
    stored = {
        "token_embd.weight": float32(dense["model.embed_tokens.weight"]),
        "output_norm.weight": float32(dense["model.norm.weight"]),
        "output.weight": float32(dense["lm_head.weight"]),
        "blk.0.attn_norm.weight": float32(dense["model.layers.0.input_layernorm.weight"]),
        "blk.0.ffn_norm.weight": float32(dense["model.layers.0.post_attention_layernorm.weight"]),
    }
    for seed, (name, short) in enumerate(PROJECTIONS.items()):
        full = f"model.layers.0.{name}.weight"
        rows, columns = dense[full].shape
        raw, dense[full] = q8_0(seed, rows, columns)
        num_heads = {"attn_q": 4, "attn_k": 2}.get(short)
        if num_heads:  # as convert_hf_to_gguf reorders them
            raw = raw.reshape(num_heads, 2, rows // num_heads // 2, -1).swapaxes(1, 2).reshape(rows, -1)
        stored[f"blk.0.{short}.weight"] = (NUMBERS["Q8_0"], (rows, columns), raw.tobytes())
    save_file({name: value.contiguous() for name, value in dense.items()}, path / "dense" / "model.safetensors")
    return path, stored


@pytest.fixture
def folder(llama: tuple[Path, dict[str, Stored]], tmp_path: Path) -> Path:
    """A folder with the dense model's config.json, to put a GGUF file into."""
    (tmp_path / "config.json").write_bytes((llama[0] / "dense" / "config.json").read_bytes())
    return tmp_path


def logits(path: Path) -> Tensor:
    session = Session(load_plain(path))
    return session.logits(session.request(TOKENS), len(TOKENS)).clone()


def test_gguf_llama_has_logits_of_restored_weights(
    llama: tuple[Path, dict[str, Stored]], folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, stored = llama
    (folder / "model-q8_0.gguf").write_bytes(container(stored))
    with caplog.at_level("INFO"):
        assert torch.equal(logits(folder), logits(path / "dense"))
    assert "weights are restored to float32 from GGUF, F32, Q8_0" in caplog.text
    assert load_model_config(folder).weight_format == "GGUF (model-q8_0.gguf)"
    first = load_plain(folder).fingerprint
    number, shape, raw = stored["blk.0.ffn_up.weight"]
    (folder / "model-q8_0.gguf").write_bytes(
        container(stored | {"blk.0.ffn_up.weight": (number, shape, bytes([raw[0] ^ 1]) + raw[1:])})
    )
    assert load_plain(folder).fingerprint != first


def test_gguf_rank_has_its_part_of_restored_weights(llama: tuple[Path, dict[str, Stored]], folder: Path) -> None:
    class LoadingRank:
        def __init__(self, rank: int) -> None:
            self.rank, self.size = rank, 4

    (folder / "model.gguf").write_bytes(container(llama[1]))
    for rank in range(4):
        mine, other = (load_plain(path, group=LoadingRank(rank)) for path in (folder, llama[0] / "dense"))
        for part in ("qkv", "gate_up"):
            assert torch.equal(getattr(mine.layers[0], part).weight, getattr(other.layers[0], part).weight)
        for part in ("output", "down"):
            ours, theirs = getattr(mine.layers[0], part), getattr(other.layers[0], part)
            assert torch.equal(ours._part.weight, theirs._part.weight)


def refused(folder: Path, content: bytes, match: str) -> None:
    (folder / "model.gguf").write_bytes(content)
    with pytest.raises(ConfigError, match=match) as caught:
        load_plain(folder)
    assert "\n" not in str(caught.value)


def test_gguf_wrong_tensors_are_refused_by_name(llama: tuple[Path, dict[str, Stored]], folder: Path) -> None:
    stored = llama[1]
    norm = stored["output_norm.weight"]
    cases: list[tuple[dict[str, Stored], str]] = [
        (
            {"output_norm.weight": (0, (63,), norm[2][:-4])},
            r"output_norm\.weight has shape \[63\], config.json implies",
        ),
        ({"output_norm.weight": (NUMBERS["Q8_0"], (64,), bytes(68))}, "output_norm.weight is a vector, stored as Q8_0"),
        ({"rope_freqs.weight": (0, (8,), bytes(32))}, r"1 tensors do not belong to LlamaForCausalLM.*rope_freqs"),
        ({"blk.0.attn_q.bias": (0, (64,), bytes(256))}, r"1 tensors do not belong .*blk\.0\.attn_q\.bias"),
        (
            {"blk.0.ffn_up.weight": (10, (96, 64), b"")},
            r"'blk\.0\.ffn_up\.weight' has ggml type 10; supported are F32, F16, Q4_0",
        ),
        (
            {"blk.0.ffn_up.weight": (8, (96, 48), b"")},
            r"ffn_up\.weight' has shape \[96, 48\]: rows must be whole blocks",
        ),
        ({"blk.0.ffn_up.weight": (8, (96, 2**60), b"")}, r"ffn_up\.weight' ends at byte"),
        (
            {"blk.0.ffn_up.weight": (8, (96, 64), b"\xff" * (96 * 2 * 34))},
            r"blk\.0\.ffn_up\.weight has scales that are not finite",
        ),
    ]
    for change, match in cases:
        refused(folder, container(stored | change), match)
    missing = {name: value for name, value in stored.items() if name != "blk.0.attn_k.weight"}
    refused(
        folder, container(missing), r"tensor blk\.0\.attn_k\.weight \(model\.layers\.0\.self_attn\.k_proj\.weight\)"
    )
    refused(folder, container(stored, architecture="qwen2"), "general.architecture must be llama, is 'qwen2'")
    refused(folder, container(stored, offsets={"output.weight": 0}), "'output.weight' overlaps another tensor")


ARRAY = struct.pack("<I", 9)


@pytest.mark.parametrize(
    ("spoil", "match"),
    [
        (lambda _: b"", "too short to be a GGUF file"),
        (lambda whole: b"GGML" + whole[4:], "not a GGUF file"),
        (lambda whole: whole[:4] + struct.pack(">I", 3) + whole[8:], "version must be one of"),
        (
            lambda whole: whole[:8] + struct.pack("<Q", 2**63) + whole[16:],
            "has 9223372036854775808 tensors; at most",
        ),
        (
            lambda whole: whole[:16] + struct.pack("<Q", 2**63) + whole[24:],
            "has 9223372036854775808 entries of metadata; at most",
        ),
        (lambda whole: whole[:24] + struct.pack("<Q", 2**63) + whole[32:], "a string has 9223372036854775808 bytes"),
        (lambda whole: whole[:100], "ends within its header"),
        (lambda whole: whole[:-1], "ends at byte"),
    ],
)
def test_gguf_hostile_container_is_refused(
    spoil: Callable[[bytes], bytes], match: str, llama: tuple[Path, dict[str, Stored]], folder: Path
) -> None:
    refused(folder, spoil(container(llama[1])), match)


@pytest.mark.parametrize(
    ("metadata", "match"),
    [
        (ARRAY + struct.pack("<IQ", 4, 2**63), "ends within its header"),  # an array of 2**63 integers
        (ARRAY + struct.pack("<IQ", 8, 2**63), "ends within its header|a text"),  # and of texts
        (ARRAY + (struct.pack("<IQ", 9, 1)) * 6, "nested more than 4 deep"),
        (struct.pack("<I", 99), "unknown type 99"),
        (struct.pack("<I", 8) + struct.pack("<Q", 2) + b"\xff\xff", "not UTF-8"),
        (struct.pack("<II", 4, 0), r"general\.alignment must be an integer in \[1, 1048576\]"),
    ],
)
def test_gguf_hostile_metadata_is_refused(
    metadata: bytes, match: str, llama: tuple[Path, dict[str, Stored]], folder: Path
) -> None:
    content = container(llama[1], metadata=text("general.alignment") + metadata, num_metadata=1)
    refused(folder, content, match)


def test_gguf_every_truncation_is_refused_or_read(tmp_path: Path) -> None:
    whole = container({"output.weight": (0, (2, 8), bytes(64))})
    file = tmp_path / "model.gguf"
    for size in range(len(whole)):
        file.write_bytes(whole[:size])
        with pytest.raises(ConfigError):
            GgufFile(file)
    file.write_bytes(whole)
    read = GgufFile(file)
    assert read.header.tensors["output.weight"].shape == (2, 8)
    read.close()


def test_gguf_in_a_folder_has_to_be_alone_and_needs_a_dtype(
    llama: tuple[Path, dict[str, Stored]], folder: Path
) -> None:
    (folder / "a.gguf").write_bytes(container(llama[1]))
    assert resolve_dtype("auto", str(folder)) == "float16"
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace('"torch_dtype"', '"other"'))
    with pytest.raises(ConfigError, match=r"dtype is missing, and a\.gguf does not state one: set model\.dtype"):
        resolve_dtype("auto", str(folder))
    quantized = '"quantization_config": {"quant_method": "mxfp4"}, "torch_dtype"'
    (folder / "config.json").write_text(config.replace('"torch_dtype"', quantized))
    with pytest.raises(ConfigError, match=r"quantization_config cannot describe a\.gguf"):
        load_plain(folder)
    (folder / "config.json").write_text(config)
    (folder / "b.gguf").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"2 GGUF files \(a\.gguf, …\)"):
        load_plain(folder)
    (folder / "model.safetensors").write_bytes((llama[0] / "dense" / "model.safetensors").read_bytes())
    load_plain(folder)


@settings(max_examples=200, deadline=None)
@given(changes=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), min_size=1, max_size=4))
def test_gguf_any_damage_is_refused_or_read(
    changes: list[tuple[int, int]], llama: tuple[Path, dict[str, Stored]]
) -> None:
    content = bytearray(container(llama[1]))
    for position, value in changes:
        content[position] = value
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.gguf"
        file.write_bytes(content)
        try:
            read = GgufFile(file)
        except ConfigError:
            return
        for tensor in read.header.tensors.values():
            assert read.raw(tensor).numel() == tensor.end - tensor.begin
        read.close()


@pytest.mark.parametrize(
    ("architecture", "short", "changes"),
    [
        ("LlamaForCausalLM", "llama", {"attention_bias": True}),
        ("MistralForCausalLM", "llama", {"sliding_window": None}),
        ("Qwen2ForCausalLM", "qwen2", {"tie_word_embeddings": True}),
        ("Qwen3ForCausalLM", "qwen3", {}),
    ],
)
def test_gguf_tensors_of_every_architecture_have_the_names_and_order_of_the_converter(
    architecture: str, short: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    """Names are those of the `gguf` package; the order of rows is that of llama.cpp's convert_hf_to_gguf."""
    gguf = pytest.importorskip("gguf", reason="the reference of names")
    raw = {
        "architectures": [architecture],
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_hidden_layers": 2,
        "vocab_size": 11,
        "intermediate_size": 48,
        **changes,
    }
    config = parse_model_config(raw, {})
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[short.upper()], 2)
    draw = torch.Generator().manual_seed(5)
    wanted = {name: torch.randn(*shape, generator=draw) for name, shape in expected_shapes(config).items()}
    stored = {}
    for name, value in wanted.items():
        num_heads = {"q_proj": 4, "k_proj": 2}.get(name.split(".")[-2], 0)
        if short == "llama" and num_heads:
            value = value.reshape(num_heads, 2, 4, *value.shape[1:]).swapaxes(1, 2).reshape(value.shape)
        stored[names.get_name(name, try_suffixes=(".weight", ".bias"))] = float32(value)
    file = tmp_path / "model.gguf"
    file.write_bytes(container(stored, architecture=short))
    with closing(GgufFile(file)) as opened:
        source = GgufSource(opened, config, expected_shapes(config), dtype=torch.float32)
        assert source.names == wanted.keys()
        for name, value in wanted.items():
            source.require(name, tuple(value.shape))
            assert torch.equal(source.tensor(name), value), name
            part = TensorSlice(dim=0, begin=2, end=10)
            assert torch.equal(source.tensor(name, part), value[2:10]), name
