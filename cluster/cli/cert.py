"""`tandem cert`: makes the certificates that `cluster.tls` names, in a directory with the CA that signed them."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from cluster.authority import Authority, Issued
from tandem.config.source.regular_file import read_regular_text
from tandem.errors import ConfigError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_CA = "ca"
_KEY_MODE, _CERT_MODE, _FOLDER_MODE = 0o600, 0o644, 0o700


def cert(
    directory: Annotated[Path, typer.Argument(help="Where the CA and the certificates are kept.")] = Path("certs"),
    name: Annotated[str, typer.Option(help="Name of the files: one pair for all hosts, or one for each.")] = "member",
    days: Annotated[int, typer.Option(min=1, max=3649, help="Validity of the certificate, in days.")] = 365,
    renew: Annotated[bool, typer.Option("--renew", help="Replace the certificate and key of that name.")] = False,
) -> None:
    """Make certificates for [b]cluster.tls[/b]: a CA, unless the directory has one, and a certificate that it signs."""
    has_ca = (directory / "ca.key").exists()
    make_certificate(directory, name, days=days, renew=renew)
    ca = "signed by the CA" if has_ca else "made the CA"
    print(f"{ca} {directory / 'ca.pem'}; only this command needs its key {directory / 'ca.key'}: keep it elsewhere")
    print(f"made {directory / name}.pem and {directory / name}.key, valid for {days} days. In every process's YAML:\n")
    print(yaml_entry(directory, name))


def yaml_entry(directory: Path, name: str) -> str:
    """The lines for the configuration."""
    where = directory.absolute()
    lines = [f"    cert: {where / name}.pem", f"    key: {where / name}.key", f"    ca: {where / 'ca.pem'}"]
    return "\n".join(["cluster:", "  tls:", *lines])


def make_certificate(directory: Path, name: str, *, days: int, renew: bool = False) -> None:
    """Make a member's files, and the CA's unless they exist. Raises ConfigError, and then changes no existing file."""
    if not _NAME.fullmatch(name) or name == _CA:
        raise ConfigError(f"--name: {name[:80]!r} must be letters, digits, . _ or -, and not {_CA}")
    files = [directory / f"{name}.{ending}" for ending in ("pem", "key")]
    existing = [path for path in files if path.exists()]
    if existing and not renew:
        raise ConfigError(f"{existing[0]} exists: choose another --name, or replace it with --renew")
    if renew and not existing:  # one of the two is what an interrupted run may leave
        raise ConfigError(f"--renew: there is neither {files[0]} nor {files[1]}")
    with _named_errors():
        authority = _authority(directory)
        _write_pair(directory / name, authority.issue(days=days))


def _authority(directory: Path) -> Authority:
    """The directory's CA, made first unless it has one."""
    files = {ending: directory / f"{_CA}.{ending}" for ending in ("pem", "key")}
    missing = [path for path in files.values() if not path.exists()]
    if not missing:
        texts = {ending: read_regular_text(path) for ending, path in files.items()}
        return Authority.from_pem(Issued(cert=texts["pem"], key=texts["key"]), str(directory))
    if len(missing) < len(files):
        raise ConfigError(
            f"{missing[0]} is missing: without it the CA here cannot sign; make a new CA in another directory"
        )
    directory.mkdir(mode=_FOLDER_MODE, parents=True, exist_ok=True)
    authority = Authority.create()
    _write_pair(directory / _CA, authority.pem)
    return authority


def _write_pair(pair: Path, issued: Issued) -> None:
    """Write both files under other names, then put them in place, the certificate last.

    Processes keep what they have until the two match.
    """
    contents = (("key", issued.key, _KEY_MODE), ("pem", issued.cert, _CERT_MODE))
    fresh = {ending: pair.with_name(f"{pair.name}.{ending}.new") for ending, _, _ in contents}
    try:
        for ending, text, mode in contents:
            fresh[ending].unlink(missing_ok=True)
            _write(fresh[ending], text, mode)
        for ending, path in fresh.items():
            path.replace(pair.with_name(f"{pair.name}.{ending}"))
    finally:
        for path in fresh.values():
            path.unlink(missing_ok=True)


def _write(path: Path, text: str, mode: int) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(fd, "w", encoding="ascii") as file:
        file.write(text)


@contextmanager
def _named_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{error.filename}: {error.strerror}") from None
