"""Certificates for tests, from an authority of their own."""

from datetime import datetime
from pathlib import Path

import trustme

from tandem.rpc.mutual_tls import TlsFiles


class Authority:
    """A private authority; each instance is another one."""

    def __init__(self) -> None:
        self._ca = trustme.CA()

    def issue(
        self,
        directory: Path,
        *,
        not_after: datetime | None = None,
        name: str = "worker.tandem.internal",
        setting: str = "transfer.tls",
    ) -> TlsFiles:
        """Write a worker's files, or those of a holder of this name, to `directory`; `setting` names them."""
        issued = self._ca.issue_cert(name, not_after=not_after)
        files = TlsFiles(
            cert=directory / "cert.pem", key=directory / "key.pem", ca=directory / "ca.pem", setting=setting
        )
        files.cert.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
        files.key.write_bytes(issued.private_key_pem.bytes())
        files.ca.write_bytes(self._ca.cert_pem.bytes())
        return files
