"""Both ends of every transport, as faulty as the plan wants them."""

import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from kv_transfer.memory.region import KVRegion
from kv_transfer.transports.catalogue import open_receivers, open_senders
from kv_transfer.transports.in_process import MemoryFabric
from kv_transfer.transports.interface import KVReceiver, KVSender
from kv_transfer.transports.tcp.settings import TcpSettings
from kv_transfer.transports.tcp.tls import TlsIdentity
from kv_transfer.transports.torch_dist.receiver import TorchDistReceiver
from kv_transfer.transports.torch_dist.sender import TorchDistSender
from tests.proofs.faults.impatience import LONG_STALL_S, STALL_S
from tests.proofs.faults.network.injector import Injector
from tests.proofs.faults.network.line import Surroundings
from tests.proofs.faults.network.proxies import RelayedReceiver
from tests.proofs.faults.orders import FaultySender
from tests.proofs.faults.plan import BatchPlan
from tests.support.certificates import Authority


class Ends:
    """Opens ends; holds the certificates of all batches. A context manager."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._identity: TlsIdentity | None = None
        self._fabric = MemoryFabric()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def receiver(self, plan: BatchPlan, region: KVRegion, injector: Injector) -> RelayedReceiver:
        around = None
        if plan.transport != "memory":
            around = Surroundings(injector=injector, transport=plan.transport, long_stall_s=LONG_STALL_S)
        return RelayedReceiver(self._receiver(plan, region), injector, around)

    def sender(
        self, plan: BatchPlan, region: KVRegion, injector: Injector, receiver_of: Callable[[int], RelayedReceiver]
    ) -> FaultySender:
        """`receiver_of`: the receiver of a region that it may connect to."""
        return FaultySender(self._sender(plan, region), injector, region, receiver_of, LONG_STALL_S)

    def _receiver(self, plan: BatchPlan, region: KVRegion) -> KVReceiver:
        if plan.transport == "torch_dist":
            return TorchDistReceiver(region, stall_s=STALL_S)
        [receiver] = open_receivers(region, choice=_name(plan), fabric=self._fabric, tcp=self._tcp(plan))
        return receiver

    def _sender(self, plan: BatchPlan, region: KVRegion) -> KVSender:
        if plan.transport == "torch_dist":
            return TorchDistSender(region, stall_s=STALL_S)
        [sender] = open_senders(region, choice=_name(plan), fabric=self._fabric, tcp=self._tcp(plan))
        return sender

    def _tcp(self, plan: BatchPlan) -> TcpSettings:
        tls = self._certificates() if plan.transport == "tls" else None
        return TcpSettings(streams=plan.streams, tls=tls, stall_s=STALL_S)

    def _certificates(self) -> TlsIdentity:
        if self._identity is None:
            directory = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
            self._identity = TlsIdentity(Authority().issue(directory))
        return self._identity


def _name(plan: BatchPlan) -> str:
    return "tcp" if plan.transport == "tls" else plan.transport
