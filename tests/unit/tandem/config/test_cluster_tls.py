"""Whether processes use TLS between them: every mode, with and without certificates, on loopback and beyond."""

import pytest
import yaml

from tandem.config.cluster import ClusterConfig, dump_for_processes, load
from tandem.config.cluster_tls import ClusterTls, LinkSecurity, link_security, needs_certificates, plain_warning
from tandem.config.worker import cluster_tls, peer_hosts
from tandem.errors import ConfigError

FILES = {"cert": "/c.pem", "key": "/k.pem", "ca": "/ca.pem"}
LOCAL, REMOTE = ("127.0.0.1", "localhost", "[::1]"), ("127.0.0.1", "10.0.0.2")


def section(text: str) -> ClusterTls:
    return ClusterConfig.model_validate(yaml.safe_load(f"cluster: {{tls: {text}}}")).cluster.tls


@pytest.mark.parametrize("text", ["off", "{mode: off}", "'off'", "{mode: 'off', cert: /c, key: /k, ca: /a}"])
def test_tls_mode_off_in_any_yaml_spelling_is_plain(text: str) -> None:
    assert section(text).mode == "off"
    assert link_security(section(text), REMOTE) is LinkSecurity.PLAIN


def test_tls_mode_from_environment_replaces_section(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(yaml.safe_dump({"cluster": {"tls": FILES}}))
    monkeypatch.setenv("TANDEM_CLUSTER__TLS", "off")
    assert load(path).cluster.tls == ClusterTls(mode="off")


@pytest.mark.parametrize(
    ("mode", "expected"),
    [("auto", LinkSecurity.TLS), ("required", LinkSecurity.TLS), ("permissive", LinkSecurity.PERMISSIVE)],
)
@pytest.mark.parametrize("hosts", [LOCAL, REMOTE])
def test_tls_certificates_are_used_on_loopback(mode: str, expected: LinkSecurity, hosts: tuple[str, ...]) -> None:
    assert link_security(ClusterTls(mode=mode, **FILES), hosts) is expected


def test_tls_auto_on_loopback_without_certificates_is_plain() -> None:
    assert link_security(ClusterTls(), LOCAL) is LinkSecurity.PLAIN


@pytest.mark.parametrize("host", ["10.0.0.2", "decode-0", "0.0.0.0", "[fd00::1]"])
def test_tls_auto_beyond_loopback_without_certificates_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match=r"cluster.tls: .*`tandem cert`.*`cluster.tls: off`") as refused:
        link_security(ClusterTls(), ("127.0.0.1", host))
    assert host.strip("[]") in str(refused.value)


@pytest.mark.parametrize("mode", ["required", "permissive"])
def test_tls_stated_mode_without_certificates_is_refused(mode: str) -> None:
    with pytest.raises(ConfigError, match=rf"cluster.tls: mode is {mode} and there are no certificates.*`tandem cert`"):
        link_security(ClusterTls(mode=mode), LOCAL)


