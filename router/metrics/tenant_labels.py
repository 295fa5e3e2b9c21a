"""What tenants are called in metrics: few enough names, each one tenant's, and never a client's own words. Pure."""

import re
from collections.abc import Callable

from router.tenants.usage import OTHERS

MAX_TENANTS = 1000
"""Label values; further tenants are shown together, as `other`."""
_OTHER, _DEFAULT, _NAMELESS = "other", "default", "key-"
_NAMED = "tenant:"
"""Before a name that could be taken for one of these; no tenant's name has a colon."""
_DIGEST = re.compile(r"[0-9a-f]{32}")
_SHOWN_CHARS = 8


def _looks_nameless(tenant: str) -> bool:
    """Where nobody has the keys to say: as `router.access.api_keys` names tenants of keys that have no name."""
    return _DIGEST.fullmatch(tenant) is not None


class TenantLabels:
    """A tenant keeps the label that it had first."""

    def __init__(self, most: int = MAX_TENANTS) -> None:
        self._most = most
        self._labels: dict[str, str] = {}
        self.is_nameless: Callable[[str], bool] = _looks_nameless
        """Whether a tenant is a key's digest, because the key has no name."""

    def of(self, tenant: str) -> str:
        """Of a key without a name the beginning of its digest is enough."""
        if (label := self._labels.get(tenant)) is None:
            if len(self._labels) >= self._most or tenant == OTHERS:
                return _OTHER
            label = self._labels[tenant] = self.label(tenant)
        return label

    def label(self, tenant: str) -> str:
        """What is this tenant's alone, and never another's; `of` gives it to the first tenants."""
        if not tenant:
            return _DEFAULT
        if tenant == OTHERS:
            return _OTHER
        if self.is_nameless(tenant):
            return f"{_NAMELESS}{tenant[:_SHOWN_CHARS]}"
        is_ours = tenant in (_OTHER, _DEFAULT) or tenant.startswith(_NAMELESS)
        return f"{_NAMED}{tenant}" if is_ours else tenant
