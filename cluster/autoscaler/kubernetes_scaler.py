"""Scales pools that are StatefulSets, through the `scale` subresource and with the rights of the pod's service account.

The account's files are read again for every request, because Kubernetes renews the token and the certificate authority
may change. A change is applied only to the sizes it was decided for: if something else scales the set in between, that
wins, and the planner decides again.
"""

import json
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from cluster.planner.orders import Order, OrderFailed
from cluster.planner.values import FleetView, Sizes
from tandem.config.source.regular_file import read_regular_text
from tandem.errors import ConfigError
from tandem.values.roles import WorkerRole

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
API = "https://kubernetes.default.svc"
_ANSWER_S = 10.0
_MOST_CHARS = 300


@dataclass(frozen=True, slots=True)
class _Scale:
    replicas: int
    version: str


class KubernetesScaler:
    """Scales the two StatefulSets of one release in one namespace."""

    can_flip = False

    def __init__(
        self, sets: Mapping[WorkerRole, str], *, account: Path = ACCOUNT, api: str = API, namespace: str | None = None
    ) -> None:
        """`sets`: StatefulSets by pool. `account`: directory with `token`, `ca.crt` and, unless given, `namespace`."""
        self._sets = dict(sets)
        self._account = account
        self._api = api.rstrip("/")
        self._namespace = namespace

    async def fleet(self) -> FleetView:
        """Return the sizes that the StatefulSets specify. Raises OrderFailed."""
        async with self._client() as client:
            found = {role: await self._scale(client, role) for role in WorkerRole}
        return FleetView(
            sizes=Sizes(prefill=found[WorkerRole.PREFILL].replicas, decode=found[WorkerRole.DECODE].replicas)
        )

    async def carry_out(self, order: Order) -> None:
        """Apply the order, growing pools before shrinking others. Raises OrderFailed."""
        before, after = order.before, order.after
        changed = [role for role in WorkerRole if before.size_of(role) != after.size_of(role)]
        async with self._client() as client:
            for role in sorted(changed, key=lambda role: before.size_of(role) - after.size_of(role)):
                scale = await self._scale(client, role)
                if scale.replicas != before.size_of(role):
                    raise OrderFailed(
                        f"{self._sets[role]} now has {scale.replicas} replicas, not {before.size_of(role)}: "
                        "it was scaled by something else"
                    )
                await self._resize(client, role, scale, after.size_of(role))

    def _client(self) -> httpx.AsyncClient:
        try:
            context = ssl.create_default_context(cafile=self._account / "ca.crt")
            token = read_regular_text(self._account / "token").strip()
            if self._namespace is None:
                self._namespace = read_regular_text(self._account / "namespace").strip()
        except (ConfigError, OSError, ValueError) as error:
            raise OrderFailed(f"cannot read the service account's files: {error}") from None
        if not (token.isascii() and token.isprintable()):  # an error message further down would print it
            raise OrderFailed(f"{self._account / 'token'} is not a token: expected one line of ASCII")
        headers = {"Authorization": f"Bearer {token}", "Accept": "application/json"}
        return httpx.AsyncClient(
            base_url=self._api, headers=headers, timeout=_ANSWER_S, trust_env=False, verify=context
        )

    async def _scale(self, client: httpx.AsyncClient, role: WorkerRole) -> _Scale:
        return self._read(await self._send(client, "GET", role, None), role)

    async def _resize(self, client: httpx.AsyncClient, role: WorkerRole, scale: _Scale, replicas: int) -> None:
        # With the resource version, the server rejects the request if the set has changed since.
        patch = {"metadata": {"resourceVersion": scale.version}, "spec": {"replicas": replicas}}
        now = self._read(await self._send(client, "PATCH", role, patch), role)
        if now.replicas != replicas:
            raise OrderFailed(f"{self._sets[role]} has {now.replicas} replicas, expected {replicas}")

    async def _send(
        self, client: httpx.AsyncClient, method: str, role: WorkerRole, patch: Mapping[str, Any] | None
    ) -> httpx.Response:
        path = f"/apis/apps/v1/namespaces/{self._namespace}/statefulsets/{self._sets[role]}/scale"
        headers = {} if patch is None else {"Content-Type": "application/merge-patch+json"}
        content = None if patch is None else json.dumps(patch)
        try:
            response = await client.request(method, path, content=content, headers=headers)
        except httpx.HTTPError as error:
            raise OrderFailed(f"{self._api} does not answer: {type(error).__name__} {error}".strip()) from None
        if response.status_code != httpx.codes.OK:
            raise OrderFailed(f"{self._sets[role]}: {response.status_code} {_message(response)}".strip())
        return response

    def _read(self, response: httpx.Response, role: WorkerRole) -> _Scale:
        try:
            body = response.json()
            # The number is omitted when a set has no replicas.
            replicas = int(body["spec"].get("replicas", 0))
            if replicas < 0:
                raise ValueError("replicas is below 0")
            return _Scale(replicas, str(body["metadata"]["resourceVersion"]))
        except (ValueError, OverflowError, LookupError, TypeError, AttributeError):
            raise OrderFailed(f"{self._sets[role]}: {self._api} did not return a valid Scale") from None


def _message(response: httpx.Response) -> str:
    try:
        return str(response.json()["message"])[:_MOST_CHARS]
    except (ValueError, LookupError, TypeError):
        return response.text[:_MOST_CHARS]
