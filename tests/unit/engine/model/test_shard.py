"""The shards of all ranks form the model, for every division; impossible divisions are refused by name."""

import random
from dataclasses import replace

import pytest
import torch

from engine.model.config import parse_model_config
from engine.model.parameters import parameter_table
from engine.model.shard import Shard
from engine.model.spec import ModelSpec
from tandem.errors import ConfigError

SIZES = (1, 2, 4, 8)
ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


def config(architecture: str = "LlamaForCausalLM", **values) -> ModelSpec:
    raw = {
        "architectures": [architecture],
        "vocab_size": 97,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 4,
        **values,
    }
    return parse_model_config(raw, {})


def splits(model: ModelSpec, size: int) -> bool:
    kv = model.num_kv_heads
    return not (model.num_heads % size or model.intermediate_size % size or (kv % size and size % kv))


CASES = [
    (size, kv_heads, group, tied, bias)
    for size in SIZES
    for kv_heads in range(1, 17)
    for group in (1, 2, 4, 8)
    for tied in (False, True)
    for bias in (False, True)
]


def test_shard_parts_of_ranks_make_whole_model() -> None:
    rng = random.Random(1)
    divided = 0
    for size, kv_heads, group, tied, bias in CASES:
        architecture = rng.choice(ARCHITECTURES)
        model = config(
            architecture,
            num_attention_heads=kv_heads * group,
            num_key_value_heads=kv_heads,
            intermediate_size=8 * rng.randint(1, 4),
            vocab_size=rng.choice([5, 7, 97, 128]),
            tie_word_embeddings=tied,
            attention_bias=bias,
            mlp_bias=bias,
        )
        if not splits(model, size):
            with pytest.raises(ConfigError, match=f"tensor_parallel_size is {size}"):
                Shard(model, rank=0, size=size)
            continue
        divided += 1
        check_whole(model, [Shard(model, rank=rank, size=size) for rank in range(size)])
    assert divided > 300


def check_whole(model: ModelSpec, shards: list[Shard]) -> None:
    for stored_part in (part for parts in parameter_table(model).values() for part in parts):
        name, shape = stored_part.name, stored_part.shape
        stored = torch.arange(torch.Size(shape).numel()).view(shape)
        holders = [shard for shard in shards if shard.holds(stored_part)]
        parts = [shard.slice(stored_part) for shard in holders]
        if parts[0] is None:
            assert len(holders) == (1 if name.endswith(("o_proj.bias", "down_proj.bias")) else len(shards))
            assert parts == [None] * len(parts)
            continue
        assert len(holders) == len(shards)
        if ".k_proj." in name or ".v_proj." in name:
            parts = parts[:: max(1, len(shards) // model.num_kv_heads)]  # the others hold copies
        slices = [stored.narrow(part.dim, part.begin, part.end - part.begin) for part in parts]
        assert all(piece.shape == part.shape(shape) for piece, part in zip(slices, parts, strict=True))
        assert torch.equal(torch.cat(slices, dim=parts[0].dim), stored), name
    check_heads(model, shards)
    check_vocabulary(model, shards)


def check_heads(model: ModelSpec, shards: list[Shard]) -> None:
    """Each query head finds its own key-value head on its own rank."""
    for shard in shards:
        local = shard.config
        queries, keys, values = map(shard.slice, parameter_table(model)["layers.0.qkv.weight"])
        assert keys == values
        assert keys.end - keys.begin == local.num_kv_heads * model.head_dim
        for head in range(local.num_heads):
            wanted = (queries.begin // model.head_dim + head) // model.group_size
            assert keys.begin // model.head_dim + head // local.group_size == wanted


def check_vocabulary(model: ModelSpec, shards: list[Shard]) -> None:
    rows = shards[0].config.vocab_size
    assert [shard.first_token for shard in shards] == [rank * rows for rank in range(len(shards))]
    assert model.vocab_size <= rows * len(shards) < model.vocab_size + len(shards)


def test_shard_single_rank_is_whole_model() -> None:
    model = config()
    assert Shard(model, rank=0, size=1).config == model


@pytest.mark.parametrize(
    ("changes", "size", "message"),
    [
        ({"num_attention_heads": 6, "num_key_value_heads": 2}, 4, "divide config.json's num_attention_heads.* is 6"),
        ({"intermediate_size": 25}, 2, "divide config.json's intermediate_size, which is 25"),
        ({"num_attention_heads": 12, "num_key_value_heads": 6}, 4, "num_key_value_heads or be a multiple.* are 6"),
    ],
)
def test_shard_indivisible_size_is_refused_by_field(changes, size, message) -> None:
    with pytest.raises(ConfigError, match=message):
        Shard(config(**changes), rank=0, size=size)


def test_shard_config_differs_in_sizes_only() -> None:
    model = config(num_attention_heads=8, num_key_value_heads=2)
    local = Shard(model, rank=3, size=4).config
    assert (local.num_heads, local.num_kv_heads, local.intermediate_size, local.vocab_size) == (2, 1, 6, 25)
    sizes = {"num_heads": 8, "num_kv_heads": 2, "intermediate_size": 24}
    layers = tuple(replace(layer, **sizes) for layer in local.layers)
    assert replace(local, layers=layers, vocab_size=97) == model
