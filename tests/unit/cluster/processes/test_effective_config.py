"""From the user's configuration to the effective one."""

import io
import json
import os
import shlex
import socket
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from cluster.cli import banner
from cluster.processes import effective_config, launcher
from cluster.processes.effective_config import (
    PortDrawer,
    child_environment,
    make_effective,
    module_command,
    plan_processes,
    resolve_model,
    stated_ports,
    with_certificates,
    written,
)
from cluster.processes.launcher import LocalLauncher
from cluster.supervisor.process_view import ProcessView
from cluster.supervisor.supervisor import ProcessPlan, ProcessState, Role
from tandem.config.cluster import ClusterConfig, RouterConfig, dump_for_processes, load
from tandem.config.engine import ModelSection
from tandem.config.pools import PoolConfig
from tandem.errors import ConfigError
from tandem.model_path import model_directory, model_name
from tandem.rpc.cluster_credentials import open_credentials
from tandem.rpc.hosts import hold, split
from tests.support.engine.gguf_writer import write_gguf
from tests.unit.cluster.doctor.test_doctor import LLAMA

FREE = RouterConfig(port=0, grpc_port=0)


def test_effective_config_fills_defaults_and_survives_file(tmp_path):
    config = ClusterConfig(router=FREE, prefill=PoolConfig(replicas=2))
    effective = make_effective(config)
    ports = [int(a.rpartition(":")[2]) for a in effective.prefill.addresses + effective.decode.addresses]
    assert len({*ports, effective.router.port, effective.router.grpc_port} - {0}) == 5
    assert len(effective.secret.get_secret_value()) >= 32
    assert make_effective(config).secret != effective.secret
    with written(effective, tmp_path) as path:
        assert path.stat().st_mode & 0o777 == 0o600
        assert load(path) == effective
    assert not path.exists()


def test_effective_config_keeps_user_settings():
    config = ClusterConfig(router=FREE, secret="0123456789abcdef")
    effective = make_effective(config)
    again = make_effective(effective)
    assert again == effective
    assert effective.secret == config.secret


def test_effective_config_taken_port_is_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            ConfigError, match=rf"router.port: cannot listen on 127.0.0.1:{port}: Address already in use"
        ):
            make_effective(ClusterConfig(router=RouterConfig(port=port, grpc_port=0)))


@pytest.mark.parametrize(
    ("decode", "message"),
    [
        (PoolConfig(replicas=1, addresses=("127.0.0.1:4001", "127.0.0.1:4002")), "has 2 entries"),
        (PoolConfig(replicas=1, host="203.0.113.1"), "decode.host: cannot listen on 203.0.113.1"),
    ],
)
def test_effective_config_contradictions_are_refused(decode, message):
    with pytest.raises(ConfigError, match=message):
        make_effective(ClusterConfig(router=FREE, decode=decode))


def first_of_two_free_ports() -> int:
    for _ in range(100):
        with hold("127.0.0.1", 0) as held, suppress(OSError, ConfigError):
            port: int = held.getsockname()[1]
            with hold("127.0.0.1", port + 1):
                return port
    raise AssertionError("no two ports in a row are free")


def test_effective_config_shared_rank_port_is_refused():
    port = first_of_two_free_ports()
    spread = {"tensor_parallel_size": 2, "nodes": 2}
    prefill = PoolConfig(replicas=2, rank_port=port, **spread)
    with pytest.raises(ConfigError, match=rf"decode.rank_port: cannot listen on 127.0.0.1:{port + 1}"):
        make_effective(ClusterConfig(router=FREE, prefill=prefill, decode=PoolConfig(rank_port=port + 1, **spread)))


def test_health_port_that_is_taken_is_refused_before_anything_starts():
    port = first_of_two_free_ports()
    with hold("127.0.0.1", port + 1):
        decode = PoolConfig(replicas=2, health_port=port)
        with pytest.raises(ConfigError, match=rf"decode\.health_port: cannot listen on 127.0.0.1:{port + 1}"):
            make_effective(ClusterConfig(router=FREE, decode=decode))


