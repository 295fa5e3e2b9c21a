"""Finds out, by a handshake, whether a peer speaks TLS and why two processes of a cluster cannot speak to each other.

gRPC reports the refusal of a client's certificate as a closed socket, and a server reports nothing at all.
"""

import asyncio
import ssl
from dataclasses import dataclass

from tandem.rpc.cluster_credentials import ALPN, ClusterCredentials
from tandem.rpc.hosts import split
from tandem.rpc.mutual_tls import MEMBER_NAME, not_after_s

_TIMEOUT_S = 2.0
_VERDICT_S = 0.5
_NO_TLS_RECORD = {"WRONG_VERSION_NUMBER", "HTTP_REQUEST", "HTTPS_PROXY_REQUEST"}
"""OpenSSL's reasons when what it received belongs to another protocol. Nothing else proves that a peer speaks no TLS: a
permissive process would send its token in the clear to one that was only just stopping."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsCheck:
    """What a handshake showed."""

    speaks_tls: bool | None = None
    """None: unknown, since the peer was not reached, hung up, or broke the handshake off."""
    mismatch: str | None = None
    """Why no connection is possible; None: TLS is not why."""
    not_after_s: float | None = None
    """Unix time at which the peer's certificate expires."""


async def check_peer(address: str, credentials: ClusterCredentials | None) -> TlsCheck:
    """Shake hands with the peer at host:port and hang up. `credentials`: this process's; None: it speaks no TLS."""
    try:
        host, port = split(address)
        context = _unverified() if credentials is None else credentials.client_context()
        async with asyncio.timeout(_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(
                host.strip("[]"), port, ssl=context, server_hostname=MEMBER_NAME
            )
            try:
                shown = writer.get_extra_info("peercert") or {}
                if credentials is None:
                    return TlsCheck(
                        speaks_tls=True,
                        mismatch="the peer accepts only TLS, and this process has no certificates (cluster.tls)",
                    )
                mismatch = await _refusal(reader)
                return TlsCheck(speaks_tls=True, mismatch=mismatch, not_after_s=not_after_s(shown))
            finally:
                writer.transport.abort()  # a gRPC server does not answer an orderly end
    except ssl.SSLCertVerificationError as error:
        return TlsCheck(speaks_tls=True, mismatch=f"the peer's certificate is refused: {error.verify_message}")
    except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
        return TlsCheck()  # it hung up, as a process does that stops
    except ssl.SSLError as error:
        if error.reason not in _NO_TLS_RECORD:
            return TlsCheck(mismatch=f"the handshake failed: {error.reason or error}")
        mismatch = None if credentials is None else "the peer does not use TLS, but cluster.tls is on here"
        return TlsCheck(speaks_tls=False, mismatch=mismatch)
    except (OSError, ValueError):  # the latter: not an address
        return TlsCheck()


async def _refusal(reader: asyncio.StreamReader) -> str | None:
    """Why the server hangs up: in TLS 1.3 it judges the client's certificate after the client's end of the handshake.

    A server that is content speaks, or waits.
    """
    try:
        async with asyncio.timeout(_VERDICT_S):
            if await reader.read(1):
                return None
        reason = "it hung up"
    except TimeoutError:
        return None
    except (ssl.SSLError, ConnectionResetError) as error:
        reason = getattr(error, "reason", None) or "it hung up"
    return f"the peer refuses this process's certificate ({reason}): expired, or of another CA"


def _unverified() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols([ALPN])
    return context
