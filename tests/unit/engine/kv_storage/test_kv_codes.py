"""KV caches in codes: bytes, codes within their format's bounds, and engines that answer alike with them."""

import logging
import random
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.assembly import assemble
from engine.backends.options import BackendOptions
from engine.backends.select import select_backend
from engine.kv_storage.kv_codes import group_codes, head_codes, restored, token_codes
from engine.kv_storage.paged_cache import PagedKVCache
from engine.model.config import parse_model_config
from engine.model.loader import load_model
from engine.model.memory_budget import estimate_workspace_bytes, kv_layout, plan_memory
from engine.model.parallel_group import SoloGroup
from engine.types.request import BlockTable
from tandem.errors import ConfigError
from tandem.values.kv_layout import QUANTISED_DTYPES, KVLayout
from tests.support.engine.paged_harness import (
    Session,
    load_plain,
    random_tokens,
    reference_logits,
    reference_model,
)
from tests.unit.engine.test_assembly import SPEC

CPU = torch.device("cpu")


def layout(dtype, **more):
    values = {"num_layers": 3, "num_kv_heads": 2, "head_dim": 8, "block_size": 4}
    return KVLayout(model_fingerprint="f", dtype=dtype, **values | more)


def backend(**options):
    return select_backend(BackendOptions(num_threads=1, **{"device": CPU, "dtype": "float32", **options}))


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """Model directories by architecture; Mistral's with a sliding window."""
    made = {}
    for name in ("Qwen3ForCausalLM", "MistralForCausalLM"):
        made[name] = tmp_path_factory.mktemp(name)
        window = {"sliding_window": 12} if name.startswith("Mistral") else {}
        reference_model(name, **window).save_pretrained(made[name])
    return made


# What it takes.


def test_kv_layout_block_bytes_follow_dtype():
    real = {"num_layers": 36, "num_kv_heads": 8, "head_dim": 128, "block_size": 16}
    plain, fp8, int8 = (layout(dtype, **real) for dtype in ("bfloat16", "fp8_e4m3", "int8"))
    assert plain.block_bytes == 2 * fp8.block_bytes == 36 * 2 * 8 * 16 * 128 * 2
    assert int8.layer_block_bytes == 2 * 8 * 16 * (128 + 4)
    assert int8.scale_offset == 2 * 8 * 16 * 128
    odd = layout("int8", num_kv_heads=1, head_dim=6)
    assert odd.scale_offset == 64
    assert odd.layer_block_bytes == 128
    for size in (2, 6, 40, 80, 128):
        assert layout("int8", head_dim=size).layer_block_bytes % 64 == 0
        assert (
            layout("fp8_e4m3", head_dim=size).layer_block_bytes * 4
            == layout("float32", head_dim=size).layer_block_bytes
        )


@pytest.mark.parametrize("head_dim", [64, 128])
def test_int4_holds_more_than_three_times_the_sequences_of_bfloat16(head_dim):
    context, held = 4096, {}
    for dtype in ("bfloat16", "int4"):
        kv = layout(dtype, num_layers=24, num_kv_heads=8, head_dim=head_dim, block_size=32)
        budget = plan_memory(
            limit_bytes=64 << 30, weights_bytes=1 << 30, workspace_bytes=1 << 28, layout=kv, max_context=context
        )
        held[dtype] = budget.num_blocks // (context // kv.block_size)
    assert held["int4"] >= 3.5 * held["bfloat16"] > 3.5 * 50
    assert layout("int4", head_dim=head_dim).scale_offset == 2 * 2 * 4 * head_dim // 2


def test_kv_layouts_of_different_dtypes_mismatch():
    assert layout("int8").mismatch(layout("int8")) is None
    assert layout("int8").mismatch(layout("bfloat16")) == "dtype: int8 here, bfloat16 there"
    assert layout("int8").mismatch(layout("fp8_e4m3")) == "dtype: int8 here, fp8_e4m3 there"