@pytest.mark.parametrize(
    ("tls", "reason"),
    [
        ("{cert: /c}", "cluster.tls: key and ca must be set, too"),
        ("{key: /k, ca: /a}", "cluster.tls: cert must be set, too"),
        ("{cert: /c, key: /k, ca: /a, pem: x}", "cluster.tls: pem and cert, key and ca are both set"),
        ("sometimes", "cluster.tls: "),
        ("{mode: sometimes}", "cluster.tls.mode: Input should be 'auto', 'required', 'permissive' or 'off'"),
    ],
)
def test_tls_bad_section_names_the_field(tls: str, reason: str, tmp_path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(f"cluster: {{tls: {tls}}}")
    with pytest.raises(ConfigError) as refused:
        load(path)
    assert reason in str(refused.value)


@pytest.mark.parametrize(
    ("tls", "hosts", "expected"),
    [
        (ClusterTls(), LOCAL, False),
        (ClusterTls(), REMOTE, True),
        (ClusterTls(mode="required"), LOCAL, True),
        (ClusterTls(mode="off"), REMOTE, False),
        (ClusterTls(mode="permissive"), REMOTE, False),
        (ClusterTls(**FILES), REMOTE, False),
        (ClusterTls(pem="x"), REMOTE, False),
    ],
)
def test_up_generates_certificates_only_if_needed(tls: ClusterTls, hosts, expected: bool) -> None:
    assert needs_certificates(tls, hosts) is expected


def test_tls_warning_only_if_unprotected_beyond_loopback() -> None:
    assert "cluster.tls: off" in plain_warning(ClusterTls(mode="off"), REMOTE)
    assert "permissive" in plain_warning(ClusterTls(mode="permissive", **FILES), REMOTE)
    for quiet in (ClusterTls(mode="off"), ClusterTls(mode="permissive", **FILES)):
        assert plain_warning(quiet, LOCAL) is None
    assert plain_warning(ClusterTls(**FILES), REMOTE) is None


def test_peer_hosts_are_from_addresses_or_pool_hosts() -> None:
    config = ClusterConfig.model_validate(
        {
            "prefill": {"host": "10.0.0.2", "port": 7000},
            "decode": {"host": "10.0.0.9", "addresses": ["[fd00::1]:1", "decode-1:2"]},
        }
    )
    assert peer_hosts(config) == ["10.0.0.2", "[fd00::1]", "decode-1"]
    assert peer_hosts(ClusterConfig()) == []


@pytest.mark.parametrize(
    ("pool", "reason"),
    [
        ("{port: 7000, health_port: 7000}", "decode.health_port is 7000, the same as port"),
        ("{rank_port: 7001, health_port: 7001}", "decode.health_port is 7001, the same as rank_port"),
        ("{replicas: 9, health_port: 65530}", "one port for each of 9 workers goes beyond 65535"),
    ],
)
def test_health_port_conflict_is_refused(pool: str, reason: str, tmp_path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(f"decode: {pool}")
    with pytest.raises(ConfigError, match=reason):
        load(path)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "{prefill: {health_port: 9000, replicas: 3}, decode: {health_port: 9002}}",
            "decode.health_port: port 9002 of localhost is one of prefill.health_port, too",
        ),
        (
            "{prefill: {addresses: ['10.0.0.1:1'], health_port: 9},"
            " decode: {addresses: ['10.0.0.1:2'], health_port: 9}}",
            "decode.health_port: port 9 of 10.0.0.1 is one of prefill.health_port, too",
        ),
        (
            "decode: {replicas: 3, tensor_parallel_size: 2, nodes: 2, rank_port: 7000, health_port: 7002}",
            "decode.rank_port: port 7002 of localhost is one of decode.health_port, too",
        ),
        (
            "decode: {replicas: 2, addresses: ['127.0.0.1:7000', 'localhost:7001'], health_port: 7001}",
            "decode.addresses: port 7001 of localhost is one of decode.health_port, too",
        ),
    ],
)
def test_health_port_that_another_worker_of_the_machine_has_is_refused(text: str, reason: str, tmp_path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=reason):
        load(path)


@pytest.mark.parametrize(
    "text",
    [
        "{prefill: {health_port: 9000, replicas: 3}, decode: {health_port: 9003}}",
        "{prefill: {port: 7, health_port: 9}, decode: {port: 7, health_port: 9}}",
        "{prefill: {addresses: ['10.0.0.1:1'], health_port: 9}, decode: {addresses: ['10.0.0.2:1'], health_port: 9}}",
    ],
)
def test_health_ports_that_differ_or_are_on_different_machines_are_taken(text: str, tmp_path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    load(path)


def test_process_of_older_parent_is_plain() -> None:
    older = ClusterConfig.model_validate({"decode": {"addresses": ["10.0.0.2:7000"]}})
    assert cluster_tls(older, has_parent=True).mode == "off"
    assert cluster_tls(older, has_parent=False).mode == "auto"
    ours = ClusterConfig.model_validate(yaml.safe_load(dump_for_processes(older)))
    assert cluster_tls(ours, has_parent=True).mode == "auto"
