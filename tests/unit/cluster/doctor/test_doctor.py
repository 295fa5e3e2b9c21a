"""`tandem doctor` on compilers, the dtype, the GPUs of each worker, and the cluster's certificates."""

import json
import logging
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from cluster.cli.cert import make_certificate
from cluster.doctor import software
from cluster.doctor.checks import cluster_state, examine, kv_certificates, members
from cluster.doctor.findings import Check, Finding, Status
from cluster.processes.effective_config import resolve_model
from router.fleet.native_streams import RECIPE
from tandem.config.cluster import load
from tandem.errors import ConfigError
from tandem.model_path import model_directory
from tandem.native.build import PREBUILT, _prebuilt
from tests.support.certificates import Authority
from tests.support.engine.gguf_writer import write_gguf
from tests.unit.worker.test_gpus import FakeHost
from worker.decisions.quality_gate import GateWindow, QualityGate

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 90,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
}


def dtype_of(**overrides):
    (finding,) = software.dtype(load(None, {name.replace("__", "."): value for name, value in overrides.items()}))
    return finding


def test_doctor_reports_python_without_optimizations(monkeypatch: pytest.MonkeyPatch) -> None:
    for built_with, prefix, status in (
        ("'--with-lto' '--enable-optimizations'", "/opt/python", Status.OK),
        ("'--enable-shared'", "/opt/python", Status.INFO),
        ("'--enable-shared'", "/usr", Status.OK),
        (None, "/opt/python", Status.OK),
    ):
        monkeypatch.setattr("sysconfig.get_config_var", {"CONFIG_ARGS": built_with}.get)
        monkeypatch.setattr("sys.base_prefix", prefix)
        (found,) = software.python(load(None))
        assert found.status is status
        assert ("--enable-optimizations" in found.hint) == (status is Status.INFO)


def _put_compiler(folder: Path, name: str, program: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{program}\n")
    (folder / name).chmod(0o755)


@pytest.mark.parametrize("check", [software.compiler, software.router_compiler])
def test_doctor_looks_for_the_compiler_of_native_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, check: Check
) -> None:
    """One for C is none, nor is one without the headers of C++."""
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    config = load(None, {"engine.device": "cpu"})
    _put_compiler(tmp_path / "bin", "gcc", "echo gcc 12")
    (found,) = check(config)
    assert (found.name, found.status, found.detail) == ("C++ compiler", Status.WARN, "none found (g++ or c++)")
    assert found in examine(config, router_only=check is software.router_compiler)
    assert "apt install g++" in found.hint
    _put_compiler(tmp_path / "bin", "c++", 'test "$1" = --version && echo c++ 12')
    (found,) = check(config)
    assert (found.status, found.detail) == (Status.WARN, f"{tmp_path}/bin/c++ compiles no C++17")
    _put_compiler(tmp_path / "bin", "g++", "echo g++ 12")
    assert [(one.status, one.detail) for one in check(config)] == [(Status.OK, "g++ 12")]


def test_doctor_misses_no_compiler_where_the_image_has_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setenv("PATH", "/nowhere")
    library = _prebuilt(RECIPE, tmp_path / PREBUILT)
    library.parent.mkdir(parents=True)
    library.touch()
    (found,) = software.router_compiler(load(None))
    assert (found.status, found.detail) == (Status.OK, f"not needed: {library} is built")
    (of_workers,) = software.compiler(load(None, {"engine.device": "cpu"}))
    assert of_workers.status is Status.WARN


def test_doctor_looks_for_a_c_compiler_beside_a_gpu_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    for names, found in (((), ["C++ compiler"]), (("H100",), ["C++ compiler", "C compiler"])):
        monkeypatch.setattr(software.NvidiaHost, "names", lambda self, names=names: names)
        assert [one.name for one in software.compiler(load(None))] == found
        assert len(software.compiler(load(None, {"engine.device": "cpu"}))) == 1


