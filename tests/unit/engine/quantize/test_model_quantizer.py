"""Whole directories: what is written is read as it was meant, serves, and appears only when it is complete."""

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.backends.options import BackendOptions
from engine.backends.select import select_backend
from engine.kernels.cpu.gemm import Arithmetic
from engine.model.checkpoints.sources import TensorSource, open_source
from engine.model.checkpoints.stored_matrix import GroupIntMatrix, Int8Matrix
from engine.model.config import load_model_config
from engine.model.files import ModelDirectory
from engine.model.loader import load_model
from engine.model.parameters import expected_shapes
from engine.quantize import model_quantizer
from engine.quantize.model_quantizer import QuantizedModel, quantize_model
from engine.quantize.rounding import round_groups, round_rows
from engine.quantize.settings import Method, QuantizationSettings, Scheme
from tandem.errors import ConfigError
from tests.support.engine.families import DENSE_CASES, FAMILY_CASES, FamilyCase
from tests.support.engine.paged_harness import Session, load_plain, needs, random_tokens
from tests.support.engine.quantized_writers import FORMATS, PROJECTIONS, write_llama

TOKENS = [5, 17, 3, 80, 41, 8, 8, 96]
KINDS = [
    (Scheme.INT4, Method.ROUND),
    (Scheme.INT4, Method.GPTQ),
    (Scheme.INT8, Method.ROUND),
    (Scheme.INT8, Method.SMOOTH),
]


def settings(scheme: Scheme, method: Method | None = None, group_size: int | None = None) -> QuantizationSettings:
    is_calibrated = method in (Method.GPTQ, Method.SMOOTH)
    return QuantizationSettings.resolve(scheme, method=method, group_size=group_size, is_calibrated=is_calibrated)


def quantize(model: Path, out: Path, *kind: Any, **more: Any) -> QuantizedModel:
    rng = random.Random(7)
    chosen = settings(*kind)
    chunks = [random_tokens(rng, 40) for _ in range(4)] if chosen.method is not Method.ROUND else []
    return quantize_model(model, out, chosen, chunks=chunks, **more)


@pytest.fixture
def dense(tmp_path: Path) -> Path:
    """A small Llama with two layers and the files that others have."""
    folder = write_llama(tmp_path, FORMATS["w8"], num_layers=2) / "dense"
    file = folder / "model.safetensors"
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | {"torch_dtype": "bfloat16", "kept": {"a": "ä"}}
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "generation_config.json", "LICENSE"):
        (folder / name).write_text("{}")
    (folder / "pytorch_model.bin").write_text("not copied")
    (folder / "original").mkdir()
    return folder


def logits(path: Path, dtype: str = "float32") -> Tensor:
    session = Session(load_plain(path, dtype=dtype))
    return session.logits(session.request(TOKENS), len(TOKENS)).clone()


@contextmanager
def opened(folder: Path) -> Iterator[TensorSource]:
    """What our loader reads; valid within."""
    config = load_model_config(folder)
    with open_source(ModelDirectory(folder), config, expected_shapes(config), dtype=torch.float32) as source:
        yield source


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind[1].value + kind[0].value)
def test_quantized_directory_serves_with_logits_near_the_dense_ones(kind: tuple, dense: Path, tmp_path: Path) -> None:
    done = quantize(dense, tmp_path / "out", *kind)
    assert (done.num_quantized, done.dense) == (14, ())
    assert done.new_bytes < done.old_bytes
    exact = logits(dense)
    error = (logits(tmp_path / "out") - exact).square().mean().sqrt() / exact.std()
    assert error < (0.05 if kind[0] is Scheme.INT8 else 0.45)


