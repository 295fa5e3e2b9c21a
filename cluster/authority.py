"""Makes the certificates of `cluster.tls`: a CA of the cluster's own, and certificates of members.

`tandem cert` keeps them in a directory; `tandem up` makes them in memory, and that CA's key is never stored.
"""

import secrets
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Self

from tandem.errors import ConfigError
from tandem.rpc.mutual_tls import MEMBER_NAME

CA_DAYS = 3650
_SKEW = timedelta(hours=1)
"""Validity begins this long ago, for hosts whose clock is behind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Issued:
    """A certificate and its key, in PEM."""

    cert: str
    key: str


class Authority:
    """A CA that signs certificates of members."""

    def __init__(self, certificate: Any, key: Any) -> None:
        self._certificate, self._key = certificate, key

    @classmethod
    def draw(cls, *, days: int = CA_DAYS) -> Self:
        """Make a CA. Its name is its own, so that the old and the new one can be told apart while both are trusted."""
        from cryptography import x509

        key = _new_key()
        name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, f"Tandem cluster CA {secrets.token_hex(4)}")])
        builder = _builder(name, name, key, days)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        builder = builder.add_extension(_key_usage(signs_certificates=True), critical=True)
        return cls(_signed(builder, key), key)

    @classmethod
    def from_pem(cls, issued: Issued, where: str) -> Self:
        """Read a CA. Raises ConfigError that begins with `where`."""
        from cryptography import x509
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        try:
            certificate = x509.load_pem_x509_certificate(issued.cert.encode())
            key = load_pem_private_key(issued.key.encode(), password=None)
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{where}: no CA made by `tandem cert`: {error}") from None
        if certificate.public_key() != key.public_key():
            raise ConfigError(f"{where}: ca.key is not the key of ca.pem")
        return cls(certificate, key)

    @property
    def pem(self) -> Issued:
        return _issued(self._certificate, self._key)

    @property
    def not_after(self) -> datetime:
        expires: datetime = self._certificate.not_valid_after_utc
        return expires

    def issue(self, *, days: int) -> Issued:
        """Make a certificate of a member. Raises ConfigError when the CA expires before it would."""
        from cryptography import x509
        from cryptography.x509.oid import ExtendedKeyUsageOID

        if datetime.now(UTC) + timedelta(days=days) > self.not_after:
            raise ConfigError(f"--days is {days}, and the CA expires on {self.not_after:%Y-%m-%d}, before that")
        key = _new_key()
        name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, MEMBER_NAME)])
        builder = _builder(name, self._certificate.subject, key, days)
        builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        builder = builder.add_extension(_key_usage(signs_certificates=False), critical=True)
        builder = builder.add_extension(
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False
        )
        builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(MEMBER_NAME)]), critical=False)
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        return _issued(_signed(builder.add_extension(issuer, critical=False), self._key), key)


def draw_bundle(*, days: int = CA_DAYS - 1) -> str:
    """One member's key, certificate and CA as one PEM text, as in `cluster.tls.pem`; the CA's key is dropped."""
    authority = Authority.draw()
    issued = authority.issue(days=days)
    return issued.key + issued.cert + authority.pem.cert


def _new_key() -> Any:
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.generate_private_key(ec.SECP256R1())


def _builder(subject: Any, issuer: Any, key: Any, days: int) -> Any:
    from cryptography import x509

    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _SKEW)
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _key_usage(*, signs_certificates: bool) -> Any:
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _signed(builder: Any, key: Any) -> Any:
    from cryptography.hazmat.primitives import hashes

    return builder.sign(key, hashes.SHA256())


def _issued(certificate: Any, key: Any) -> Issued:
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    text = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()
    return Issued(cert=certificate.public_bytes(Encoding.PEM).decode(), key=text)