def test_doctor_shows_resolved_auto_dtype() -> None:
    found = dtype_of()
    assert (found.status, found.detail) == (Status.OK, "float32 (auto: the built-in model's)")
    assert found in examine(load(None))
    assert dtype_of(model__dtype="float32").detail == "float32"


def test_doctor_says_what_pools_that_quantize_differently_mean() -> None:
    found = dtype_of(decode__quantization="int4", model__dtype="bfloat16", engine__deterministic=True)
    assert found.status is Status.INFO
    assert "the pools quantize differently" in found.detail
    alone = dtype_of(decode__quantization="int4", prefill__replicas=0, model__dtype="bfloat16")
    assert "the pools" not in alone.detail


def test_doctor_fails_where_nothing_is_quantized_in_the_models_dtype() -> None:
    found = dtype_of(engine__quantization="int4")
    assert found.status is Status.FAIL
    assert found.detail.startswith("float32 (auto: the built-in model's), in which nothing is quantized as int4")
    assert dtype_of(engine__quantization="int4", model__dtype="bfloat16").status is not Status.FAIL
    assert dtype_of(engine__quantization="nf4").status is not Status.FAIL
    assert dtype_of(engine__quantization="fp8", model__dtype="float16").status is Status.FAIL


def test_doctor_reports_inexact_resume_dtype(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"dtype": "bfloat16"}))
    found = dtype_of(model__path=str(tmp_path))
    assert found.status is Status.INFO
    assert found.detail.startswith("bfloat16 (auto: the checkpoint's): text that resumes after a failover may differ")
    assert "engine.deterministic" in found.hint
    exact = dtype_of(model__path=str(tmp_path), engine__deterministic=True)
    assert (exact.status, exact.detail) == (Status.OK, "bfloat16 (auto: the checkpoint's)")


def test_doctor_names_architecture_or_what_is_supported(tmp_path: Path) -> None:
    config = load(None, {"model.path": str(tmp_path)})
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (found,) = software.architecture(config)
    assert (found.status, found.detail) == (Status.OK, "LlamaForCausalLM")
    wrong = {"architectures": (["GPT2LMHeadModel"], "Qwen3ForCausalLM"), "dtype": ("float64", "bfloat16")}
    for name, (value, supported) in wrong.items():
        (tmp_path / "config.json").write_text(json.dumps(LLAMA | {name: value}))
        (found,) = software.architecture(config)
        assert found.status is Status.FAIL
        assert f"{name} must be one of " in found.detail
        assert supported in found.detail
        assert str(value) in found.detail
        assert "docs/use/models.md" in found.hint
        assert software.dtype(config) == []
        assert found in examine(config)
    assert software.architecture(load(None, {"model.path": "org/model"})) == []


def test_doctor_checks_adapters_as_up_does(tmp_path: Path) -> None:
    raw = {"peft_type": "LORA", "r": 8, "lora_alpha": 16}
    (tmp_path / "adapter_config.json").write_text(json.dumps(raw | {"use_dora": True}))
    config = load(None, {"model.adapters": {"sql": str(tmp_path)}})
    (found,) = software.adapters(config)
    detail = f"model.adapters.sql: {tmp_path}/adapter_config.json: use_dora True is not supported"
    assert (found.status, found.detail) == (Status.FAIL, detail)
    assert found in examine(config)
    with pytest.raises(ConfigError, match=r"model\.adapters\.sql"):
        resolve_model(config)
    (tmp_path / "adapter_config.json").write_text(json.dumps(raw))
    (tmp_path / "adapter_model.safetensors").write_bytes(bytes(8))
    (found,) = software.adapters(config)
    assert (found.status, found.detail) == (Status.OK, "sql")
    assert software.adapters(load(None, {})) == []