def test_drawn_port_is_none_that_is_stated(monkeypatch):
    port, first = first_of_two_free_ports(), effective_config._FIRST_PORT
    config = ClusterConfig(
        router=FREE,
        prefill=PoolConfig(replicas=0),
        decode=PoolConfig(health_port=port, tensor_parallel_size=2, nodes=2, rank_port=port + 1),
    )
    assert {port, port + 1} <= stated_ports(config)
    draws = [port - first, port + 1 - first]
    monkeypatch.setattr(effective_config.secrets, "randbelow", lambda most: draws.pop(0) if draws else most - 1)
    with PortDrawer(stated_ports(config)) as ports:
        assert ports.draw("127.0.0.1", "decode.host") not in (port, port + 1)
    assert not draws
    draws += [port - first, port + 1 - first]
    [address] = make_effective(config).decode.addresses
    assert split(address)[1] not in (port, port + 1)


def test_split_address_removes_ipv6_brackets():
    assert split("127.0.0.1:80") == ("127.0.0.1", 80)
    assert split("[::1]:80") == ("::1", 80)


def test_process_plan_adds_join_time_to_multi_node_workers():
    spread = PoolConfig(tensor_parallel_size=2, nodes=2, rank_port=7100, join_s=1200.0)
    plans = plan_processes(ClusterConfig(prefill=spread, decode=PoolConfig(join_s=1200.0)))
    assert [plan.join_s for plan in plans] == [1200.0, 0.0, 0.0]


def test_process_plan_and_module_commands():
    prefill = PoolConfig(replicas=2, addresses=("127.0.0.1:4000", "127.0.0.1:4001"))
    plans = plan_processes(ClusterConfig(prefill=prefill))
    assert [plan.name for plan in plans] == ["prefill-0", "prefill-1", "decode-0", "router"]
    command = module_command(plans[1], Path("/run/c.yaml"), 7)
    place = ["--config", "/run/c.yaml", "--index", "1", "--address", "127.0.0.1:4001"]
    assert command[1:] == ["-m", "prefill_worker", *place, "--ready-fd", "7"]
    assert "--address" not in module_command(plans[2], Path("/run/c.yaml"), 7), "it turns out when it serves"
    router = module_command(ProcessPlan(name="router", role=Role.ROUTER), Path("/run/c.yaml"), 7)
    assert router[1:] == [
        "-m",
        "router",
        "--config",
        "/run/c.yaml",
        "--index",
        "0",
        "--siblings",
        "/run",
        "--ready-fd",
        "7",
    ]


def test_child_environment_has_no_settings():
    environment = child_environment({"TANDEM_SECRET": "x", "HOME": "/root", "PYTHONPATH": "/mine"})
    assert "TANDEM_SECRET" not in environment
    assert environment["HOME"] == "/root"
    assert environment["PYTHONPATH"].endswith("/mine")


def test_resolve_model_finds_directories_or_refuses(tmp_path, monkeypatch):
    builtin = ClusterConfig()
    assert resolve_model(builtin) is builtin
    (tmp_path / "my-model").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"no config\.json and no tokenizer\.json"):
        resolve_model(ClusterConfig(model=ModelSection(path="my-model")))
    (tmp_path / "my-model" / "tokenizer.json").write_text("{}")
    (tmp_path / "my-model" / "config.json").write_text(json.dumps(LLAMA))
    resolved = resolve_model(ClusterConfig(model=ModelSection(path="my-model")))
    assert resolved.model.path == str(tmp_path / "my-model")
    assert resolved.model.name == "my-model"
    with pytest.raises(ConfigError, match=r"neither a directory, nor a \.gguf file, nor a hub id"):
        resolve_model(ClusterConfig(model=ModelSection(path="./nothing-here")))