def test_kv_codes_double_the_number_of_blocks():
    config = parse_model_config(
        {
            "architectures": ["Qwen3ForCausalLM"],
            "hidden_size": 1024,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "num_hidden_layers": 4,
            "vocab_size": 1000,
            "intermediate_size": 64,
            "head_dim": 128,
        },
        {},
    )
    held = {}
    for kv_dtype in ("auto", *QUANTISED_DTYPES):
        kv = kv_layout(config, fingerprint="f", dtype="bfloat16", block_size=16, kv_dtype=kv_dtype)
        budget = plan_memory(
            limit_bytes=1 << 30, weights_bytes=1 << 28, workspace_bytes=1 << 20, layout=kv, max_context=64
        )
        held[kv_dtype] = budget.num_blocks
    assert abs(held["fp8_e4m3"] - 2 * held["auto"]) <= 1
    assert held["int8"] == pytest.approx(held["auto"] * 256 / 132, rel=1e-3)
    bounds = {"dtype": "bfloat16", "max_batch_tokens": 64, "max_num_seqs": 2, "max_context": 512}
    assert estimate_workspace_bytes(config, **bounds, kv_dtype="int8") > estimate_workspace_bytes(config, **bounds)


@pytest.mark.parametrize("dtype", QUANTISED_DTYPES)
def test_int8_block_with_scales_is_contiguous(dtype):
    kv = layout(dtype)
    cache = PagedKVCache(kv, num_blocks=5)
    assert cache.size_bytes == cache.host_view().nbytes == 5 * kv.block_bytes
    assert not any(cache.host_view())
    cache.layer(2)[3].view(torch.uint8).fill_(7)
    if dtype != "fp8_e4m3":
        cache.layer_scales(2)[3].fill_(0.5)
    begin = (2 * 5 + 3) * kv.layer_block_bytes
    mine = bytes(cache.host_view()[begin : begin + kv.layer_block_bytes])
    assert sum(bytes(cache.host_view())) == sum(mine) > 0
    copies = torch.tensor([[3, 0], [3, 4]])
    cache.copy_blocks(*copies.unbind(1))
    for block in (0, 4):
        begin = (2 * 5 + block) * kv.layer_block_bytes
        assert bytes(cache.host_view()[begin : begin + kv.layer_block_bytes]) == mine
    assert cache.serves(torch.bfloat16)
    assert cache.serves(torch.float32)


# What it costs in accuracy.


def test_kv_codes_error_is_within_format_bounds():
    torch.manual_seed(0)
    values = torch.randn(500, 64) * torch.logspace(-6, 6, 500)[:, None]
    codes, scales = token_codes(values)
    peak = values.abs().amax(-1, keepdim=True)
    assert ((restored(codes, scales, torch.float32) - values).abs() <= peak / 254 * 1.00001).all()
    assert codes.abs().amax(-1).eq(127).all()
    codes, scales = token_codes(torch.tensor([[0.0, 0.0], [1e-38, -1e-35]]))
    assert not codes.any()
    for scale in (1.0, 0.03):
        given = torch.full((500,), scale)
        found = restored(head_codes(values, given), given, torch.float32)
        limited = values.clamp(-448 * scale, 448 * scale)
        bound = torch.maximum(limited.abs() / 16, torch.tensor(2.0**-10 * scale))
        assert ((found - limited).abs() <= bound * 1.00001).all()


