"""The cluster's own CA: the content of its certificates, and OpenSSL's strict check of them."""

import shutil
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509

from cluster.authority import Authority, Issued, create_member_bundle
from tandem.config.cluster_tls import ClusterTls
from tandem.errors import ConfigError
from tandem.rpc.cluster_credentials import open_credentials
from tandem.rpc.mutual_tls import MEMBER_NAME


def test_member_certificate_serves_both_ends_with_fixed_name() -> None:
    found = x509.load_pem_x509_certificate(Authority.create().issue(days=3).cert.encode())
    names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == [MEMBER_NAME]
    assert len(list(names)) == 1
    usages = found.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert {one.dotted_string for one in usages} == {"1.3.6.1.5.5.7.3.1", "1.3.6.1.5.5.7.3.2"}
    assert not found.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    left = found.not_valid_after_utc - datetime.now(UTC)
    assert timedelta(days=2, hours=23) < left <= timedelta(days=3)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="there is no openssl here")
def test_member_passes_the_strict_check_of_openssl(tmp_path: Path) -> None:
    authority = Authority.create()
    (tmp_path / "ca.pem").write_text(authority.pem.cert)
    (tmp_path / "member.pem").write_text(authority.issue(days=3).cert)
    command = ["openssl", "verify", "-x509_strict", "-CAfile", "ca.pem", "member.pem"]
    assert subprocess.run(command, cwd=tmp_path, capture_output=True, text=True).stdout == "member.pem: OK\n"


def test_ca_is_reloadable_and_has_unique_subject() -> None:
    first, second = Authority.create(), Authority.create()
    again = Authority.from_pem(first.pem, "here")
    text = again.issue(days=1)
    assert open_credentials(ClusterTls(pem=text.key + text.cert + first.pem.cert), ()) is not None
    subjects = {x509.load_pem_x509_certificate(one.pem.cert.encode()).subject for one in (first, second)}
    assert len(subjects) == 2


def test_ca_with_wrong_or_invalid_key_is_refused() -> None:
    first, second = Authority.create().pem, Authority.create().pem
    with pytest.raises(ConfigError, match=r"here: ca\.key is not the key of ca\.pem"):
        Authority.from_pem(Issued(cert=first.cert, key=second.key), "here")
    with pytest.raises(ConfigError, match="here: no CA made by `tandem cert`"):
        Authority.from_pem(Issued(cert="nothing", key=second.key), "here")


def test_member_certificate_beyond_ca_expiry_is_refused() -> None:
    with pytest.raises(ConfigError, match="--days is 9, and the CA expires on"):
        Authority.create(days=8).issue(days=9)


def test_ca_bundles_are_unique() -> None:
    assert create_member_bundle() != create_member_bundle()
