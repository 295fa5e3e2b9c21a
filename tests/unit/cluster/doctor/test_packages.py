"""`tandem doctor` on the packages that Tandem requires, and on what remains of it where some are missing."""

import importlib.metadata
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster import distribution
from cluster.distribution import DeclaredRequirements, declared_requirements
from cluster.doctor import packages
from cluster.doctor.checks import examine
from cluster.doctor.findings import Status
from tandem.config.cluster import load

ROOT = Path(__file__).parents[4]
METADATA = """Metadata-Version: 2.4
Name: tandem-serve
Version: 9.1
Provides-Extra: fast
Requires-Dist: uvloop>=0.23; sys_platform != "win32"
Requires-Dist: pywin32; sys_platform == "win32"
Requires-Dist: msgspec>=0.20
Requires-Dist: redis[hiredis]>=6.4; extra == "fast"
"""


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes distributions look installed in other versions, or missing."""

    def change(**versions: str | None) -> None:
        named = {name.replace("_", "-"): version for name, version in versions.items()}
        monkeypatch.setattr(
            packages, "installed_version", lambda name: named.get(name, distribution.installed_version(name))
        )

    return change


def declared() -> DeclaredRequirements:
    found = declared_requirements()
    assert found is not None
    return found


def test_every_missing_package_is_named(installed: Callable[..., None]) -> None:
    names = {one.name for one in declared().always}
    assert names > {"fastapi", "msgspec", "httptools", "llguidance", "psutil", "python-multipart", "cryptography"}
    for name in names:
        installed(**{name: None})
        for check, needed in ((packages.packages, True), (packages.router_packages, name not in _excluded())):
            (found,) = check(load(None))
            assert found.status is (Status.FAIL if needed else Status.OK), name
            assert (f"missing: {name} (" in found.detail) is needed


def _excluded() -> set[str]:
    lines = (ROOT / "deploy/docker/locks/router-excludes.txt").read_text().splitlines()
    return {line for line in lines if line and not line.startswith("#")}


def test_routers_do_without_what_their_image_lacks() -> None:
    assert _excluded() == packages.ROUTERS_DO_WITHOUT


@pytest.mark.parametrize("version", ["0.100.0", "0.200", "of our own"])
def test_unfit_version_is_named_with_the_wanted_one(installed: Callable[..., None], version: str) -> None:
    installed(fastapi=version)
    (found,) = packages.router_packages(load(None))
    assert (found.status, found.detail) == (
        Status.FAIL,
        f"unfit: fastapi {version}, which should be <0.166,>=0.165",
    )
    assert found in examine(load(None), router_only=True)


def test_extra_is_missed_where_the_configuration_needs_it(installed: Callable[..., None]) -> None:
    installed(redis=None)
    assert len(packages.router_packages(load(None))) == 1
    _, found = packages.router_packages(load(None, {"redis.url": "redis://h:1"}))
    assert (found.status, found.name) == (Status.FAIL, "packages of the extra redis")
    assert found.detail == "for redis: missing: redis (<9,>=6.4)"
    assert "tandem-serve[redis]" in found.hint
    installed(hiredis=None)  # which is an extra of redis in turn
    _, found = packages.router_packages(load(None, {"redis.url": "redis://h:1"}))
    assert "missing: hiredis" in found.detail


def test_extra_of_an_unfit_version_is_a_warning_until_it_is_needed(installed: Callable[..., None]) -> None:
    installed(redis="99.0")
    for more, status in (({}, Status.WARN), ({"redis.url": "redis://h:1"}, Status.FAIL)):
        _, found = packages.router_packages(load(None, more))
        assert found.status is status
        assert "unfit: redis 99.0, which should be <9,>=6.4" in found.detail


def test_telemetry_needs_the_exporter_of_its_protocol_only(installed: Callable[..., None]) -> None:
    installed(opentelemetry_exporter_otlp_proto_http=None)
    for protocol, count in (("grpc", 1), ("http/protobuf", 2)):
        config = load(None, {"telemetry.otlp_endpoint": "http://h:1", "telemetry.otlp_protocol": protocol})
        assert len(packages.router_packages(config)) == count


def test_requirements_of_an_installation_are_those_of_its_metadata(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tandem_serve-9.1.dist-info").mkdir()
    (tmp_path / "tandem_serve-9.1.dist-info/METADATA").write_text(METADATA)
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "left by another"\n')
    monkeypatch.setattr(distribution, "_ROOT", tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    found = declared()
    assert found.source == "tandem-serve 9.1"
    assert [one.name for one in found.always] == ["uvloop", "msgspec"]
    assert {extra: [one.name for one in some] for extra, some in found.by_extra.items()} == {"fast": ["redis"]}
    monkeypatch.setattr(packages, "installed_version", lambda name: None)
    (told,) = packages.packages(load(None))
    assert told.detail == "missing: uvloop (>=0.23), msgspec (>=0.20)"


def test_without_any_metadata_the_check_is_a_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def missing(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(distribution, "_ROOT", tmp_path)
    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    (found,) = packages.packages(load(None))
    assert (found.status, "no metadata of tandem-serve" in found.detail) == (Status.WARN, True)


def test_doctor_reports_what_it_cannot_import() -> None:
    """Whatever the command itself can be started without."""
    absent = (
        "fastapi starlette uvicorn msgspec httptools grpc google cryptography psutil uvloop tokenizers numpy orjson"
    )
    absent += " llguidance jinja2 redis packaging torch httpx"
    code = (
        f"import sys\nfor name in {absent!r}.split(): sys.modules[name] = None\n"
        "sys.argv[1:] = ['doctor', '--json', *sys.argv[1:]]\n"
        "from cluster.cli.main import main\nmain()"
    )
    for arguments in ([], ["--router"]):
        command = [sys.executable, "-c", code, *arguments]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (1, "")
        checks = {one["name"]: one for one in json.loads(done.stdout)["checks"]}
        for name, module in (("packages", "packaging"), ("memory", "psutil")):
            assert checks[name]["status"] == "fail"
            assert checks[name]["detail"].startswith("not checked: ")
            assert module in checks[name]["detail"]
        assert checks["HTTP port"]
