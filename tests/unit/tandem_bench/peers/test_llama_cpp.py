"""The model that llama.cpp measures is the one that Tandem measures."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tandem_bench.make_model import write_model
from tandem_bench.peers.on_llama_cpp import write_gguf
from tandem_bench.shapes import SHAPES

gguf = pytest.importorskip("gguf")


def test_gguf_of_peer_has_the_model_bit_for_bit(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    write_model(folder, SHAPES["tiny"], dtype="bfloat16")
    write_gguf(folder, tmp_path / "model.gguf")
    stored = {one.name: one for one in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    expected = {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}
    assert len(stored) == len(expected)
    names = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "model.layers.1.self_attn.q_norm.weight": "blk.1.attn_q_norm.weight",
        "model.layers.1.mlp.down_proj.weight": "blk.1.ffn_down.weight",
        "model.layers.0.post_attention_layernorm.weight": "blk.0.ffn_norm.weight",
    }
    for name, written in names.items():
        tensor, found = expected[name], stored[written]
        assert tuple(reversed(found.shape.tolist())) == tuple(tensor.shape)
        if tensor.ndim == 1:
            np.testing.assert_array_equal(found.data, tensor.float().numpy())
        else:
            codes = tensor.view(torch.uint8).numpy()
            np.testing.assert_array_equal(found.data.view(np.uint8).reshape(codes.shape), codes)


def test_gguf_of_peer_refuses_other_families(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ValueError, match="not those of llama"):
        write_gguf(tmp_path, tmp_path / "model.gguf")
