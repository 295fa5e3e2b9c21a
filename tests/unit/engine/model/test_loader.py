"""Loading: stored weights arrive exactly, for any sharding; hostile files are refused by name."""

import json
import os
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.backends.options import BackendOptions
from engine.backends.plain_torch import TorchBackend
from engine.backends.select import select_backend
from engine.model.checkpoints.safetensors_files import Checkpoint, SafetensorsFile
from engine.model.loader import load_model
from tandem.errors import ConfigError
from tests.support.engine.paged_harness import load_plain, reference_model, save_and_load


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    path = tmp_path_factory.mktemp("pristine")
    reference_model("LlamaForCausalLM", num_hidden_layers=1).save_pretrained(path)
    return path


@pytest.fixture
def model_dir(pristine, tmp_path):
    """A copy to corrupt."""
    for file in pristine.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def set_config(path: Path, name: str = "config.json", **values):
    file = path / name
    raw = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**raw, **values}))


def write_safetensors(path: Path, header: dict | bytes, data: bytes = b"", length: int | None = None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)


def spoil(path: Path, **changes):
    """Rewrite the weights with some tensors changed, or dropped when None."""
    file = path / "model.safetensors"
    tensors = load_file(file)
    tensors = {name: changes.get(name, tensor) for name, tensor in (tensors | changes).items()}
    save_file({name: tensor.clone() for name, tensor in tensors.items() if tensor is not None}, file)


def refused(path, match):
    with pytest.raises(ConfigError, match=match):
        load_plain(path)


def test_loader_fuses_stored_tensors_exactly(pristine):
    stored = load_file(pristine / "model.safetensors")
    model = load_plain(pristine)
    prefix = "model.layers.0."
    qkv = [stored[f"{prefix}self_attn.{name}_proj.weight"] for name in "qkv"]
    gate_up = [stored[f"{prefix}mlp.{name}_proj.weight"] for name in ("gate", "up")]
    assert torch.equal(model.layers[0].qkv.weight, torch.cat(qkv))
    assert torch.equal(model.layers[0].gate_up.weight, torch.cat(gate_up))
    assert torch.equal(model.embedding.weight, stored["model.embed_tokens.weight"])
    assert model.weights_bytes == sum(tensor.nbytes for tensor in stored.values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_loader_casts_dtype_once(pristine, dtype):
    stored = load_file(pristine / "model.safetensors")["lm_head.weight"]
    model = load_plain(pristine, dtype=dtype)
    assert torch.equal(model.head.weight, stored.to(model.dtype))
    assert str(model.dtype) == f"torch.{dtype}"


def test_loader_sharded_checkpoint_equals_whole(tmp_path):
    reference = reference_model("Qwen2ForCausalLM", tie_word_embeddings=True)
    whole = save_and_load(reference, tmp_path / "whole")
    reference.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    seen = []
    sharded = load_plain(tmp_path / "shards", progress=lambda done, total: seen.append((done, total)))
    # In values, because tensors differ by orders of magnitude; the tied head is stored once.
    num_values = sum(parameter.numel() for parameter in reference.parameters())
    assert {total for _, total in seen} == {num_values}
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert seen[-1] == (num_values, num_values)
    for ours, theirs in zip(sharded.layers, whole.layers, strict=True):
        for name in ("qkv", "output", "gate_up", "down", "attention_norm", "mlp_norm"):
            parts = [getattr(layer, name) for layer in (ours, theirs)]
            mine, other = (getattr(part, "projection", part).weight for part in parts)  # closings hold one
            assert torch.equal(mine, other)
        assert torch.equal(ours.qkv.bias, theirs.qkv.bias)
    assert sharded.head.weight is sharded.embedding.weight
    assert sharded.fingerprint == whole.fingerprint


def test_fingerprint_covers_only_the_computation(model_dir, pristine):
    first = load_plain(model_dir).fingerprint
    assert first == load_plain(pristine).fingerprint
    set_config(model_dir, eos_token_id=[2, 5], _name_or_path="elsewhere")
    assert load_plain(model_dir).fingerprint == first
    set_config(model_dir, rms_norm_eps=1e-6)
    assert load_plain(model_dir).fingerprint != first
    set_config(model_dir, rms_norm_eps=1e-5)
    assert load_plain(model_dir).fingerprint == first
    norm = load_file(model_dir / "model.safetensors")["model.norm.weight"]
    spoil(model_dir, **{"model.norm.weight": norm * 1.001})
    assert load_plain(model_dir).fingerprint != first


def test_loader_follows_hub_cache_links(pristine, tmp_path):
    blobs, snapshot = tmp_path / "models--org--name" / "blobs", tmp_path / "models--org--name" / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for i, file in enumerate(pristine.iterdir()):
        (blobs / f"{i:040x}").write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(f"../../blobs/{i:040x}")
    assert load_plain(snapshot).fingerprint == load_plain(pristine).fingerprint
    (snapshot / "config.json").unlink()
    (snapshot / "config.json").symlink_to(pristine / "config.json")
    refused(snapshot, r"config\.json is a link out of the directory")


def test_loader_links_and_special_files_are_refused(model_dir, pristine):
    weights = model_dir / "model.safetensors"
    weights.unlink()
    weights.symlink_to(pristine / "model.safetensors")
    refused(model_dir, r"model\.safetensors is a link out of the directory")
    weights.unlink()
    os.mkfifo(weights)
    refused(model_dir, "not a regular file")
    weights.unlink()
    weights.symlink_to("nowhere")
    refused(model_dir, "is missing")


def test_loader_pickled_weights_are_refused(model_dir):
    (model_dir / "model.safetensors").rename(model_dir / "pytorch_model.bin")
    refused(model_dir, "only pickled weights")
    (model_dir / "pytorch_model.bin").unlink()
    refused(model_dir, r"neither model\.safetensors nor")


@pytest.mark.parametrize(
    ("header", "data", "length", "match"),
    [
        (b"", b"", 2**60, "header length 1152921504606846976"),
        (b"{}", b"", 2**63, "header length"),
        (b"[]", b"", None, "must be a JSON object"),
        (b"{", b"", None, "not valid JSON"),
        (b'{"a":' + b"[" * 100_000, b"", None, "not valid JSON"),
        (b'{"a":1,"a":2}', b"", None, "duplicate keys"),
        ({"a": 3}, b"", None, "must be an object"),
        ({"a": {"dtype": "F64", "shape": [1], "data_offsets": [0, 8]}}, b"8" * 8, None, "dtype must be one of"),
        ({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}, b"4" * 4, None, "shape"),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, b"4" * 4, None, "do not fit"),
        ({"a": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}, b"4" * 4, None, "end at byte"),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}, b"4" * 4, None, "do not fit"),
        (
            {
                "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
                "b": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]},
            },
            b"1" * 12,
            None,
            "'b' overlaps",
        ),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, b"1" * 8, None, "gap"),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, b"1" * 9, None, "end at byte"),
    ],
)
def test_loader_hostile_header_is_refused(model_dir, header, data, length, match):
    write_safetensors(model_dir / "model.safetensors", header, data, length)
    refused(model_dir, match)


