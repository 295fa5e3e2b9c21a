"""`tcp` over TLS: accepted and refused peers, and the error messages."""

import json
import logging
import os
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from kv_transfer.memory.region import KVRegion
from kv_transfer.protocol.messages import TransferKey, TransportOffer
from kv_transfer.transports.tcp import frames as tcp_frames
from kv_transfer.transports.tcp.receiver import TcpReceiver
from kv_transfer.transports.tcp.sender import TcpSender
from kv_transfer.transports.tcp.settings import TcpSettings
from kv_transfer.transports.tcp.tls import TlsIdentity
from tandem.errors import ConfigError, TransferError
from tandem.rpc.mutual_tls import TlsFiles
from tandem.values.ids import TransferId
from tests.support.certificates import Authority
from tests.support.kv_transfer.transport_peer import PAIRING, block_views, cell_range, landing, make_region, order

KEY = TransferKey(transfer_id=TransferId("t"), attempt=1)
WAIT_S = 20.0
STALL_S = 0.3
PAST = datetime.now(UTC) - timedelta(days=1)


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


@pytest.fixture(scope="module")
def other_authority() -> Authority:
    return Authority()


@pytest.fixture(scope="module")
def files(authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> TlsFiles:
    return authority.issue(tmp_path_factory.mktemp("worker"))


@pytest.fixture
def source() -> Iterator[KVRegion]:
    region = make_region(seed=3)
    yield region
    os.close(region.fd)


@pytest.fixture
def target() -> Iterator[KVRegion]:
    region = make_region(seed=0)
    yield region
    os.close(region.fd)


@pytest.fixture
def secured(files: TlsFiles) -> Iterator[TcpReceiver]:
    receiver = TcpReceiver(settings=TcpSettings(tls=TlsIdentity(files), stall_s=STALL_S))
    yield receiver
    receiver.close()


@pytest.fixture
def plain() -> Iterator[TcpReceiver]:
    receiver = TcpReceiver(settings=TcpSettings(stall_s=STALL_S))
    yield receiver
    receiver.close()


def forged(offer: TransportOffer, field: str, value: str) -> TransportOffer:
    """The offer with another value in its advert."""
    return replace(offer, advert=json.dumps(json.loads(offer.advert) | {field: value}).encode())


def assert_serves(receiver: TcpReceiver, files: TlsFiles | None, source: KVRegion, target: KVRegion) -> None:
    """A valid sender gets its bytes through."""
    tls = TlsIdentity(files) if files else None
    writer = TcpSender(source, settings=TcpSettings(tls=tls)).connect(receiver.offer(), PAIRING)
    grant = receiver.open_grant(KEY, landing(target, 1))
    writer.write(order(KEY, grant, cell_range(0, 1), [5])).result(WAIT_S)
    assert b"".join(block_views(target, [1])) == b"".join(block_views(source, [5]))
    writer.close()
    receiver.revoke(KEY)


# What is wrong with the files is said at start.


def without(name: str) -> Callable[[TlsFiles, Path], TlsFiles]:
    return lambda files, at: replace(files, **{name: at / "absent.pem"})


def unreadable(name: str) -> Callable[[TlsFiles, Path], TlsFiles]:
    return lambda files, at: replace(files, **{name: at})


def garbage(name: str) -> Callable[[TlsFiles, Path], TlsFiles]:
    def change(files: TlsFiles, at: Path) -> TlsFiles:
        (at / "garbage.pem").write_text("-----BEGIN NONSENSE-----")
        return replace(files, **{name: at / "garbage.pem"})

    return change


def with_key_of_another(files: TlsFiles, at: Path) -> TlsFiles:
    return replace(files, key=Authority().issue(at).key)


def with_ca_of_another(files: TlsFiles, at: Path) -> TlsFiles:
    return replace(files, ca=Authority().issue(at).ca)


def expired(_files: TlsFiles, at: Path) -> TlsFiles:
    return Authority().issue(at, not_after=PAST)


def with_encrypted_key(files: TlsFiles, at: Path) -> TlsFiles:
    key = load_pem_private_key(files.key.read_bytes(), None)
    data = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"password"))
    (at / "key.pem").write_bytes(data)
    return replace(files, key=at / "key.pem")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("cert"), r"tls\.cert: .*absent\.pem: No such file"),
        (without("key"), r"tls\.key: .*absent\.pem: No such file"),
        (without("ca"), r"tls\.ca: .*absent\.pem: No such file"),
        (unreadable("key"), r"tls\.key: .*: Is a directory"),
        (garbage("cert"), r"tls\.cert: .*garbage\.pem: no certificate in PEM"),
        (garbage("key"), r"tls\.key: .*garbage\.pem: no private key in PEM"),
        (garbage("ca"), r"tls\.ca: .*garbage\.pem: no certificates in PEM"),
        (with_key_of_another, r"tls\.key: .* is not the key of"),
        (with_ca_of_another, r"tls\.cert: .* is not good for .*"),
        (expired, r"tls\.cert: .*expired"),
        (with_encrypted_key, r"tls\.key: the key is encrypted"),
    ],
)
def test_tls_bad_files_are_config_errors_by_name(files: TlsFiles, tmp_path: Path, change, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TlsIdentity(change(files, tmp_path))


def test_tls_unreadable_key_is_config_error(files: TlsFiles) -> None:
    user = os.geteuid()
    TlsIdentity(files)  # whatever is imported on the way may be out of another user's reach
    "".encode("ascii")
    with TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        for name in ("cert", "key", "ca"):
            Path(folder, name).write_bytes(getattr(files, name).read_bytes())
        Path(folder, "key").chmod(0)
        if user == 0:
            os.seteuid(65534)  # root reads every file
        try:
            with pytest.raises(ConfigError, match=r"tls\.key: .*Permission denied"):
                TlsIdentity(TlsFiles(**{name: Path(folder, name) for name in ("cert", "key", "ca")}, setting="tls"))
        finally:
            os.seteuid(user)


# The sender's side


def test_tls_receiver_of_another_authority_is_refused(
    secured: TcpReceiver, other_authority: Authority, source: KVRegion, tmp_path: Path
) -> None:
    sender = TcpSender(source, settings=TcpSettings(tls=TlsIdentity(other_authority.issue(tmp_path))))
    with pytest.raises(TransferError, match="certificate is refused: "):
        sender.connect(secured.offer(), PAIRING)


def test_tls_expired_receiver_is_refused(
    authority: Authority, files: TlsFiles, source: KVRegion, tmp_path: Path
) -> None:
    old = authority.issue(tmp_path, not_after=PAST)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(old.cert, old.key)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            sock, _ = server.accept()
            with pytest.raises(ssl.SSLError, match="alert certificate expired"), sock:
                context.wrap_socket(sock, server_side=True).recv(1)

        thread = threading.Thread(target=serve)
        thread.start()
        receiver = TcpReceiver(settings=TcpSettings(tls=TlsIdentity(files)))
        offer = forged(receiver.offer(), "port", str(server.getsockname()[1]))
        with pytest.raises(TransferError, match="expired"):
            TcpSender(source, settings=TcpSettings(tls=TlsIdentity(files))).connect(offer, PAIRING)
        thread.join()
        receiver.close()


def test_tls_sender_refuses_certificate_of_other_worker(
    secured: TcpReceiver, authority: Authority, files: TlsFiles, source: KVRegion, tmp_path: Path
) -> None:
    other = TlsIdentity(authority.issue(tmp_path))
    offer = forged(secured.offer(), "tls", other.fingerprint.hex())
    with pytest.raises(TransferError, match="certificate is not the one that its advert names"):
        TcpSender(source, settings=TcpSettings(tls=TlsIdentity(files))).connect(offer, PAIRING)


def test_tls_sender_without_tls_is_refused_with_reason(
    secured: TcpReceiver, files: TlsFiles, source: KVRegion, target: KVRegion, caplog: pytest.LogCaptureFixture
) -> None:
    sender = TcpSender(source)
    with pytest.raises(
        TransferError, match=r"only TLS, and this worker has no certificates for KV \(transfer\.tls, or cluster"
    ):
        sender.connect(secured.offer(), PAIRING)
    caplog.set_level(logging.INFO)
    with pytest.raises(TransferError, match=r"tcp .*only TLS, and this worker has no certificates for KV"):
        sender.connect(forged(secured.offer(), "tls", ""), PAIRING)
    assert_serves(secured, files, source, target)
    assert "the sender does not use TLS" in caplog.text


@pytest.mark.parametrize("setting", ["transfer.tls", "cluster.tls"])
def test_tls_sender_with_tls_to_plain_receiver_is_refused_with_reason(
    plain: TcpReceiver,
    files: TlsFiles,
    source: KVRegion,
    target: KVRegion,
    caplog: pytest.LogCaptureFixture,
    setting: str,
) -> None:
    sender = TcpSender(source, settings=TcpSettings(tls=TlsIdentity(replace(files, setting=setting))))
    with pytest.raises(TransferError, match=f"does not use TLS, but {setting} is set here"):
        sender.connect(plain.offer(), PAIRING)
    caplog.set_level(logging.INFO)
    with pytest.raises(TransferError, match=f"tcp .*does not support TLS 1.3, but {setting} is set here"):
        sender.connect(forged(plain.offer(), "tls", "00" * 32), PAIRING)
    assert_serves(plain, None, source, target)
    assert "the sender uses TLS, and this worker has no certificates for KV" in caplog.text


def test_tls_receiver_that_is_spoken_to_in_the_clear_names_the_setting_that_its_files_are_of(
    files: TlsFiles, source: KVRegion, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    identity = TlsIdentity(replace(files, setting="cluster.tls"))
    receiver = TcpReceiver(settings=TcpSettings(tls=identity, stall_s=STALL_S))
    with pytest.raises(TransferError, match="only TLS"):
        TcpSender(source).connect(forged(receiver.offer(), "tls", ""), PAIRING)
    receiver.close()
    assert "the sender does not use TLS, but cluster.tls is set here" in caplog.text


def test_tls_renewed_files_are_advertised_and_used_for_new_connections(
    authority: Authority, other_authority: Authority, source: KVRegion, target: KVRegion, tmp_path: Path
) -> None:
    for name in ("receiver", "sender", "other"):
        (tmp_path / name).mkdir()
    own, sends = authority.issue(tmp_path / "receiver"), authority.issue(tmp_path / "sender")
    receiver = TcpReceiver(settings=TcpSettings(tls=TlsIdentity(own), stall_s=STALL_S))
    sender = TcpSender(source, settings=TcpSettings(tls=TlsIdentity(sends)))
    stale = receiver.offer()
    before = sender.connect(stale, PAIRING)
    other_authority.issue(tmp_path / "receiver")  # the CA, too
    other_authority.issue(tmp_path / "sender")
    with pytest.raises(TransferError, match="certificate is not the one that its advert names"):
        sender.connect(stale, PAIRING)
    fresh = receiver.offer()
    assert json.loads(fresh.advert)["tls"] != json.loads(stale.advert)["tls"]
    after = sender.connect(fresh, PAIRING)
    for index, writer in enumerate((before, after)):
        key = TransferKey(transfer_id=TransferId(f"t{index}"), attempt=1)
        grant = receiver.open_grant(key, landing(target, 1))
        writer.write(order(key, grant, cell_range(0, 1), [5])).result(WAIT_S)
        receiver.revoke(key)
        writer.close()
    receiver.close()


# The receiver's side, to which anyone may connect


def raw_connection(receiver: TcpReceiver) -> socket.socket:
    sock = socket.create_connection(receiver._address, WAIT_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def hello(receiver: TcpReceiver) -> bytes:
    return tcp_frames.pack_header(
        tcp_frames.FrameHeader(
            kind=tcp_frames.FrameKind.HELLO,
            write_id=0,
            token=receiver._secret,
            cells=tcp_frames.NO_CELLS,
            payload_bytes=0,
        )
    )


def answer_to_hello(receiver: TcpReceiver, context: ssl.SSLContext) -> bytes:
    """The answer to a client with the secret."""
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    with raw_connection(receiver) as sock, context.wrap_socket(sock) as secure:
        # The client is done one flight before the server has looked at its certificate.
        with suppress(OSError):
            secure.sendall(hello(receiver))
        return secure.recv(tcp_frames.ANSWER_BYTES)


def test_tls_certificate_of_own_authority_is_accepted(secured: TcpReceiver, files: TlsFiles) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_cert_chain(files.cert, files.key)
    assert tcp_frames.unpack_answer(answer_to_hello(secured, context)) == (tcp_frames.FrameKind.DONE, 0)


@pytest.mark.parametrize(
    ("shown", "message"),
    [("none", "certificate required"), ("stranger's", "unknown ca"), ("expired", "certificate expired")],
)
def test_tls_certificate_of_another_authority_is_refused(
    secured: TcpReceiver, authority: Authority, other_authority: Authority, tmp_path: Path, shown: str, message: str
) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if shown != "none":
        by, not_after = (authority, PAST) if shown == "expired" else (other_authority, None)
        bad = by.issue(tmp_path, not_after=not_after)
        context.load_cert_chain(bad.cert, bad.key)
    with pytest.raises(ssl.SSLError, match=message):
        answer_to_hello(secured, context)


def test_tls_sender_with_expired_certificate_learns_reason(
    secured: TcpReceiver, authority: Authority, source: KVRegion, files: TlsFiles, tmp_path: Path
) -> None:
    identity = TlsIdentity(files)
    old = authority.issue(tmp_path, not_after=PAST)
    identity._tls.current().tls.client.load_cert_chain(old.cert, old.key)
    for _ in range(10):  # in whichever order both sides come to speak
        with pytest.raises(TransferError, match="CERTIFICATE_EXPIRED"):
            TcpSender(source, settings=TcpSettings(tls=identity)).connect(secured.offer(), PAIRING)


def test_tls_old_version_is_refused(secured: TcpReceiver, files: TlsFiles) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_cert_chain(files.cert, files.key)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(ssl.SSLError, match="protocol version"):
        answer_to_hello(secured, context)


def client_hello() -> bytes:
    outgoing = ssl.MemoryBIO()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    with pytest.raises(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname="worker").do_handshake()
    return outgoing.read()


@pytest.mark.parametrize("share", [0.01, 0.5, 1.0])
def test_tls_handshake_cut_short_ends_its_connection_only(
    secured: TcpReceiver, files: TlsFiles, source: KVRegion, target: KVRegion, share: float
) -> None:
    hello = client_hello()
    with raw_connection(secured) as sock:
        sock.sendall(hello[: max(1, int(share * len(hello)))])
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(4096):
            pass
    assert_serves(secured, files, source, target)
    assert not secured._greeting


def test_tls_slow_handshake_delays_no_other_and_ends_in_time(
    secured: TcpReceiver, files: TlsFiles, source: KVRegion, target: KVRegion
) -> None:
    with raw_connection(secured) as slow:
        slow.sendall(client_hello()[:5])
        assert_serves(secured, files, source, target)
        assert slow.recv(1) == b"", "it has not finished in time"


def test_tls_close_does_not_wait_for_handshake(files: TlsFiles) -> None:
    receiver = TcpReceiver(settings=TcpSettings(tls=TlsIdentity(files), stall_s=100 * WAIT_S))
    with raw_connection(receiver) as slow:
        slow.sendall(client_hello()[:5])
        while not receiver._greeting:
            pass
        receiver.close()
        assert slow.recv(1) == b""
