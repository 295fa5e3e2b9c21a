"""What tenants are called in metrics: few enough names, and never a client's own words. Pure."""

MAX_TENANTS = 1000
"""Label values; further tenants are shown together, as `other`."""
_OTHER = "other"
_DIGEST_CHARS = 32
_SHOWN_CHARS = 8


class TenantLabels:
    """A tenant keeps the label that it had first."""

    def __init__(self, most: int = MAX_TENANTS) -> None:
        self._most = most
        self._labels: dict[str, str] = {}

    def of(self, tenant: str) -> str:
        """Of a key without a name the beginning of its digest is enough."""
        if (label := self._labels.get(tenant)) is None:
            if len(self._labels) >= self._most:
                return _OTHER
            label = f"key-{tenant[:_SHOWN_CHARS]}" if len(tenant) == _DIGEST_CHARS else tenant or "default"
            self._labels[tenant] = label
        return label
