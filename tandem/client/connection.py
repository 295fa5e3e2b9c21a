"""How the client reaches routers: addresses, keys, certificates, and the options of its channels."""

from collections.abc import Sequence
from dataclasses import dataclass

import grpc

from tandem.client.options import Tls

_OPTIONS: tuple[tuple[str, int | str], ...] = (
    ("grpc.max_receive_message_length", 64 << 20),
    # Within what a router allows; only while a call is under way, so that idle clients cost nothing.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    # For a connection to come about: a router that hangs takes it and says nothing, and another one may be there.
    ("grpc.min_reconnect_backoff_ms", 3_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Routers:
    """Where they are and how to speak to them."""

    addresses: tuple[str, ...]
    api_key: str | None = None
    tls: Tls | None = None

    @classmethod
    def of(cls, address: str | Sequence[str], api_key: str | None, tls: Tls | None) -> "Routers":
        """One `host:port`, or several of one cluster."""
        addresses = (address,) if isinstance(address, str) else tuple(address)
        if not addresses:
            raise ValueError("no address is given")
        return cls(addresses=addresses, api_key=api_key, tls=tls)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Sent with every call."""
        return () if self.api_key is None else (("authorization", f"Bearer {self.api_key}"),)

    @property
    def options(self) -> list[tuple[str, int | str]]:
        name = None if self.tls is None else self.tls.server_name
        return [*_OPTIONS, *([] if name is None else [("grpc.ssl_target_name_override", name)])]

    @property
    def credentials(self) -> grpc.ChannelCredentials | None:
        """None: nothing is encrypted."""
        tls = self.tls
        return None if tls is None else grpc.ssl_channel_credentials(tls.ca, tls.key, tls.cert)
