"""`tandem cert`: files, modes, refusals, and the YAML that it prints."""

import errno
import stat
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from cluster.cli import cert
from cluster.cli.cert import make_certificate
from cluster.cli.main import app
from tandem.config.cluster import ClusterConfig
from tandem.errors import ConfigError
from tandem.rpc.cluster_credentials import ClusterCredentials, open_credentials
from tandem.rpc.mutual_tls import TlsFiles

NAMES = {"ca.pem", "ca.key", "member.pem", "member.key"}


def files(folder: Path, name: str = "member") -> TlsFiles:
    return TlsFiles(
        cert=folder / f"{name}.pem", key=folder / f"{name}.key", ca=folder / "ca.pem", setting="cluster.tls"
    )


def test_cert_printed_yaml_is_valid_configuration(tmp_path: Path) -> None:
    folder = tmp_path / "certs"
    result = CliRunner().invoke(app, ["cert", str(folder), "--days", "30"])
    assert result.exit_code == 0
    assert "made the CA" in result.output
    assert "valid for 30 days" in result.output
    config = ClusterConfig.model_validate(yaml.safe_load(result.output[result.output.index("cluster:") :]))
    assert open_credentials(config.cluster.tls, ("10.0.0.2",)) is not None


def test_cert_keys_are_readable_only_by_owner(tmp_path: Path) -> None:
    folder = tmp_path / "certs"
    make_certificate(folder, "member", days=1)
    assert {path.name for path in folder.iterdir()} == NAMES
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    for path in folder.glob("*.key"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_cert_existing_files_are_not_overwritten(tmp_path: Path) -> None:
    make_certificate(tmp_path, "member", days=1)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(ConfigError, match=r"member\.pem exists: choose another --name, or replace it with --renew"):
        make_certificate(tmp_path, "member", days=1)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_cert_second_name_is_signed_by_same_ca(tmp_path: Path) -> None:
    make_certificate(tmp_path, "member", days=1)
    ca = (tmp_path / "ca.pem").read_bytes()
    make_certificate(tmp_path, "host-b", days=1)
    assert (tmp_path / "ca.pem").read_bytes() == ca
    ClusterCredentials(files(tmp_path, "host-b"))


def test_cert_renewal_replaces_the_pair(tmp_path: Path) -> None:
    make_certificate(tmp_path, "member", days=1)
    credentials = ClusterCredentials(files(tmp_path))
    soon = credentials.not_after_s
    make_certificate(tmp_path, "member", days=30, renew=True)
    assert credentials.not_after_s > soon + 28 * 86_400
    assert {path.name for path in tmp_path.iterdir()} == NAMES
    assert stat.S_IMODE((tmp_path / "member.key").stat().st_mode) == 0o600


@pytest.mark.parametrize("name", ["ca", "", "../x", "a/b", "x" * 65])
def test_cert_bad_name_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--name: "):
        make_certificate(tmp_path, name, days=1)
    assert list(tmp_path.iterdir()) == []


def test_cert_renewal_without_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--renew: there is neither .*member\.pem nor .*member\.key"):
        make_certificate(tmp_path, "member", days=1, renew=True)


@pytest.mark.parametrize("left", ["member.key", "member.pem"])
def test_one_file_that_an_interrupted_run_left_is_replaced_by_a_renewal(tmp_path: Path, left: str) -> None:
    make_certificate(tmp_path, "member", days=1)
    for name in {"member.key", "member.pem"} - {left}:
        (tmp_path / name).unlink()
    with pytest.raises(ConfigError, match=f"{left} exists: choose another --name, or replace it with --renew"):
        make_certificate(tmp_path, "member", days=1)
    make_certificate(tmp_path, "member", days=1, renew=True)
    ClusterCredentials(files(tmp_path))


@pytest.mark.parametrize("renews", [False, True])
def test_run_that_fails_half_way_leaves_neither_file_of_the_pair(tmp_path: Path, monkeypatch, renews: bool) -> None:
    make_certificate(tmp_path, "member" if renews else "other", days=1)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    write = cert._write

    def fails(path: Path, text: str, mode: int) -> None:
        if ".pem" in path.name:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        write(path, text, mode)

    monkeypatch.setattr(cert, "_write", fails)
    with pytest.raises(ConfigError, match="No space left on device"):
        make_certificate(tmp_path, "member", days=1, renew=renews)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_certificate_is_put_in_place_after_its_key(tmp_path: Path, monkeypatch) -> None:
    placed = []
    replace = Path.replace

    def noted(path: Path, target: Path) -> Path:
        placed.append(target.name)
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", noted)
    make_certificate(tmp_path, "member", days=1)
    assert placed == ["ca.key", "ca.pem", "member.key", "member.pem"]


def test_commands_that_make_keys_and_certificates_have_a_section_of_their_own() -> None:
    sections = {info.callback.__name__: info.rich_help_panel for info in app.registered_commands}
    assert {name for name, section in sections.items() if section == sections["cert"]} == {"cert", "key"}


def test_cert_ca_without_key_is_not_replaced(tmp_path: Path) -> None:
    make_certificate(tmp_path, "member", days=1)
    (tmp_path / "ca.key").unlink()
    with pytest.raises(ConfigError, match=r"ca\.key is missing: without it the CA here cannot sign"):
        make_certificate(tmp_path, "other", days=1)


def test_cert_impossible_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"file/certs: Not a directory"):
        make_certificate(tmp_path / "file" / "certs", "member", days=1)