@pytest.mark.parametrize("head_dim", [2, 40, 64, 96, 256])
def test_int4_error_is_within_half_a_step(head_dim):
    torch.manual_seed(head_dim)
    values = torch.randn(500, head_dim) * torch.logspace(-6, 6, 500)[:, None] + torch.linspace(-3, 3, 500)[:, None]
    codes, scales = group_codes(values)
    assert codes.shape == (500, head_dim // 2)
    assert scales.shape == (500, -(-head_dim // 64), 2)
    found = restored(codes, scales, torch.float32)
    for i, group in enumerate(values.split(64, -1)):
        low, high = group.amin(-1, keepdim=True), group.amax(-1, keepdim=True)
        off = found[:, 64 * i : 64 * i + group.shape[1]] - group
        # Half a step, what rounding the minimum costs, and the last step's rounding at the upper end.
        assert (off.abs() <= (high - low) * (1 / 30 + 1 / 256) + low.abs() / 256).all()
    codes, scales = group_codes(torch.tensor([[0.0, -0.0], [1e-38, -1e-35], [-3.4e38, 3.4e38]]))
    assert codes[:, 0].tolist() == [0, 0, 0xF0]
    assert not scales[:2].view(torch.int16).any()
    assert scales.isfinite().all()


def test_int4_codes_of_one_token_do_not_depend_on_others():
    values = torch.randn(7, 3, 128)
    codes, scales = group_codes(values)
    for i in range(7):
        alone = group_codes(values[i : i + 1])
        assert torch.equal(alone[0], codes[i : i + 1])
        assert torch.equal(alone[1], scales[i : i + 1])


def test_kv_codes_round_one_quotient():
    peaks = torch.arange(128, 256).bfloat16().float()
    codes, _ = token_codes(torch.stack([peaks, peaks / 3], 1))
    quotients = (torch.full_like(peaks, 127.0).numpy() / peaks.numpy()) * (peaks / 3).numpy()
    assert codes[:, 1].tolist() == quotients.round().tolist()
    assert token_codes(torch.tensor([[2.546875, 1.2734375]]))[0].tolist() == [[127, 64]]  # 63.500004


@pytest.mark.parametrize(("kv_dtype", "bound"), [("int8", 0.03), ("fp8_e4m3", 0.2), ("int4", 0.4)])
@pytest.mark.parametrize("name", ["Qwen3ForCausalLM", "MistralForCausalLM"])
def test_kv_codes_logits_stay_close_to_plain(paths, name, kv_dtype, bound):
    model = load_plain(paths[name])
    tokens = random_tokens(random.Random(0), 60)
    logits = {}
    for cache in ("auto", kv_dtype):
        session = Session(model, block_size=16, kv_dtype=cache)
        logits[cache] = session.logits(session.request(tokens), 60)
    error = (logits[kv_dtype] - logits["auto"]).square().mean().sqrt() / logits["auto"].std()
    assert 0.0 < error < bound


# All ranks answer alike.


def answers(model, kv_dtype, *, chunk, together, seed=0):
    """Greedy tokens after six prompts."""
    session = Session(model, num_blocks=80, block_size=16, seed=seed, kv_dtype=kv_dtype)
    requests = [session.request(random_tokens(random.Random(i), 5 + 9 * i)) for i in range(6)]
    rng = random.Random(seed) if together else None
    for group in [requests] if together else [[r] for r in requests]:
        session.run(group, 16, chunk=chunk, rng=rng)
    return [list(r.token_ids)[: r.num_prompt_tokens + 16] for r in requests]


@pytest.mark.parametrize("kv_dtype", QUANTISED_DTYPES)
@pytest.mark.parametrize("name", ["Qwen3ForCausalLM", "MistralForCausalLM"])
def test_kv_codes_tokens_are_independent_of_batch_and_kernels(paths, name, kv_dtype):
    plain = load_plain(paths[name])
    expected = answers(plain, kv_dtype, chunk=100, together=False)
    assert expected == answers(plain, kv_dtype, chunk=7, together=True, seed=1)
    compiled = load_model(paths[name], backend=backend(kv_dtype=kv_dtype))
    assert compiled.backend.name != "torch"
    assert expected == answers(compiled, kv_dtype, chunk=100, together=False)
    assert expected == answers(compiled, kv_dtype, chunk=9, together=True, seed=2)


@pytest.mark.parametrize("kv_dtype", QUANTISED_DTYPES)
def test_kv_codes_copied_blocks_continue_equally(paths, kv_dtype):
    model = load_model(paths["Qwen3ForCausalLM"], backend=backend(kv_dtype=kv_dtype))
    session = Session(model, block_size=16, kv_dtype=kv_dtype)
    first, second = (session.request(random_tokens(random.Random(1), 40)) for _ in range(2))
    session.run([first], 1, chunk=64)
    blocks = [torch.tensor(list(request.block_table)) for request in (first, second)]
    session.cache.copy_blocks(*blocks)
    second.num_computed_tokens = first.num_computed_tokens
    second.token_ids.append(first.token_ids[-1])
    session.run([first], 12, chunk=64)
    session.run([second], 12, chunk=64)
    assert first.token_ids == second.token_ids


@pytest.mark.parametrize("kv_dtype", ["int8", "int4"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kv_codes_deterministic_cache_is_bitwise_reproducible(paths, dtype, kv_dtype):
    model = load_model(paths["Qwen3ForCausalLM"], backend=backend(dtype=dtype, kv_dtype=kv_dtype, deterministic=True))
    tokens = random_tokens(random.Random(2), 45)
    seen = []
    for cuts in ([45], [1] * 45, [17, 1, 1, 20, 6]):
        session = Session(model, block_size=16, kv_dtype=kv_dtype)
        request = session.request(tokens)
        logits = torch.cat([session.logits(request, n) for n in cuts])
        blocks = torch.tensor(list(request.block_table)[:3])
        scales = torch.stack([session.cache.layer_scales(i)[blocks] for i in range(3)])
        seen.append((logits, session.cache.tensor[:, blocks].clone(), scales))
    for other in seen[1:]:
        assert all(torch.equal(a, b) for a, b in zip(seen[0], other, strict=True))


@pytest.mark.parametrize("kv_dtype", ["int8", "int4"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kv_codes_logits_behind_a_cached_prefix_are_those_of_the_whole_prompt(paths, dtype, kv_dtype):
    model = load_model(paths["Qwen3ForCausalLM"], backend=backend(dtype=dtype, kv_dtype=kv_dtype, deterministic=True))
    session = Session(model, block_size=16, kv_dtype=kv_dtype)
    tokens = random_tokens(random.Random(4), 45)
    expected = session.logits(session.request(tokens), 45)
    # Another prompt wrote the two blocks that both begin with, in other chunks, and went on otherwise.
    other = session.request([*tokens[:32], *random_tokens(random.Random(5), 13)])
    for count in (7, 1, 24, 13):
        session.logits(other, count)
    hit = session.request(tokens)
    hit.block_table = BlockTable([*list(other.block_table)[:2], *list(hit.block_table)[2:]])
    hit.num_computed_tokens = 32
    found = torch.cat([session.logits(hit, count) for count in (1, 12)])
    assert torch.equal(found, expected[32:])


# Scales that come with a model.


def with_scales(path, target, scales):
    """A copy of a model directory whose checkpoint has KV scales."""
    for file in path.iterdir():
        if file.suffix != ".safetensors":
            (target / file.name).write_bytes(file.read_bytes())
    save_file(load_file(path / "model.safetensors") | scales, target / "model.safetensors")
    return target


def test_kv_codes_scales_come_from_checkpoint(paths, tmp_path):
    path = paths["Qwen3ForCausalLM"]
    scales = {
        "model.layers.0.self_attn.k_scale": torch.tensor(0.25),
        "model.layers.0.self_attn.v_scale": torch.tensor([0.5, 4.0]),
        "model.layers.2.self_attn.k_proj.k_scale": torch.tensor([2.0]),
    }
    target = with_scales(path, tmp_path, scales)
    model = load_plain(target)
    found = model.attention_spec.kv_scales
    assert found.tolist() == [[[0.25, 0.25], [0.5, 4.0]], [[1.0, 1.0], [1.0, 1.0]], [[2.0, 2.0], [1.0, 1.0]]]
    assert load_plain(path).attention_spec.kv_scales is None
    assert model.fingerprint != load_plain(path).fingerprint
    tokens = random_tokens(random.Random(0), 30)
    session = Session(model, block_size=16, kv_dtype="fp8_e4m3")
    session.logits(session.request(tokens), 30)
    plain = Session(load_plain(path), block_size=16, kv_dtype="fp8_e4m3")
    plain.logits(plain.request(tokens), 30)
    ours, theirs = (s.cache.layer(0)[:, 0].float().abs().amax().item() for s in (session, plain))
    assert ours == pytest.approx(4 * theirs, rel=0.07)


@pytest.mark.parametrize("bad", [torch.tensor(0.0), torch.tensor([1.0, float("inf")]), torch.ones(3)])
def test_kv_codes_impossible_scales_are_refused(paths, tmp_path, bad):
    target = with_scales(paths["Qwen3ForCausalLM"], tmp_path, {"model.layers.1.self_attn.v_scale": bad})
    with pytest.raises(ConfigError, match=r"layers\.1\.self_attn\.v_scale must be one positive number"):
        load_plain(target)


class Rank(SoloGroup):
    """One of two, that only loads."""

    size = 2

    def __init__(self, rank):
        self.rank = rank


def test_fp8_rank_uses_scales_of_its_heads(paths, tmp_path):
    scales = {"model.layers.0.self_attn.k_scale": torch.tensor([2.0, 3.0])}
    target = with_scales(paths["Qwen3ForCausalLM"], tmp_path, scales)
    for rank in (0, 1):
        found = load_plain(target, group=Rank(rank)).attention_spec.kv_scales
        assert found[0].tolist() == [[2.0 + rank], [1.0]]


def test_checkpoint_with_kv_scales_only_is_float():
    raw = {
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": 8,
        "num_attention_heads": 1,
        "num_hidden_layers": 1,
        "vocab_size": 9,
        "intermediate_size": 8,
        "head_dim": 8,
    }
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    only_kv = {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": scheme}
    assert parse_model_config(raw | {"quantization_config": only_kv}, {}).weight_format is None
    for wrong, match in (
        (only_kv | {"config_groups": {"group_0": {}}}, "config_groups: group_0: weights must be an object"),
        (only_kv | {"quant_method": "gptq"}, "'kv_cache_scheme' is not a setting of gptq"),
        (only_kv | {"kv_cache_scheme": scheme | {"dynamic": True}}, "kv_cache_scheme must be static"),
        (only_kv | {"kv_cache_scheme": scheme | {"type": "int"}}, "kv_cache_scheme must be static"),
        (only_kv | {"kv_cache_scheme": None}, "config_groups must be a non-empty object"),
    ):
        with pytest.raises(ConfigError, match=match):
            parse_model_config(raw | {"quantization_config": wrong}, {})


# Configuration.


def test_kv_codes_engine_holds_fewer_bytes(caplog):
    held = {}
    for kv_dtype in ("auto", *QUANTISED_DTYPES):
        with caplog.at_level(logging.WARNING):
            parts = assemble(replace(SPEC, kernels="auto", kv_dtype=kv_dtype))
        held[kv_dtype] = parts.facts()["kv_bytes"]
        assert parts.layout.dtype == ("float32" if kv_dtype == "auto" else kv_dtype)
        assert ("using plain torch" in caplog.text) == (kv_dtype == "fp8_e4m3")
        caplog.clear()
    assert held["auto"] == 4 * held["fp8_e4m3"]
    assert held["int4"] < held["fp8_e4m3"] < held["int8"] < held["auto"] / 3


def test_kv_dtype_unsupported_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"engine\.kv_dtype must be one of auto, int8, fp8_e4m3, int4, is 'int3'"):
        backend(kv_dtype="int3")
    with pytest.raises(ConfigError, match=r"engine\.kv_dtype is int4, for which GPUs have no kernels"):
        backend(kv_dtype="int4", device=torch.device("cuda"))
    with pytest.raises(ConfigError, match=r"engine\.kv_dtype is fp8_e4m3, .*engine\.deterministic"):
        backend(kv_dtype="fp8_e4m3", deterministic=True)
    assert backend(kv_dtype="int8", deterministic=True).name != "torch"


def test_kv_codes_write_stores_no_non_finite_value(paths):
    for kv_dtype in QUANTISED_DTYPES:
        for model in (
            load_plain(paths["Qwen3ForCausalLM"]),
            load_model(paths["Qwen3ForCausalLM"], backend=backend(kv_dtype=kv_dtype)),
        ):
            model.layers[0].attention_norm.weight.fill_(float("inf"))
            session = Session(model, block_size=16, kv_dtype=kv_dtype)
            session.logits(session.request([5, 5, 5]), 3)
            assert session.cache.tensor.float().isfinite().all()
            if kv_dtype != "fp8_e4m3":
                assert session.cache.layer_scales(0).isfinite().all()


def test_plain_kv_logits_equal_transformers(paths):
    model = load_plain(paths["Qwen3ForCausalLM"])
    tokens = random_tokens(random.Random(3), 30)
    session = Session(model, block_size=16)
    ours = session.logits(session.request(tokens), 30)
    assert (ours - reference_logits(reference_model("Qwen3ForCausalLM"), tokens)).abs().max() < 1e-4