def test_resolve_model_gguf_file_is_served_alone_or_refused_by_name(tmp_path, monkeypatch):
    write_gguf(model_directory("builtin"), tmp_path / "tiny-q8_0.gguf", block_type="Q8_0", pre="smollm")
    monkeypatch.chdir(tmp_path)
    resolved = resolve_model(ClusterConfig(model=ModelSection(path="tiny-q8_0.gguf")))
    assert (resolved.model.path, resolved.model.name) == (str(tmp_path / "tiny-q8_0.gguf"), "tiny-q8_0")
    assert model_name(resolved.model.path, None) == "tiny-q8_0"
    assert model_directory(resolved.model.path) == tmp_path / "tiny-q8_0.gguf"
    assert make_effective(resolved).model.dtype == "bfloat16"
    with pytest.raises(ConfigError, match=r"no config\.json and no tokenizer\.json \(name a GGUF file itself"):
        resolve_model(ClusterConfig(model=ModelSection(path=str(tmp_path))))
    write_gguf(model_directory("builtin"), tmp_path / "wrong.gguf", pre="made-up")
    for runs_workers in (True, False):
        with pytest.raises(
            ConfigError, match=r"wrong\.gguf cannot be served: wrong\.gguf: tokenizer\.ggml\.pre must be"
        ):
            resolve_model(ClusterConfig(model=ModelSection(path="wrong.gguf")), runs_workers=runs_workers)
    (tmp_path / "cut.gguf").write_bytes((tmp_path / "wrong.gguf").read_bytes()[:5000])
    with pytest.raises(ConfigError, match=r"cut\.gguf cannot be served: cut\.gguf: ends within its header"):
        resolve_model(ClusterConfig(model=ModelSection(path="cut.gguf")))
    os.mkfifo(tmp_path / "fifo.gguf")
    with pytest.raises(ConfigError, match=r"fifo\.gguf is neither a directory, nor a \.gguf file"):
        resolve_model(ClusterConfig(model=ModelSection(path="fifo.gguf")))


def test_resolve_model_gguf_file_on_hub_is_downloaded_alone(tmp_path, monkeypatch):
    asked = []

    def download(hub_id, files=None):
        asked.append((hub_id, files))
        return str(tmp_path)

    monkeypatch.setattr(effective_config, "download", download)
    (tmp_path / "q").mkdir()
    write_gguf(model_directory("builtin"), tmp_path / "q" / "tiny-f32.gguf", pre="smollm")
    resolved = resolve_model(ClusterConfig(model=ModelSection(path="org/tiny-GGUF/q/tiny-f32.gguf")))
    assert (resolved.model.path, resolved.model.name) == (str(tmp_path / "q" / "tiny-f32.gguf"), "tiny-f32")
    with pytest.raises(ConfigError, match=r"model\.path: org/tiny-GGUF has no file other\.gguf"):
        resolve_model(ClusterConfig(model=ModelSection(path="org/tiny-GGUF/other.gguf")))
    assert asked == [("org/tiny-GGUF", ["q/tiny-f32.gguf"]), ("org/tiny-GGUF", ["other.gguf"])]
    for path in ("org/name/../../x.gguf", "org/name/x/../y.gguf", "org/name/file.bin", "org/name/.gguf"):
        with pytest.raises(ConfigError, match="neither a directory"):
            resolve_model(ClusterConfig(model=ModelSection(path=path)))


def test_resolve_model_unsupported_architecture_is_refused(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"architectures": ["GPT2LMHeadModel"]}))
    config = ClusterConfig(model=ModelSection(path=str(tmp_path), dtype="float32"))
    with pytest.raises(ConfigError) as refused:
        resolve_model(config)
    message = str(refused.value)
    assert message.startswith(f"model.path: {tmp_path} cannot be served: config.json: architectures must be one of ")
    families = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
    assert all(name in message for name in families)
    assert message.endswith("is ['GPT2LMHeadModel']")
    assert resolve_model(config, runs_workers=False).model.path == str(tmp_path)


def test_resolve_model_bad_generation_config_is_refused_unless_off(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "generation_config.json").write_text('{"temperature": 7}')
    for runs_workers in (True, False):
        with pytest.raises(ConfigError, match=f"{tmp_path} cannot be served: generation_config.json: temperature"):
            resolve_model(ClusterConfig(model=ModelSection(path=str(tmp_path))), runs_workers=runs_workers)
    model = ModelSection(path=str(tmp_path), generation_config="none")
    assert resolve_model(ClusterConfig(model=model)).model.path == str(tmp_path)


def show(config, effective, views, width=120):
    console = Console(width=width, record=True, file=io.StringIO())
    banner.print_banner(console, config, effective, views)
    return console.export_text()


