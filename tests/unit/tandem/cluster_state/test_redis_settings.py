"""Redis URLs: parsed completely, or refused without being shown."""

import sys
from pathlib import Path

import pytest

from tandem.config.cluster import ClusterConfig, dump, load
from tandem.config.redis import RedisConfig
from tandem.errors import ConfigError
from tandem.values.ids import Incarnation, WorkerId
from tandem.values.roles import WorkerRole
from tandem.values.worker_identity import WorkerIdentity
from worker.cluster_state.redis_publisher import make_publisher


def test_redis_settings_without_url_are_none() -> None:
    assert ClusterConfig().redis.redis_settings() is None


def test_redis_settings_parse_every_part_of_url() -> None:
    settings = RedisConfig(url="rediss://me:p%40ss@[::1]:7000/3", cluster="x", ca="ca.pem").redis_settings()
    assert settings is not None
    assert (settings.host, settings.port, settings.database) == ("::1", 7000, 3)
    assert (settings.username, settings.password, settings.tls) == ("me", "p@ss", True)
    assert (settings.cluster, settings.ca) == ("x", "ca.pem")
    assert "p@ss" not in repr(settings)
    assert "p@ss" not in settings.display_name


def test_redis_settings_separate_password_is_used_verbatim() -> None:
    settings = RedisConfig(url="redis://host", password="a%20b").redis_settings()
    assert settings is not None
    assert (settings.password, settings.port, settings.database, settings.tls) == ("a%20b", 6379, 0, False)


def test_redis_settings_with_sentinels_name_no_host() -> None:
    config = RedisConfig(
        url="rediss://me:p%40ss@/3",
        ca="ca.pem",
        sentinels=("sentinel-0:26379", "[::1]:5"),
        sentinel_username="watch",
        sentinel_password="tell-nobody",
    )
    settings = config.redis_settings()
    assert settings is not None
    sentinel = settings.sentinel
    assert sentinel is not None
    assert (sentinel.addresses, sentinel.master) == ((("sentinel-0", 26379), ("::1", 5)), "mymaster")
    master, one = settings.for_server(("10.0.0.1", 7000)), settings.for_sentinel(("::1", 5))
    assert (master.display_name, master.username, master.password, master.tls) == (
        "10.0.0.1:7000/3",
        "me",
        "p@ss",
        True,
    )
    assert (one.host, one.database, one.username, one.password) == ("::1", 0, "watch", "tell-nobody")
    assert (one.tls, one.ca) == (True, "ca.pem"), "sentinels have the server's authority"
    assert not {"p@ss", "tell-nobody"} & set(repr(settings).replace("'", " ").split())
    assert settings.display_name == "master mymaster"


def test_redis_settings_with_sentinels_need_no_url() -> None:
    settings = RedisConfig(sentinels=("a:1",), password="p").redis_settings()
    assert settings is not None
    assert (settings.tls, settings.database, settings.password) == (False, 0, "p")


@pytest.mark.parametrize(
    "url",
    [
        "http://hush@host",
        "host:1",
        "redis://",
        "redis://hush@host:x",
        "redis://:hush@host/x",
        "redis://:hush@host?a=1",
        "",
    ],
)
def test_redis_settings_invalid_url_is_refused_and_not_shown(tmp_path: Path, url: str) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(f"redis: {{url: '{url}'}}", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"redis\.url") as refusal:
        load(path)
    assert "hush" not in str(refusal.value)


def test_redis_settings_without_client_names_package(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "redis", None)
    monkeypatch.setitem(sys.modules, "redis.exceptions", None)
    identity = WorkerIdentity(
        worker_id=WorkerId("d0"), incarnation=Incarnation(1), role=WorkerRole.DECODE, model_name="m", address="h:1"
    )
    assert make_publisher(RedisConfig(), b"a secret", identity) is None
    with pytest.raises(ConfigError, match=r"tandem-serve\[redis\]"):
        make_publisher(RedisConfig(url="redis://host"), b"a secret", identity)


def test_redis_settings_certificate_without_tls_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"redis\.ca"):
        load(None, {"redis.url": "redis://host", "redis.ca": "ca.pem"})


def test_redis_settings_url_is_passed_to_processes(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(dump(load(None, {"redis.url": "redis://:hush@host"})), encoding="utf-8")
    settings = load(path).redis.redis_settings()
    assert settings is not None
    assert settings.password == "hush"