def test_quantized_int4_is_read_as_it_was_rounded(dense: Path, tmp_path: Path) -> None:
    quantize(dense, tmp_path / "out", Scheme.INT4, Method.ROUND)
    weights = load_file(dense / "model.safetensors")
    names = [f"model.layers.{layer}.{module}.weight" for layer in (0, 1) for module in PROJECTIONS]
    with opened(tmp_path / "out") as source:
        for name in names:
            found = source.matrix(name)
            expected = round_groups(weights[name], 32)
            assert isinstance(found, GroupIntMatrix)
            assert torch.equal(found.codes, expected.codes)
            assert torch.equal(found.scale, expected.scale)
            assert torch.equal(found.zero, expected.zero)
            assert found.group_size == 32


def test_quantized_int8_is_read_as_it_was_rounded(dense: Path, tmp_path: Path) -> None:
    quantize(dense, tmp_path / "out", Scheme.INT8, Method.ROUND)
    name = "model.layers.1.mlp.down_proj.weight"
    expected = round_rows(load_file(dense / "model.safetensors")[name])
    with opened(tmp_path / "out") as source:
        found = source.matrix(name)
        assert isinstance(found, Int8Matrix)
        assert found.rounds_inputs
        assert torch.equal(found.codes, expected.codes)
        assert torch.equal(found.scale, expected.scale)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind[1].value + kind[0].value)
def test_quantized_directory_keeps_everything_else(kind: tuple, dense: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()  # an empty one is taken
    quantize(dense, out, *kind)
    assert {path.name for path in out.iterdir()} == {
        "config.json", "model.safetensors", "tokenizer.json", "generation_config.json", "LICENSE"
    }  # fmt: skip
    old, new = (json.loads((folder / "config.json").read_text()) for folder in (dense, out))
    assert new.pop("quantization_config")["ignore"] == ["lm_head"]
    assert new == old
    before, after = load_file(dense / "model.safetensors"), load_file(out / "model.safetensors")
    is_norm = [kind[1] is Method.SMOOTH and "layernorm" in name for name in before]
    for name, smoothed in zip(before, is_norm, strict=True):
        if not name.endswith("_proj.weight"):
            assert after[name].dtype is before[name].dtype
            assert torch.equal(after[name], before[name]) != smoothed


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind[1].value + kind[0].value)
def test_quantized_directory_is_restored_by_the_library(kind: tuple, dense: Path, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors", reason="read by the library itself")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    quantize(dense, tmp_path / "out", *kind)
    raw = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    config = QuantizationConfig.model_validate(raw)
    compressor = BaseCompressor.get_value_from_registry(raw["format"])
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    for module in PROJECTIONS:
        prefix = f"model.layers.1.{module}."
        state = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
        restored = compressor.decompress(state, config.config_groups["group_0"])["weight"]
        with opened(tmp_path / "out") as source:
            found = source.tensor(prefix + "weight").clone()
        torch.testing.assert_close(restored.float(), found, atol=0.0, rtol=1e-3)  # in half precision, theirs


@pytest.mark.filterwarnings("ignore")
def test_quantized_int4_has_the_same_logits_in_transformers(dense: Path, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors", reason="transformers reads the layout with it")
    from transformers import AutoModelForCausalLM

    quantize(dense, tmp_path / "out", Scheme.INT4, Method.GPTQ)
    config = tmp_path / "out" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"model_type": "llama"}))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    with torch.no_grad():
        theirs = model(torch.tensor([TOKENS])).logits[0].float()
    torch.testing.assert_close(logits(tmp_path / "out"), theirs, atol=0.01, rtol=0.01)


@pytest.mark.parametrize("kind", KINDS[::2], ids=lambda kind: kind[1].value + kind[0].value)
def test_quantized_directory_is_multiplied_as_it_is_stored(kind: tuple, dense: Path, tmp_path: Path) -> None:
    needs(Arithmetic.INT4)
    quantize(dense, tmp_path / "out", *kind)
    options = BackendOptions(device=torch.device("cpu"), dtype="bfloat16", quantization="stored", num_threads=1)
    assert load_model(tmp_path / "out", backend=select_backend(options)).num_kept == 14


