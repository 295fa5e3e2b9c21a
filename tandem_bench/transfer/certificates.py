"""Certificates for a contest in TLS, from an authority that signs nothing else."""

from pathlib import Path

from tandem_bench.errors import CannotMeasure


def issue(folder: Path) -> dict[str, str]:
    """Paths of a certificate, its key and its authority, as `transfer.tls` has them. Raises CannotMeasure."""
    try:
        import trustme
    except ImportError:
        raise CannotMeasure("certificates are made by trustme: pip install 'tandem[bench]'") from None
    authority = trustme.CA()
    issued = authority.issue_cert("bench.tandem.internal")
    files = {name: folder / f"{name}.pem" for name in ("cert", "key", "ca")}
    files["cert"].write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    files["key"].touch(mode=0o600)
    files["key"].write_bytes(issued.private_key_pem.bytes())
    files["ca"].write_bytes(authority.cert_pem.bytes())
    return {name: str(path) for name, path in files.items()}
