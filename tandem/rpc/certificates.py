"""Loads PEM files of certificates, with clear errors, and tests them before they are used.

`setting` is the configuration's name of what the files are given for, such as `transfer.tls`: errors begin with it.
"""

import ssl
from pathlib import Path
from typing import Any

from tandem.config.source.regular_file import read_regular_text
from tandem.errors import ConfigError, UnreadableFile

_FLIGHTS = 4
"""Upper bound of the messages in a handshake."""


def read_pem(path: Path, setting: str) -> str:
    """Read a file's text. Raises ConfigError, as UnreadableFile where nothing could be read."""
    try:
        return read_regular_text(path, encoding="ascii")
    except UnreadableFile as error:
        raise UnreadableFile(f"{setting}: {error}") from None
    except ConfigError:
        raise ConfigError(f"{setting}: {path}: not PEM") from None


def first_certificate(path: Path, setting: str) -> bytes:
    """Read the first certificate of a file, in DER. Raises ConfigError."""
    text = read_pem(path, setting)
    begin, end = text.find(ssl.PEM_HEADER), text.find(ssl.PEM_FOOTER)
    try:
        return ssl.PEM_cert_to_DER_cert(text[begin : end + len(ssl.PEM_FOOTER)] if 0 <= begin < end else "")
    except ValueError:
        raise ConfigError(f"{setting}: {path}: no certificate in PEM") from None


def read_authorities(path: Path, setting: str) -> str:
    """Read the text of a file with at least one certificate. Raises ConfigError."""
    text = read_pem(path, setting)
    if ssl.PEM_HEADER not in text:
        raise ConfigError(f"{setting}: {path}: no certificate in PEM")
    return text


def trust(context: ssl.SSLContext, ca: Path, setting: str) -> None:
    """Trust the CA certificates of the file. Raises ConfigError."""
    read_pem(ca, setting)
    try:
        context.load_verify_locations(ca)
    except ssl.SSLError as error:
        raise ConfigError(f"{setting}: {ca}: no certificates in PEM ({error.reason})") from None


def load_certificate(context: ssl.SSLContext, cert: Path, key: Path, setting: str) -> None:
    """Load the certificate and its key into the context. Raises ConfigError."""
    name = f"{setting}.key"

    def no_password() -> str:
        raise ConfigError(f"{name}: the key is encrypted; it must be unencrypted and readable by this process only")

    first_certificate(cert, f"{setting}.cert")
    read_pem(key, name)
    try:
        # For an encrypted key OpenSSL would otherwise prompt on the terminal.
        context.load_cert_chain(cert, key, password=no_password)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigError(f"{name}: {key} is not the key of {cert}") from None
        raise ConfigError(f"{name}: {key}: no private key in PEM ({error.reason})") from None


def handshake_in_memory(client: ssl.SSLContext, server: ssl.SSLContext, name: str | None = None) -> dict[str, Any]:
    """Do a TLS handshake in memory, in which the client asks for `name`. Returns the server's certificate, decoded.

    Raises ssl.SSLError when it fails.
    """
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (
        client.wrap_bio(to_client, to_server, server_hostname=name),
        server.wrap_bio(to_server, to_client, server_side=True),
    )
    for _ in range(_FLIGHTS):
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
    return ends[0].getpeercert() or {}


def client_of(cert: Path, setting: str) -> ssl.SSLContext:
    """Create the TLS context of a client that trusts this certificate alone, under any name. Raises ConfigError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    # The certificate itself is trusted, so its authority need not be known; its dates are checked all the same.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.load_verify_locations(cadata=first_certificate(cert, setting))
    return context