@pytest.mark.parametrize("case", DENSE_CASES, ids=lambda case: case.name)
def test_quantized_families_serve(case: FamilyCase, tmp_path: Path) -> None:
    case.save(case.model(num_hidden_layers=case.layers or 2), tmp_path / "dense")
    exact = logits(tmp_path / "dense")
    has_norms = load_model_config(tmp_path / "dense").layers[0].has_input_norms
    for kind in (KINDS[1], KINDS[3]):
        out = tmp_path / kind[0].value
        if kind[1] is Method.SMOOTH and not has_norms:
            with pytest.raises(ConfigError, match=r"^--method smooth: Olmo\dForCausalLM has no norms before its"):
                quantize(tmp_path / "dense", out, *kind)
            continue
        done = quantize(tmp_path / "dense", out, *kind)
        is_down = [name.endswith("down_proj") for name in done.dense]  # of 80 columns
        assert all(is_down)
        assert bool(is_down) == (kind[0] is Scheme.INT4)
        error = (logits(out) - exact).square().mean().sqrt() / exact.std()
        assert error < (0.1 if kind[0] is Scheme.INT8 else 0.5)


def test_quantize_mixture_of_experts_is_refused_by_name(tmp_path: Path) -> None:
    case = next(case for case in FAMILY_CASES if case.name == "mixtral")
    case.save(case.model(num_hidden_layers=1), tmp_path / "dense")
    with pytest.raises(
        ConfigError, match="MixtralForCausalLM has mixtures of experts, which are not quantized to files"
    ):
        quantize(tmp_path / "dense", tmp_path / "out", *KINDS[0])


def test_quantized_model_keeps_the_scales_of_an_fp8_cache(dense: Path, tmp_path: Path) -> None:
    scheme = {"num_bits": 8, "type": "float", "dynamic": False, "symmetric": True}
    file = dense / "config.json"
    cache = {"quant_method": "compressed-tensors", "kv_cache_scheme": scheme}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": cache}))
    name, weights = "model.layers.1.self_attn.k_proj.k_scale", dense / "model.safetensors"
    save_file({name: torch.tensor(0.5)} | {key: value.clone() for key, value in load_file(weights).items()}, weights)
    quantize(dense, tmp_path / "out", Scheme.INT4, Method.GPTQ)
    raw = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert (raw["format"], raw["kv_cache_scheme"]) == ("pack-quantized", scheme)
    scales = load_plain(tmp_path / "out").layers[1].kv_scales
    assert scales is not None
    assert scales[0].tolist() == [0.5, 0.5]