def make_views(effective):
    ready = {
        "worker_id": "d-1",
        "num_blocks": 512,
        "block_size": 16,
        "kv_bytes": 3 << 20,
        "weights_bytes": 9 << 20,
        "model": "tandem-tiny",
        "max_model_len": 2048,
        "load_s": 0.44,
    }
    common = {"state": ProcessState.READY, "pid": 77}
    return [
        ProcessView(name="decode-0", role=Role.DECODE, address=effective.decode.addresses[0], ready=ready, **common),
        ProcessView(name="router", role=Role.ROUTER, address="127.0.0.1:8000", **common),
    ]


def test_banner_shows_cluster_and_hides_secrets():
    config = ClusterConfig(
        router=RouterConfig(port=0, grpc_port=0, host="0.0.0.0", api_keys=("key-of-a-user",)), secret="0123456789abcdef"
    )
    effective = make_effective(config)
    text = show(config, effective, make_views(effective))
    for expected in (
        "tandem-tiny",
        "2048 tokens",
        "512 × 16",
        "3.0 MiB",
        "9.0 MiB",
        "decode-0 (d-1)",
        effective.decode.addresses[0],
        f"http://127.0.0.1:{effective.router.port}/metrics",
        f"127.0.0.1:{effective.router.grpc_port}",
        "router.host",
        "a second Ctrl-C kills",
    ):
        assert expected in text
    assert "key-of-a-user" not in text
    assert "0123456789abcdef" not in text
    assert text.count("(hidden)") == 2


def test_effective_config_resolves_auto_dtype(tmp_path):
    """A worker of the previous version knows no `auto`."""
    assert make_effective(ClusterConfig()).model.dtype == "float32"
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"dtype": "bfloat16"}))
    assert make_effective(load(None, {"model.path": str(tmp_path)})).model.dtype == "bfloat16"
    assert make_effective(load(None, {"model.path": str(tmp_path), "model.dtype": "float16"})).model.dtype == "float16"
    assert make_effective(load(None, {"model.path": "org/model"})).model.dtype == "auto"
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"config\.json"):
        make_effective(load(None, {"model.path": str(tmp_path)}))


def test_effective_config_resolves_auto_quantization(tmp_path):
    """A worker of the previous version knows no `auto`."""
    assert make_effective(ClusterConfig()).engine.quantization == "none"
    assert make_effective(load(None, {"engine.quantization": "stored"})).engine.quantization == "stored"
    path = {"model.path": str(tmp_path)}
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"dtype": "float32"}))
    assert make_effective(load(None, path)).engine.quantization == "none"
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"dtype": "float32", "quantization_config": gptq}))
    assert make_effective(load(None, path)).engine.quantization == "auto"


def test_banner_shows_auto_dtype_and_failover_note():
    def banner_of(dtype, deterministic=False, reported="bfloat16"):
        config = load(None, {"model.dtype": dtype, "engine.deterministic": deterministic})
        effective = make_effective(config)
        views = [replace(view, ready={**view.ready, "dtype": reported}) for view in make_views(effective)]
        return show(config, effective, views, width=80)

    assert "builtin · bfloat16 (auto)" in banner_of("auto")
    assert banner.FAILOVER_NOTE in banner_of("auto")
    assert banner.FAILOVER_NOTE not in banner_of("auto", deterministic=True)
    assert "builtin · float32 (auto)" in banner_of("auto", reported="float32")
    assert banner.FAILOVER_NOTE not in banner_of("auto", reported="float32")
    stated = banner_of("float16", reported="float16")
    assert "float16" in stated
    assert "(auto)" not in stated
    assert banner.FAILOVER_NOTE in stated


def test_banner_says_that_pools_quantize_differently():
    cases = {"decode.quantization": "int4"}, {"engine.quantization": "int4"}, {"decode.quantization": "none"}
    for differ, overrides in zip((True, False, False), cases, strict=True):
        config = load(None, {"model.dtype": "bfloat16", **overrides})
        effective = make_effective(config)
        assert (banner.POOLS_NOTE in show(config, effective, make_views(effective), width=80)) == differ