def test_loader_truncated_file_is_refused(model_dir):
    file = model_dir / "model.safetensors"
    whole = file.read_bytes()
    for size in (0, 5, 100, len(whole) - 1):
        file.write_bytes(whole[:size])
        refused(model_dir, r"model\.safetensors")


def test_loader_hostile_index_is_refused(model_dir):
    file = model_dir / "model.safetensors"
    names = list(load_file(file))
    index = model_dir / "model.safetensors.index.json"
    file.rename(model_dir / "model-00001-of-00002.safetensors")
    for target, match in [
        ("model-00002-of-00002.safetensors", "model-00002-of-00002.safetensors is missing"),
        ("../other.safetensors", "not a plain file name"),
        ("/etc/passwd", "must name a .safetensors"),
        (7, "must name a .safetensors"),
    ]:
        index.write_text(
            json.dumps({"weight_map": {**dict.fromkeys(names, "model-00001-of-00002.safetensors"), "x": target}})
        )
        refused(model_dir, match)
    index.write_text(json.dumps({"weight_map": {"absent": "model-00001-of-00002.safetensors"}}))
    refused(model_dir, "absent is not in")
    index.write_text(json.dumps({"weight_map": {}}))
    refused(model_dir, "non-empty")
    copy = model_dir / "model-00002-of-00002.safetensors"
    copy.write_bytes((model_dir / "model-00001-of-00002.safetensors").read_bytes())
    index.write_text(
        json.dumps(
            {"weight_map": {"lm_head.weight": copy.name, "model.norm.weight": "model-00001-of-00002.safetensors"}}
        )
    )
    refused(model_dir, "in more than one shard")


def test_loader_wrong_tensors_are_refused(model_dir):
    norm = torch.ones(48)
    norm[3] = float("nan")
    spoil(model_dir, **{"model.norm.weight": norm})
    refused(model_dir, r"model\.norm\.weight has values that are not finite")
    spoil(model_dir, **{"model.norm.weight": torch.full((48,), 1e6)})
    load_plain(model_dir)
    with pytest.raises(ConfigError, match=r"not finite in torch\.float16"):
        load_plain(model_dir, dtype="float16")
    spoil(model_dir, **{"model.norm.weight": torch.ones(47)})
    refused(model_dir, r"model\.norm\.weight has shape \[47\], config\.json implies \[48\]")
    spoil(model_dir, **{"model.norm.weight": torch.ones(48, dtype=torch.int8)})
    refused(model_dir, r"model\.norm\.weight is stored as I8, not as F32 or F16 or BF16")
    spoil(model_dir, **{"model.norm.weight": None})
    refused(model_dir, r"tensor model\.norm\.weight is missing")
    extra = {"model.layers.0.self_attn.q_proj.bias": torch.ones(64)}
    spoil(model_dir, **{"model.norm.weight": torch.ones(48), **extra})
    refused(model_dir, r"1 tensors do not belong to LlamaForCausalLM .*q_proj\.bias")
    spoil(model_dir, **dict.fromkeys(extra), **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})
    load_plain(model_dir)


