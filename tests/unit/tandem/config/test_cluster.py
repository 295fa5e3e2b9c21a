"""Invalid configurations are refused with the field's name before anything starts."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
import yaml
from pydantic import BaseModel

from kv_transfer.protocol.wire import MAX_LEASE_S, MIN_LEASE_S
from tandem.config.cluster import ClusterConfig, dump, dump_for_processes, load
from tandem.config.pools import MAX_REPLICAS
from tandem.config.source.yaml_file import PlainLoader
from tandem.errors import ConfigError
from tandem.protocol.session_versions import LOAD_PERIOD_S
from tandem.values.api_key import entry_of


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("routr: {}", "routr"),
        ("\n".join(f"s{index}: 1" for index in range(40)), "s15: unknown setting; and 24 more"),
        ("router: {allowed_origins: ['*']}", "router.allowed_origins"),
        ("router: {allowed_origins: ['null']}", "router.allowed_origins"),
        ("router: {allowed_origins: [chat.example.com]}", "router.allowed_origins"),
        ("router: {allowed_origins: ['https://chat.example.com/']}", "router.allowed_origins"),
        ("router: {allowed_origins: ['https://me@chat.example.com']}", "router.allowed_origins"),
        ("router: {allowed_origins: ['https://chat.example.com:port']}", "router.allowed_origins"),
        ("router: {port: -1}", "router.port"),
        ("router: {port: 8299, grpc_port: 8299}", "8299"),
        ("router: {port: 1}\nrouter: {port: 2}", "duplicate key"),
        ("a: &a [x]\nrouter: *a", "aliases"),
        ("a: " + "[" * 5000 + "]" * 5000, "nested too deeply"),
        ("a: !!python/object/apply:os.getcwd []", "python/object"),
        ("- router", "list"),
        ("secret: ''", "secret has 0 characters besides surrounding spaces; it must have at least 16"),
        (f"secret: '{' ' * 32}'", "secret has 0 characters besides surrounding spaces"),
        (f'secret: "{" " * 16}short\\t"', "secret has 5 characters besides surrounding spaces"),
        (f"secret: {'ä' * 33}", "secret has 66 bytes; it must have at least 16 characters and at most 64 bytes"),
        ("model: {max_model_len: 1}", "model.max_model_len: Input should be greater than or equal to 2, got 1"),
        ("engine: {num_blocks: 1}", "engine.num_blocks: Input should be greater than or equal to 2, got 1"),
        ("engine: {memory_bytes: -1}", "engine.memory_bytes: Input should be greater than 0, got -1"),
        (
            "{engine: {num_blocks: 2}, model: {max_model_len: 4096}}",
            "engine.num_blocks is 2, which with blocks of 16 is 32 tokens: model.max_model_len is 4096 and takes at"
            " least 256 blocks",
        ),
        (
            "{engine: {num_blocks: 4}, model: {max_model_len: 128}, prefill: {block_size: 32}}",
            "engine.num_blocks is 4, which with blocks of 16 is 64 tokens",
        ),
        (
            "redis: {url: 'redis://:hush@host:0/1'}",
            "redis.url: the port must be 1 to 65535, got 0",
        ),
        ("redis: {url: 'redis://host:65536'}", "redis.url is not redis[s]://"),
        ("decode: {replicas: 0}", "decode.replicas"),
        (f"prefill: {{replicas: {MAX_REPLICAS + 1}}}", "prefill.replicas"),
        ("transfer: {lease_s: .inf}", "transfer.lease_s"),
        ("transfer: {lease_s: .nan}", "transfer.lease_s"),
        ("transfer: {transport: pigeon}", "transfer.transport"),
        ("transfer: {isolated_network: perhaps}", "transfer.isolated_network"),
        ("prefill: {drain_s: .inf}", "prefill.drain_s"),
        ("engine: {max_step_s: 0}", "engine.max_step_s"),
        ("engine: {max_step_s: .nan}", "engine.max_step_s"),
        ("router: {request_timeout_s: 1.0e+300}", "router.request_timeout_s"),
        ("{prefill: {kv_dtype: int8}, decode: {kv_dtype: fp8_e4m3}}", "prefill.kv_dtype"),
        ("{prefill: {kv_dtype: int8}, decode: {kv_dtype: int4}}", "int4 and int8 cannot be converted into each other"),
        ("{transfer: {wire_dtype: bfloat16}}", "transfer.wire_dtype: no conversion from float32 to bfloat16"),
        ("{transfer: {wire_dtype: int8}, decode: {kv_dtype: fp8_e4m3}}", "transfer.wire_dtype"),
        ("transfer: {lease_s: 0.1}", "transfer.lease_s: Input should be greater than or equal to 0.5"),
        ("transfer: {lease_s: 3601}", "transfer.lease_s: Input should be less than or equal to 3600"),
        (
            "transfer: {transprot: tcp}",
            "transfer.transprot: unknown setting; did you mean transfer.transport?",
        ),
        ("routr: {port: 1}", "routr: unknown setting; did you mean router?"),
        ("grpc_port: 1", "grpc_port: unknown setting; did you mean router.grpc_port?"),
        ("router: {tls: {crt: a, key: b}}", "router.tls.crt: unknown setting; did you mean router.tls.cert?"),
        ("router: {batches: {folder: /tmp}}", "router.batches.folder: unknown setting"),
        (
            "engine: {windowed_layers: apart, offload_bytes: 5}",
            "engine.windowed_layers is apart, and engine.offload_bytes is 5: lower tiers keep whole blocks only",
        ),
        (
            "engine: {windowed_layers: apart}\nprefill: {nodes: 2, tensor_parallel_size: 2, rank_port: 7001}",
            "engine.windowed_layers is apart, and prefill.nodes is 2: it must be 1",
        ),
        ("engine: {disk_cache_bytes: 1}", "engine.disk_cache_path and engine.disk_cache_bytes are set together"),
        ("engine: {disk_cache_path: x, disk_cache_bytes: 1}", "engine.disk_cache_path needs engine.host_cache_bytes"),
        (
            "engine: {disk_cache_path: x, disk_cache_bytes: 1, host_cache_bytes: 1}\ndecode: {tensor_parallel_size: 2}",
            "engine.disk_cache_path with tensor_parallel_size 2",
        ),
        (
            "decode: {tensor_parallel_size: 4, nodes: 3, rank_port: 1}",
            "decode.nodes must divide tensor_parallel_size (4), got 3",
        ),
        ("prefill: {tensor_parallel_size: 4, nodes: 2}", "prefill.nodes is 2: rank_port must say"),
        ("decode: {tensor_parallel_size: 2, nodes: 2, port: 7, rank_port: 7}", "decode.rank_port is 7, the same as"),
        ("decode: {tensor_parallel_size: 2, nodes: 2, rank_port: 65535, replicas: 2}", "goes beyond 65535"),
        ("decode: {nodes: 65, tensor_parallel_size: 65}", "decode.nodes: Input should be less than or equal to 64"),
        (
            "{ray: {address: auto}, decode: {tensor_parallel_size: 2, nodes: 2, rank_port: 7}}",
            "decode.nodes must be 1 on Ray, got 2",
        ),
        ("? []\n: 1\n? []\n: 2", "a key is a list or a mapping (line 1)"),
        ("? {a: 1}\n: 1", "a key is a list or a mapping (line 1)"),
        ("router: {api_keys: ['']}", "router.api_keys.0.key: a key must have 1 to 512"),
        ("router: {api_keys: [good, ' spaced ']}", "router.api_keys.1.key: a key must have 1 to 512"),
        ('router: {api_keys: ["line\\n"]}', "router.api_keys.0.key: a key must have 1 to 512"),
        ("router: {api_keys: [käse]}", "router.api_keys.0.key: a key must have 1 to 512"),
        (f"router: {{api_keys: [{'k' * 513}]}}", "router.api_keys.0.key: a key must have 1 to 512"),
        (
            "router: {api_keys: [b, {key: a, tenant: x}, {key: a, tenant: y}]}",
            "router.api_keys.2 is the same key as api_keys.1",
        ),
        ("router: {api_keys: [typo], limits: {tenants: {typo: {}}}}", "router.limits.tenants.typo: no key"),
        ("router: {limits: {tenants: {any: {weight: 2}}}}", "router.limits.tenants.any: no key"),
        ("router: {worker_silence_s: 0.1}", "router.worker_silence_s: Input should be greater than or equal to 0.5"),
        ("{prefill: {block_size: 24}, decode: {block_size: 16}}", "prefill.block_size"),
        ("redis: {password: x}", "redis.password is set without redis.url"),
        ("redis: {sentinels: [localhost]}", "redis.sentinels.0: 'localhost' is not host:port"),
        ("redis: {sentinels: ['a:1', 'b:2', 'a:1']}", "redis.sentinels.2 is the same as redis.sentinels.0"),
        ("redis: {sentinels: ['a:0']}", "redis.sentinels.0: 'a:0' is not host:port"),
        (
            f"redis: {{sentinels: [{', '.join(f'h:{port}' for port in range(1, 18))}]}}",
            "redis.sentinels: Tuple should have at most 16 items",
        ),
        (
            "redis: {sentinels: ['a:1'], url: 'redis://:hush@host/0'}",
            "redis.url must have no host with redis.sentinels",
        ),
        ("redis: {sentinels: ['a:1'], url: 'redis://:hush@/x'}", "redis.url is not redis[s]://"),
        ("redis: {sentinels: ['a:1'], ca: ca.pem}", "redis.ca is set, but redis.url is not rediss://"),
        ("redis: {sentinels: ['a:1'], sentinel_master: 'two words'}", "redis.sentinel_master: String should match"),
        (
            "redis: {sentinels: ['a:1'], sentinel_username: me}",
            "redis.sentinel_username is set without redis.sentinel_password",
        ),
        (
            "redis: {url: 'redis://host', sentinel_password: hush}",
            "redis.sentinel_password is set without redis.sentinels",
        ),
        ("decode: {addresses: [localhost]}", "decode.addresses.0: 'localhost' is not host:port"),
        ("decode: {addresses: ['127.0.0.1:4000', '127.0.0.1:99999']}", "decode.addresses.1: '127.0.0.1:99999' is not"),
        ("decode: {addresses: ['127.0.0.1:0']}", "decode.addresses.0: '127.0.0.1:0' is not host:port"),
        ("decode: {addresses: ['::1:4000']}", "decode.addresses.0: '::1:4000' is not host:port; put an IPv6 address"),
        (
            "prefill: {addresses: ['two words:4000']}",
            "prefill.addresses.0: 'two words' is neither an IP address nor a host name",
        ),
        ("prefill: {addresses: ['http://10.0.0.2:4000']}", "prefill.addresses.0: 'http://10.0.0.2:4000' is not"),
        ("prefill: {addresses: [':4000']}", "prefill.addresses.0: '' is neither an IP address nor a host name"),
        ("router: {host: ''}", "router.host: '' is neither an IP address nor a host name"),
        ('router: {host: "a\nb"}', "router.host: 'a"),
        ("router: {host: '1::2::3'}", "router.host: '1::2::3' is not an IP address"),
        ("decode: {host: ' '}", "decode.host: ' ' is neither an IP address nor a host name"),
        (
            "router: {host: 0.0.0.0}",
            "router: host 0.0.0.0 is reachable from other machines and clients are not authenticated",
        ),
        ("router: {host: 0.0.0.0, tls: {cert: c, key: k}}", "clients are not authenticated"),
        ("router: {api_keys: [a], api_keys_file: b}", "router: api_keys and api_keys_file are both set"),
        ("router: {api_keys: ['sha256:12']}", "router.api_keys.0.key: sha256: must be followed by 64"),
        (f"router: {{api_keys: [a, '{entry_of('a')}']}}", "router.api_keys.1 is the same key as api_keys.0"),
        ('model: {name: "a\\u0001b"}', "model.name: a model's name must be printable ASCII"),
        ("model: {name: ' a'}", "model.name: a model's name must be printable ASCII"),
        (f"model: {{name: {'m' * 201}}}", "model.name: a model's name must have 1 to 200 characters"),
        ("model: {name: ''}", "model.name: a model's name must have 1 to 200 characters"),
        (
            "a: 1\nrouter: {port: 1\n",
            "cluster.yaml: line 3, column 1: while parsing a flow mapping, expected ',' or '}'",
        ),
        ("a: 1\n\tb: 2\n", "cluster.yaml: line 2, column 1: "),
        ("a: \x07\n", "cluster.yaml: unacceptable character"),
        ("a: 1\na: 2\n", "cluster.yaml: duplicate key 'a' (line 2)"),
        ("a: &b 1\nc: *b\n", "cluster.yaml: YAML aliases are not allowed"),
    ],
)
def test_config_invalid_value_is_refused_by_name(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as refusal:
        load(path)
    assert message in str(refusal.value)
    assert "Value error" not in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_config_minimal_pool_and_secret_with_blanks_are_valid() -> None:
    config = load(None, {"engine.num_blocks": 8, "model.max_model_len": 128, "secret": "my dog barks at 3"})
    assert (config.engine.num_blocks, config.model.max_model_len) == (8, 128)
    assert load(None, {"engine.num_blocks": 2, "prefill.replicas": 0}).model.max_model_len is None


def test_config_unreadable_file_is_named_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refusal:
        load(tmp_path)
    assert str(refusal.value) == f"{tmp_path}: Is a directory"


@pytest.mark.parametrize("lease_s", [0.5, 3600.0])
def test_config_lease_is_within_protocol_bounds(lease_s: float) -> None:
    assert MIN_LEASE_S <= load(None, {"transfer.lease_s": lease_s}).transfer.lease_s <= MAX_LEASE_S


class CountedKey(str):
    """Counts how often one is compared with another."""

    comparisons = 0

    def __eq__(self, other: object) -> bool:
        CountedKey.comparisons += 1
        return str.__eq__(self, other)

    __hash__ = str.__hash__


def test_config_duplicate_key_check_is_linear() -> None:
    CountedKey.comparisons = 0
    tag = "tag:yaml.org,2002:str"
    keys = [yaml.ScalarNode(tag, CountedKey(f"k{index}")) for index in range(2000)]
    node = yaml.MappingNode("tag:yaml.org,2002:map", [(key, yaml.ScalarNode(tag, "1")) for key in keys])
    assert len(PlainLoader("").construct_mapping(node)) == 2000
    assert CountedKey.comparisons < 4 * len(keys)


def test_config_worker_silence_is_at_least_two_load_periods() -> None:
    """Otherwise no worker could serve."""
    assert load(None, {"router.worker_silence_s": 0.5}).router.worker_silence_s >= 2 * LOAD_PERIOD_S


def test_config_variable_invalid_yaml_is_named_and_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_SECRET", "[hush")
    with pytest.raises(ConfigError) as refusal:
        load(None)
    assert "TANDEM_SECRET" in str(refusal.value)
    assert "hush" not in str(refusal.value)


@pytest.mark.parametrize("wanted", ["on", "off", "auto"])
def test_config_bare_switch_is_read_from_file_and_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: str
) -> None:
    """YAML parses `on` and `off` as booleans."""
    path = tmp_path / "cluster.yaml"
    path.write_text(f"engine: {{pipelined: {wanted}}}", encoding="utf-8")
    config = load(path)
    assert config.engine.pipelined == wanted
    path.write_text(dump(config), encoding="utf-8")
    assert load(path).engine.pipelined == wanted
    monkeypatch.setenv("TANDEM_ENGINE__PIPELINED", wanted)
    assert load(None).engine.pipelined == wanted


def test_config_null_removes_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load(None).engine.max_step_s == 0.4
    path = tmp_path / "cluster.yaml"
    path.write_text("engine: {max_step_s: null}", encoding="utf-8")
    assert load(path).engine.max_step_s is None
    path.write_text(dump(load(path)), encoding="utf-8")
    assert load(path).engine.max_step_s is None
    monkeypatch.setenv("TANDEM_ENGINE__MAX_STEP_S", "0.2")
    assert load(path).engine.max_step_s == 0.2


def test_config_readme_shows_defaults(tmp_path: Path) -> None:
    text = (Path(__file__).parents[4] / "README.md").read_text(encoding="utf-8")
    shown = text.partition("```yaml\n")[2].partition("```")[0]
    path = tmp_path / "cluster.yaml"
    path.write_text(shown, encoding="utf-8")
    assert set(yaml.safe_load(shown)) == {"model", "prefill", "decode", "router", "engine", "transfer", "telemetry"}
    given, default = load(path, {"secret": "s" * 16}), load(None, {"secret": "s" * 16})
    assert given == default


def test_config_variable_may_name_file_with_value(tmp_path, monkeypatch):
    (tmp_path / "secret").write_text("0123456789abcdef: [not YAML\n")
    monkeypatch.setenv("TANDEM_SECRET__FILE", str(tmp_path / "secret"))
    (tmp_path / "password").write_text("0017")
    monkeypatch.setenv("TANDEM_REDIS__PASSWORD__FILE", str(tmp_path / "password"))
    config = load(None, {"redis.url": "redis://somewhere"})
    assert config.secret is not None
    assert config.secret.get_secret_value() == "0123456789abcdef: [not YAML"
    assert config.redis.password is not None
    assert config.redis.password.get_secret_value() == "0017"  # a text, whatever it looks like


def test_config_variable_with_missing_file_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("TANDEM_SECRET__FILE", str(tmp_path / "nothing"))
    with pytest.raises(ConfigError, match=r"TANDEM_SECRET__FILE: .*nothing: No such file"):
        load(None)


def optional_sections(model: type[BaseModel], above: tuple[str, ...] = ()) -> Iterator[str]:
    for name, field in model.model_fields.items():
        options = get_args(field.annotation) or (field.annotation,)
        for option in options:
            if isinstance(option, type) and issubclass(option, BaseModel):
                if type(None) in options:
                    yield ".".join((*above, name))
                yield from optional_sections(option, (*above, name))


def test_config_variable_fills_null_section(tmp_path, monkeypatch):
    path = tmp_path / "cluster.yaml"
    names = list(optional_sections(ClusterConfig))
    assert {"router.tls", "router.audit_log", "router.hedging", "transfer.tls"} <= set(names)
    for name in names:
        above, _, last = name.rpartition(".")
        path.write_text(f"{above}: {{{last}: null}}", encoding="utf-8")
        assert load(path) == load(None)
        variable = f"TANDEM_{name.upper().replace('.', '__')}__NOTHING"
        monkeypatch.setenv(variable, "1")
        with pytest.raises(ConfigError, match=rf"{re.escape(name)}\.nothing: unknown setting"):
            load(path)
        monkeypatch.delenv(variable)
    path.write_text("router: {tls: null}", encoding="utf-8")
    monkeypatch.setenv("TANDEM_ROUTER__TLS__CERT", "/c")
    monkeypatch.setenv("TANDEM_ROUTER__TLS__KEY", "/k")
    tls = load(path).router.tls
    assert tls is not None
    assert (tls.cert, tls.key) == ("/c", "/k")
    path.write_text("router: {tls: none}", encoding="utf-8")
    with pytest.raises(ConfigError, match="tls is not a section"):
        load(path)


def test_dump_for_processes_omits_default_nulls_only(tmp_path: Path) -> None:
    config = ClusterConfig.model_validate({"engine": {"max_step_s": None}, "model": {"name": "mine"}})
    dumped = yaml.safe_load(dump_for_processes(config))
    assert "sample_ratio" not in dumped["telemetry"]
    assert dumped["engine"]["max_step_s"] is None
    path = tmp_path / "cluster.yaml"
    path.write_text(dump_for_processes(config))
    assert load(path) == config


def test_allowed_origins_are_normalised_like_browsers() -> None:
    given = ("HTTPS://Chat.Example.com:443", "http://localhost:3000", "http://[::1]:80", "https://a.example:80")
    config = ClusterConfig.model_validate({"router": {"allowed_origins": given}})
    written = ("https://chat.example.com", "http://localhost:3000", "http://[::1]", "https://a.example:80")
    assert config.router.allowed_origins == written
