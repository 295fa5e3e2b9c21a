"""How `model.dtype: auto` is resolved and reported."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.assembly import assemble
from engine.backends.options import BackendOptions
from engine.backends.select import select_backend
from engine.model.dtype import resolve_dtype
from tandem.config.cluster import load
from tandem.errors import ConfigError
from tandem.model_path import BUILTIN
from tandem.values.roles import WorkerRole
from tests.support.engine.paged_harness import reference_model
from worker.engine_spec import engine_spec

SECRET = {"secret": "0123456789abcdef", "engine.device": "cpu", "engine.num_threads": 1}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    reference_model("LlamaForCausalLM", num_hidden_layers=1).to(torch.bfloat16).save_pretrained(tmp_path)
    return tmp_path


def state(folder: Path, **dtype: str | None) -> None:
    """Set the dtype in config.json, and nothing else."""
    file = folder / "config.json"
    raw = {name: value for name, value in json.loads(file.read_text()).items() if name not in ("dtype", "torch_dtype")}
    file.write_text(json.dumps(raw | dtype))


@pytest.mark.parametrize(
    ("stated", "found"),
    [
        ({"dtype": "float16"}, "float16"),
        ({"torch_dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": "float32"}, "float32"),
        ({}, "bfloat16"),
        ({"dtype": None}, "bfloat16"),
    ],
)
def test_dtype_auto_follows_checkpoint(checkpoint: Path, stated: dict[str, str | None], found: str) -> None:
    state(checkpoint, **stated)
    assert resolve_dtype("auto", str(checkpoint)) == found
    assert resolve_dtype("float32", str(checkpoint)) == "float32"


def test_dtype_auto_follows_majority_of_values(checkpoint: Path) -> None:
    state(checkpoint)
    file = checkpoint / "model.safetensors"
    tensors = load_file(file)
    norms = {name: tensor.float() for name, tensor in tensors.items() if "norm" in name}
    save_file(tensors | norms, file)
    assert len(norms) > 0
    assert resolve_dtype("auto", str(checkpoint)) == "bfloat16"
    save_file({name: tensor if name in norms else tensor.half() for name, tensor in tensors.items()}, file)
    assert resolve_dtype("auto", str(checkpoint)) == "float16"


def test_dtype_auto_unusable_checkpoint_dtype_is_refused(checkpoint: Path) -> None:
    state(checkpoint, dtype="float8_e4m3fn")
    with pytest.raises(ConfigError, match=r"config\.json.*dtype.*must be one of float32, bfloat16, float16"):
        resolve_dtype("auto", str(checkpoint))


def test_dtype_auto_builtin_model_is_float32() -> None:
    assert json.loads((Path("engine/builtin_model") / "config.json").read_text())["dtype"] == "bfloat16"
    assert load(None).model.dtype == "auto"
    for role in WorkerRole:
        assert engine_spec(load(None, SECRET), role).dtype == "float32"
    assert resolve_dtype("bfloat16", BUILTIN) == "bfloat16"


@pytest.mark.parametrize("role", list(WorkerRole))
def test_dtype_auto_is_resolved_by_both_workers(role: WorkerRole, checkpoint: Path) -> None:
    small = {"model.path": str(checkpoint), "engine.num_blocks": 8, "engine.kernels": "torch"}
    for dtype, found in ((None, "bfloat16"), ("float32", "float32")):
        parts = assemble(
            engine_spec(load(None, SECRET | small | {"model.dtype": dtype, "engine.memory_bytes": 256 << 20}), role)
        )
        assert (parts.facts()["dtype"], parts.layout.dtype, str(parts.runner.model.dtype)) == (
            found,
            found,
            f"torch.{found}",
        )


def test_dtype_auto_conflicting_wire_dtype_is_refused(checkpoint: Path) -> None:
    config = load(None, SECRET | {"model.path": str(checkpoint), "transfer.wire_dtype": "float32"})
    for role in WorkerRole:
        with pytest.raises(ConfigError, match=r"no conversion from bfloat16 to float32.*auto is bfloat16"):
            engine_spec(config, role)
    with pytest.raises(ConfigError, match=r"transfer\.wire_dtype: no conversion from float32 to bfloat16"):
        load(None, {"transfer.wire_dtype": "bfloat16"})


@pytest.mark.parametrize(("capability", "is_refused"), [((7, 5), True), ((8, 0), False), ((9, 0), False)])
def test_dtype_gpu_without_bfloat16_is_refused(
    capability: tuple[int, int], is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "Tesla T4")
    options = {"device": torch.device("cuda", 0), "kernels": "torch"}
    assert select_backend(BackendOptions(**options, dtype="float16")).dtype is torch.float16
    if not is_refused:
        assert select_backend(BackendOptions(**options, dtype="bfloat16")).dtype is torch.bfloat16
        return
    with pytest.raises(ConfigError, match=r"bfloat16, which Tesla T4 \(compute capability 7\.5\) lacks"):
        select_backend(BackendOptions(**options, dtype="bfloat16"))


def test_dtype_float16_on_cpu_falls_back_to_torch_with_log(caplog: pytest.LogCaptureFixture) -> None:
    backend = select_backend(BackendOptions(device=torch.device("cpu"), dtype="float16"))
    assert (backend.name, backend.dtype) == ("torch", torch.float16)
    assert "using plain torch" in caplog.text
