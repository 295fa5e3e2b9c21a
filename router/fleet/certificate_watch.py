"""Watches when the certificates of `cluster.tls` expire: this router's own, and those that workers present to it."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Self

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.types.worker_view import WorkerKey
from tandem.rpc.cluster_credentials import ClusterCredentials
from tandem.rpc.tls_check import check_peer

PERIOD_S = 600.0
_PAUSE_S = 2.0
"""Time between two checks which workers are due."""
_OWN = "router"
_log = logging.getLogger(__name__)


class CertificateWatch(Collector):
    """Does a handshake with every worker once a period while entered, and soon with a new one.

    A worker that was not reached keeps what it showed last.
    """

    def __init__(
        self,
        credentials: ClusterCredentials,
        addresses: Callable[[], Mapping[WorkerKey, str]],
        *,
        period_s: float = PERIOD_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`addresses`: returns the address of every worker whose session is up."""
        self._credentials = credentials
        self._addresses = addresses
        self._period_s = period_s
        self._clock = clock
        self._not_after_s: dict[WorkerKey, float] = {}
        self._asked_s: dict[WorkerKey, float] = {}
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def check_due_workers(self) -> None:
        """Do a handshake with every worker that is due, one after another; forget those that left."""
        there, now_s = dict(self._addresses()), self._clock()
        self._not_after_s = {key: at_s for key, at_s in self._not_after_s.items() if key in there}
        self._asked_s = {key: at_s for key, at_s in self._asked_s.items() if key in there}
        for key, address in there.items():
            if now_s - self._asked_s.get(key, -self._period_s) < self._period_s:
                continue
            self._asked_s[key] = now_s
            found = await check_peer(address, self._credentials)
            if found.not_after_s is not None:
                self._not_after_s[key] = found.not_after_s

    def collect(self) -> Iterable[Metric]:
        family = GaugeMetricFamily(
            "tandem_member_certificate_not_after_seconds",
            "Unix time at which a process's certificate of cluster.tls, or its CA, expires",
            labels=("member",),
        )
        family.add_metric((_OWN,), self._credentials.not_after_s)
        for key, at_s in self._not_after_s.items():
            family.add_metric((key.worker_id,), at_s)
        yield family

    async def _run(self) -> None:
        while True:
            pause_s = _PAUSE_S
            try:
                await self.check_due_workers()
            except Exception:  # noqa: BLE001 - whatever it is, the watch goes on
                # A bug. Requests do not need this watch, but an alert does; a line a period says that it fails.
                _log.exception(
                    "cannot find out when the workers' certificates expire; the next try is in %g s", self._period_s
                )
                pause_s = self._period_s
            await asyncio.sleep(pause_s)