def test_disk_cache_and_pools_that_quantize_differently_are_refused():
    cache = {"engine.disk_cache_bytes": 2**30, "engine.host_cache_bytes": 2**30, "engine.disk_cache_path": "/tmp/x"}
    load(None, {**cache, "engine.quantization": "int4"})
    with pytest.raises(ConfigError, match=r"prefill\.quantization and decode\.quantization differ, and a disk cache"):
        load(None, {**cache, "decode.quantization": "int4"})


def test_banner_shows_what_weights_are_restored_from():
    effective = make_effective(ClusterConfig())
    views = make_views(effective)
    assert "restored" not in show(ClusterConfig(), effective, views)
    worker = replace(views[0], ready=views[0].ready | {"dtype": "bfloat16", "weight_format": "AWQ, 4 bits"})
    assert "restored to bfloat16 from AWQ, 4 bits" in show(ClusterConfig(), effective, [worker, views[1]])
    kept = replace(worker, ready=worker.ready | {"matrices_as_stored": 14})
    text = show(ClusterConfig(), effective, [kept, views[1]], width=120)
    assert "AWQ, 4 bits: 14 matrices are multiplied as stored, any others restored to bfloat16" in text
    prefill = replace(worker, name="prefill-0", role=Role.PREFILL)
    text = show(ClusterConfig(), effective, [replace(kept, role=Role.DECODE), prefill, views[1]], width=120)
    assert "multiplied as stored, any others restored to bfloat16 (decode)" in text
    assert "restored to bfloat16 from AWQ, 4 bits (prefill)" in text
    assert banner.POOLS_NOTE in text
    again = make_effective(load(None, {"engine.quantization": "int8", "model.dtype": "bfloat16"}))
    assert "from AWQ, 4 bits, then quantized as int8" in show(ClusterConfig(), again, [worker, views[1]], width=120)


def test_banner_shows_gpus_if_any():
    effective = make_effective(ClusterConfig())
    views = make_views(effective)
    assert "GPU" not in show(ClusterConfig(), effective, views, width=80)
    worker = replace(views[0], ready=views[0].ready | {"gpus": [3], "gpu_sharers": 2}, pid=4194303)
    ranks = replace(views[0], name="decode-1", ready=views[0].ready | {"gpus": [4, 5], "gpu_sharers": 1})
    text = show(ClusterConfig(), effective, [worker, ranks, views[1]], width=80)
    for expected in ("GPU", "3 1/2", "4,5", "4194303", "512 × 16", "3.0 MiB", "9.0 MiB"):
        assert expected in text
    assert "…" not in text


def test_banner_fits_narrow_terminal():
    effective = make_effective(ClusterConfig())
    views = [replace(view, pid=4194303) for view in make_views(effective)]
    text = show(ClusterConfig(), effective, views, width=80)
    for expected in ("4194303", effective.decode.addresses[0], "512 × 16", "3.0 MiB", "9.0 MiB"):
        assert expected in text
    assert "…" not in text


@pytest.mark.parametrize(
    ("task", "route", "field"),
    [("embed", "embeddings", "input"), ("judge", "rerank", "query"), ("classify", "rerank", "documents")],
)
def test_banner_curl_line_asks_for_what_the_model_makes(task, route, field):
    words = shlex.split(banner.curl_line(load(None, {}), "m", task=task))
    assert words[2].endswith(f"/v1/{route}")
    assert field in json.loads(words[-1])


def test_banner_curl_line_is_shell_safe():
    config = ClusterConfig(router=RouterConfig(port=9000))
    words = shlex.split(banner.curl_line(config, "it's"))
    assert words[:3] == ["curl", "-N", "http://127.0.0.1:9000/v1/chat/completions"]
    body = json.loads(words[-1])
    assert body["model"] == "it's"
    assert body["stream"] is True


def test_banner_without_chat_template_shows_completions_call():
    effective = make_effective(ClusterConfig())
    views = make_views(effective)
    assert "/v1/chat/completions" in show(ClusterConfig(), effective, views)
    base = [replace(view, ready={**view.ready, "has_chat_template": False}) for view in views]
    text = show(ClusterConfig(), effective, base)
    assert "/v1/chat/completions" not in text
    assert "use it for text completion" in text
    words = shlex.split(banner.curl_line(effective, "m", chats=False))
    assert words[2].endswith("/v1/completions")
    body = json.loads(words[-1])
    assert body["prompt"]
    assert "messages" not in body