def test_doctor_checks_quality_gate_before_workers_do(tmp_path: Path) -> None:
    file = tmp_path / "gate.json"
    config = load(None, {"engine.quality_gate": str(file)})
    (found,) = software.quality_gate(config)
    assert (found.status, found.detail) == (Status.FAIL, f"engine.quality_gate: {file}: No such file or directory")
    assert "tandem eval MODEL --gate FILE" in found.hint
    window = GateWindow(token_ids=(1, 2, 3), logprobs=(-1.0, -2.0), top_ids=(1, 1))
    for vocab_size, status in ((100, Status.FAIL), (2048, Status.OK)):
        gate = QualityGate(base="a base", vocab_size=vocab_size, windows=(window,))
        file.write_text(gate.model_dump_json())
        (found,) = software.quality_gate(config)
        assert found.status is status
        assert found in examine(config)
    assert found.detail == "2 tokens to score at each start"
    assert software.quality_gate(load(None, {})) == []


@pytest.mark.parametrize("path", ["/no/such", "model"])
def test_doctor_refuses_model_paths_that_up_refuses(path: str) -> None:
    (found,) = software.model(load(None, {"model.path": path}))
    assert found.status is Status.FAIL
    with pytest.raises(ConfigError) as refused:
        resolve_model(load(None, {"model.path": path}))
    assert found.detail == str(refused.value)
    assert software.model(load(None, {"model.path": "org/model"}))[0].status is Status.WARN