def test_quantize_copies_no_link_out_of_the_directory(dense: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("")
    (dense / "notes.txt").symlink_to(tmp_path / "secret")
    with pytest.raises(ConfigError, match=r"notes\.txt is a link out of the directory"):
        quantize(dense, tmp_path / "out", Scheme.INT4)
    assert not (tmp_path / "out").exists()


def test_quantized_matrices_that_groups_do_not_divide_stay_dense(dense: Path, tmp_path: Path) -> None:
    done = quantize(dense, tmp_path / "out", Scheme.INT4, Method.GPTQ, 64)  # inner size 96
    modules = [f"model.layers.{layer}.mlp.down_proj" for layer in (0, 1)]
    assert (list(done.dense), done.num_quantized) == (modules, 12)
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["ignore"] == ["lm_head", *modules]
    name = modules[1] + ".weight"
    same = [load_file(folder / "model.safetensors")[name] for folder in (dense, tmp_path / "out")]
    assert torch.equal(*same)
    assert torch.isfinite(logits(tmp_path / "out")).all()


def test_quantize_model_that_no_group_divides_is_refused(dense: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no matrix has columns that groups of 128 divide"):
        quantize(dense, tmp_path / "out", Scheme.INT4, Method.ROUND, 128)


def test_quantize_quantized_model_is_refused(dense: Path, tmp_path: Path) -> None:
    quantize(dense, tmp_path / "out", Scheme.INT4)
    with pytest.raises(ConfigError, match=r"out is quantized already \(compressed-tensors pack-quantized, 4 bits"):
        quantize(tmp_path / "out", tmp_path / "again", Scheme.INT8)


def test_quantize_gguf_is_refused(dense: Path, tmp_path: Path) -> None:
    (dense / "model.safetensors").rename(dense / "model.gguf")
    with pytest.raises(ConfigError, match=r"model\.gguf is a GGUF file: only safetensors can be quantized"):
        quantize(dense, tmp_path / "out", Scheme.INT4)


def test_quantize_into_directory_with_files_is_refused(dense: Path, tmp_path: Path) -> None:
    for out in (dense, dense / "config.json"):
        with pytest.raises(ConfigError, match="exists and is not an empty directory"):
            quantize(dense, out, Scheme.INT4)
    with pytest.raises(ConfigError, match="missing is not a directory"):
        quantize(dense, tmp_path / "missing" / "out", Scheme.INT4)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind[1].value + kind[0].value)
def test_quantize_bad_weight_is_named_and_nothing_is_left(kind: tuple, dense: Path, tmp_path: Path) -> None:
    file, name = dense / "model.safetensors", "model.layers.1.mlp.up_proj.weight"
    tensors = {key: value.clone() for key, value in load_file(file).items()}
    tensors[name][3, 5] = float("nan")
    save_file(tensors, file)
    before = set(tmp_path.iterdir())
    with pytest.raises(ConfigError, match=f"^checkpoint: {name} has values that are not finite"):
        quantize(dense, tmp_path / "out", *kind)
    assert set(tmp_path.iterdir()) == before


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device", "x")])
def test_quantize_interrupted_leaves_nothing(
    error: BaseException, dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_args: object) -> None:
        raise error

    monkeypatch.setattr(model_quantizer.shutil, "copyfile", fail)
    before = set(tmp_path.iterdir())
    expected, message = (ConfigError, "No space left") if isinstance(error, OSError) else (KeyboardInterrupt, None)
    with pytest.raises(expected, match=message):
        quantize(dense, tmp_path / "out", Scheme.INT4)
    assert set(tmp_path.iterdir()) == before


def test_quantize_reports_progress(dense: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    quantize(dense, tmp_path / "out", Scheme.INT4, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(count, 14) for count in range(1, 15)]


@pytest.mark.parametrize(
    ("scheme", "options", "message"),
    [
        (Scheme.INT4, {"method": Method.GPTQ}, "--method gptq needs a text: name a file with --calibrate"),
        (Scheme.INT8, {"method": Method.GPTQ}, "--method must be round or smooth for int8"),
        (Scheme.INT4, {"method": Method.SMOOTH}, "--method must be round or gptq for int4"),
        (Scheme.INT4, {"method": Method.ROUND, "is_calibrated": True}, "--calibrate has no use with --method round"),
        (Scheme.INT8, {"group_size": 32}, "--group-size is for int4"),
        (Scheme.INT4, {"group_size": 48}, "--group-size must be one of 32, 64, 128, is 48"),
    ],
)
def test_settings_that_exclude_each_other_are_refused(scheme: Scheme, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        QuantizationSettings.resolve(scheme, **({"method": None, "group_size": None, "is_calibrated": False} | options))


def test_settings_default_to_the_method_that_the_text_allows() -> None:
    found = [
        QuantizationSettings.resolve(scheme, method=None, group_size=None, is_calibrated=calibrated)
        for scheme in Scheme
        for calibrated in (False, True)
    ]
    assert [one.method for one in found] == [Method.ROUND, Method.GPTQ, Method.ROUND, Method.SMOOTH]
    assert [one.group_size for one in found] == [32, 32, None, None]