def test_banner_lists_changed_settings_and_formats_bytes():
    assert banner.changed_settings(ClusterConfig(), ClusterConfig()) == {}
    changed = banner.changed_settings(load(None, {"decode.replicas": 3, "model.dtype": "bfloat16"}), ClusterConfig())
    assert changed == {"decode.replicas": "3", "model.dtype": "bfloat16"}
    absent_by_default = load(None, {f"transfer.tls.{name}": f"{name}.pem" for name in ("cert", "key", "ca")})
    assert banner.changed_settings(absent_by_default, ClusterConfig()) == {
        "transfer.tls.cert": "cert.pem",
        "transfer.tls.key": "key.pem",
        "transfer.tls.ca": "ca.pem",
    }
    limits = {"acme": {"tokens_per_minute": 9, "weight": 2.0}, "other": {}}
    keys = [{"key": "k" * 32 + name, "tenant": name, "operator": name == "acme"} for name in limits]
    audited = load(
        None, {"router.audit_log.path": "/var/log/audit", "router.limits.tenants": limits, "router.api_keys": keys}
    )
    assert banner.changed_settings(audited, ClusterConfig()) == {
        "router.audit_log.path": "/var/log/audit",
        "router.api_keys": "(hidden) of acme (operator), (hidden) of other",
        "router.limits.tenants": "acme: tokens_per_minute 9 and weight 2.0, other: no limit",
    }
    hedged = load(None, {"router.hedging": {}})
    assert banner.changed_settings(hedged, ClusterConfig()) == {"router.hedging": "with defaults"}
    assert [banner.format_bytes(n) for n in (12, 1536, 5 << 30, 3 << 40)] == ["12 B", "1.5 KiB", "5.0 GiB", "3.0 TiB"]


def test_certificates_are_generated_beyond_loopback_and_kept():
    made = with_certificates(ClusterConfig(), ("10.0.0.2",))
    assert open_credentials(made.cluster.tls, ("10.0.0.2",)) is not None
    assert with_certificates(ClusterConfig(), ("10.0.0.2",)).cluster != made.cluster
    assert with_certificates(made, ("10.0.0.2",)).cluster == made.cluster
    assert make_effective(ClusterConfig(router=FREE)).cluster == ClusterConfig().cluster
    off = load(None, {"cluster.tls": "off"})
    assert with_certificates(off, ("10.0.0.2",)).cluster == off.cluster


def test_certificates_are_generated_if_required_not_if_permissive():
    required = load(None, {"cluster.tls": "required", "router.port": 0, "router.grpc_port": 0})
    effective = make_effective(required)
    assert "PRIVATE KEY" in effective.cluster.tls.pem.get_secret_value()
    assert "PRIVATE KEY" not in repr(effective)
    assert ClusterConfig.model_validate(yaml.safe_load(dump_for_processes(effective))) == effective
    with pytest.raises(ConfigError, match=r"cluster\.tls: mode is permissive and there are no certificates"):
        make_effective(load(None, {"cluster.tls": "permissive", "router.port": 0, "router.grpc_port": 0}))


def test_more_workers_than_memory_can_hold_are_refused_before_any_starts(monkeypatch):
    monkeypatch.setattr(launcher, "free_memory_bytes", lambda: 8 << 30)
    many = load(None, {"prefill.replicas": 50, "decode.replicas": 2, "decode.tensor_parallel_size": 2})
    with pytest.raises(ConfigError, match=r"^prefill\.replicas is 50: 55 worker processes .* 8\.1 GiB, and 8\.0 GiB"):
        LocalLauncher().settle(many)
    fitting = load(None, {"prefill.replicas": 49, "decode.replicas": 2, "decode.tensor_parallel_size": 2})
    assert len(LocalLauncher().settle(fitting).prefill.addresses) == 49
    monkeypatch.setattr(launcher, "free_memory_bytes", lambda: 0)
    LocalLauncher(routers_only=True).settle(many)