def test_doctor_checks_gguf_file_whole(tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    config = load(None, {"model.path": str(file)})
    write_gguf(model_directory("builtin"), file, block_type="Q8_0", pre="smollm")
    for check in (software.model, software.tokenizer):
        (found,) = check(config)
        assert (found.status, found.detail) == (Status.OK, str(file))
    (found,) = software.architecture(config)
    assert (found.status, found.detail) == (Status.OK, "LlamaForCausalLM")
    assert dtype_of(model__path=str(file)).detail.startswith("bfloat16 (auto: the checkpoint's)")
    write_gguf(model_directory("builtin"), file, pre="made-up")
    for check in (software.model, software.tokenizer):
        (found,) = check(config)
        assert found.status is Status.FAIL
        assert "tiny.gguf: tokenizer.ggml.pre must be one of llama-bpe" in found.detail


def test_doctor_unresolvable_auto_dtype_fails(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    found = dtype_of(model__path=str(tmp_path))
    assert (found.status, found.hint) == (Status.FAIL, "set model.dtype")
    assert dtype_of(model__path=str(tmp_path), model__dtype="float16").status is Status.INFO


def test_doctor_skips_model_not_downloaded_yet() -> None:
    assert software.dtype(load(None, {"model.path": "org/model"})) == []


def test_doctor_shows_gpu_of_each_worker() -> None:
    (found,) = software.gpu_table(load(None, {"decode.replicas": 2, "decode.gpus": [2, 0]}), FakeHost(3))
    assert (found.status, found.detail) == (
        Status.OK,
        "3 visible, KV by auto\nGPU 0: decode-1\nGPU 1: prefill-0\nGPU 2: decode-0",
    )
    (found,) = software.gpu_table(load(None), FakeHost(1))
    assert found.detail == (
        "1 visible, KV by auto\nGPU 0: prefill-0, decode-0\nworkers on the same GPU share 80 % of its memory"
    )
    (found,) = software.gpu_table(load(None), FakeHost(4))
    assert (found.status, found.hint.partition(":")[0]) == (Status.INFO, "GPU 2, 3 would be idle")


def test_doctor_shows_gpu_of_each_rank() -> None:
    ranks = {"prefill.tensor_parallel_size": 2, "decode.tensor_parallel_size": 4, "transfer.transport": "nixl"}
    (found,) = software.gpu_table(load(None, {"prefill.replicas": 2, **ranks}), FakeHost(8))
    placed = [
        *(f"prefill-{n} rank {rank}" for n in (0, 1) for rank in (0, 1)),
        *(f"decode-0 rank {n}" for n in range(4)),
    ]
    lines = [f"GPU {gpu}: {name}" for gpu, name in enumerate(placed)]
    assert found.detail.splitlines() == ["8 visible, KV by nixl", *lines]


def test_doctor_missing_gpus_fail() -> None:
    (found,) = software.gpu_table(load(None, {"prefill.gpus": [1]}), FakeHost(1))
    assert (found.status, found.detail) == (
        Status.FAIL,
        "prefill.gpus names GPU 1: the last visible one is GPU 0",
    )
    assert software.gpu_table(load(None, {"prefill.gpus": [1], "engine.device": "cpu"}), FakeHost(1)) == []
    assert software.gpu_table(load(None, {"prefill.gpus": [1]}), FakeHost(0)) == []


def test_doctor_reads_the_certificates_of_cluster_tls(tmp_path: Path) -> None:
    make_certificate(tmp_path, "member", days=365)
    make_certificate(tmp_path, "old", days=5)

    def told(name: str, **more: str) -> Finding:
        pair = {"cluster.tls.cert": f"{tmp_path}/{name}.pem", "cluster.tls.key": f"{tmp_path}/{name}.key"}
        config = load(None, {**pair, "cluster.tls.ca": f"{tmp_path}/ca.pem", **more})
        (finding,) = members(config)
        assert finding in examine(config, router_only=True)
        return finding

    assert told("member").status is Status.OK
    assert "valid until 20" in told("member").detail
    soon = told("old")
    assert (soon.status, f"`tandem cert {tmp_path} --name old --renew`" in soon.hint) == (Status.WARN, True)
    (tmp_path / "member.key").write_text("no key")
    assert (told("member").status, told("member").detail[:16]) == (Status.FAIL, "cluster.tls.key:")


def test_doctor_reports_unprotected_cluster() -> None:
    assert members(load(None)) == []
    beyond = {"decode.host": "10.0.0.2", "decode.port": 7000}
    (missing,) = members(load(None, beyond))
    assert (missing.status, "`tandem cert`" in missing.hint) == (Status.WARN, True)
    (off,) = members(load(None, {**beyond, "cluster.tls": "off"}))
    assert (off.status, "not encrypted" in off.detail) == (Status.WARN, True)
    (wrong,) = members(load(None, {**beyond, "cluster.tls": "permissive"}))
    assert wrong.status is Status.FAIL


def test_doctor_reads_the_certificates_of_transfer_tls(tmp_path: Path) -> None:
    def told(days: int) -> Finding:
        (tmp_path / str(days)).mkdir(exist_ok=True)
        files = Authority().issue(tmp_path / str(days), not_after=datetime.now(UTC) + timedelta(days=days))
        (finding,) = kv_certificates(
            load(None, {f"transfer.tls.{n}": f"{getattr(files, n)}" for n in ("cert", "key", "ca")})
        )
        return finding

    assert kv_certificates(load(None)) == []
    assert (told(90).status, told(90).hint) == (Status.OK, "")
    assert (told(3).status, told(3).hint[:8]) == (Status.WARN, "renew it")
    assert (told(-1).status, told(-1).detail[:18]) == (Status.FAIL, "transfer.tls.cert:")


def test_doctor_leaves_the_loggers_as_they_are(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("tandem.rpc.redis_link")
    before = logger.level
    (finding,) = cluster_state(load(None, {"redis.url": "redis://127.0.0.1:1"}))
    assert finding.status is Status.WARN
    assert logger.level == before
    assert caplog.records == [], "the finding says it"


def test_doctor_says_once_that_traffic_is_not_encrypted(caplog: pytest.LogCaptureFixture) -> None:
    beyond = {"decode.host": "10.0.0.2", "decode.port": 7000, "cluster.tls": "off"}
    (off,) = members(load(None, beyond))
    assert "not encrypted" in off.detail
    assert caplog.records == []