def test_loader_checks_shapes_before_allocating(model_dir):
    set_config(model_dir, vocab_size=500)
    refused(model_dir, r"embed_tokens\.weight has shape \[97, 48\], config\.json implies \[500, 48\]")
    set_config(model_dir, vocab_size=97, hidden_size=2**20, num_hidden_layers=4000)
    refused(model_dir, "config.json implies")


def test_select_backend_unknown_dtype_is_refused():
    with pytest.raises(ConfigError, match=r"model\.dtype must be one of float32, bfloat16, float16, is 'int8'"):
        select_backend(BackendOptions(device=torch.device("cpu"), dtype="int8"))


def test_loader_forgets_mapped_pages(tmp_path):
    def mapped(path):
        sizes, here = 0, False
        for line in Path("/proc/self/smaps").read_text().splitlines():
            if "-" in line.split()[0]:
                here = str(path) in line
            elif here and line.startswith("Rss:"):
                sizes += int(line.split()[1]) * 1024
        return sizes

    file = tmp_path / "model.safetensors"
    save_file({"a": torch.randn(2**20), "b": torch.randn(2**20)}, file)
    stored = SafetensorsFile.mapped(file)
    try:
        first, second = stored.entries
        total = float(stored.tensor(first).sum() + stored.tensor(second).sum())
        before = mapped(file)
        assert before >= 8 * 2**20
        stored.forget(first)
        assert mapped(file) < before - 3 * 2**20
        assert float(stored.tensor(first).sum() + stored.tensor(second).sum()) == total
    finally:
        stored.close()


class PackingBackend(TorchBackend):
    """Copies every matrix, and remembers where it was given."""

    packs_matrices = True

    def __init__(self):
        super().__init__()
        self.addresses = {}

    def projection(self, weight, bias, role):
        self.addresses[role.value] = weight.data_ptr()
        return super().projection(weight.clone(), bias, role)

    def head(self, weight):
        self.addresses["head"] = weight.data_ptr()
        return super().head(weight.clone())


def test_loader_hands_views_of_the_file_to_a_backend_that_packs(pristine, monkeypatch):
    places, forgotten = {}, []
    read, forget = Checkpoint.tensor, Checkpoint.forget

    def tensor(self, name, part=None):
        found = read(self, name, part)
        places[name] = found.data_ptr()
        return found

    def forgets(self, name):
        forgotten.append((name, backend.addresses.copy()))
        forget(self, name)

    monkeypatch.setattr(Checkpoint, "tensor", tensor)
    monkeypatch.setattr(Checkpoint, "forget", forgets)
    backend = PackingBackend()
    model = load_model(pristine, backend=backend)
    stored = load_file(pristine / "model.safetensors")
    layer = "model.layers.0."
    for role, name in (
        ("head", "lm_head.weight"),
        ("output", f"{layer}self_attn.o_proj.weight"),
        ("down", f"{layer}mlp.down_proj.weight"),
    ):
        assert backend.addresses[role] == places[name]
        [given] = [given for one, given in forgotten if one == name]
        assert role in given  # not before it was packed
    assert backend.addresses["qkv"] not in places.values()  # of three tensors
    assert places.keys() == {name for name, _ in forgotten} == stored.keys()
    assert torch.equal(model.layers[0].down.projection.weight, stored[f"{layer}mlp.down_proj.weight"])
    assert torch.equal(model.embedding.weight, stored["model.embed_tokens.weight"])


def test_loader_view_that_is_not_finite_is_refused(model_dir):
    name = "model.layers.0.mlp.down_proj.weight"
    spoilt = load_file(model_dir / "model.safetensors")[name]
    spoilt[3, 4] = float("nan")
    spoil(model_dir, **{name: spoilt})
    with pytest.raises(ConfigError, match=rf"{name} has values that are not finite"):
        load_model(model_dir, backend=PackingBackend())


def test_loader_ignores_checkpoint_code_with_warning(model_dir, caplog):
    load_plain(model_dir)
    assert "auto_map" not in caplog.text
    set_config(model_dir, auto_map={"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"})
    load_plain(model_dir)
    assert "config.json: auto_map (AutoModelForCausalLM) is ignored" in caplog.text
