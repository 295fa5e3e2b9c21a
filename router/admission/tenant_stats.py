"""What a tenant's requests are usually like: how long answers get, and how much of a prompt is computed. Pure."""

_SMOOTHING = 0.1
_USUAL_OUTPUT_TOKENS = 128.0
"""Of a tenant that nobody knows yet, while nobody else is known either."""


class TenantStats:
    """Running means, per tenant; a new tenant is taken for the mean of all requests."""

    def __init__(self) -> None:
        self._of: dict[str, tuple[float, float]] = {}
        self._all = (_USUAL_OUTPUT_TOKENS, 1.0)

    def of(self, tenant: str) -> tuple[float, float]:
        """Tokens of an answer over all choices, and the share of its prompt that is not found cached."""
        return self._of.get(tenant, self._all)

    def learn(self, tenant: str, *, output_tokens: float, computed_share: float) -> None:
        """A request has ended well."""
        seen = (output_tokens, computed_share)
        self._of[tenant] = _blend(self._of.get(tenant, seen), seen)
        self._all = _blend(self._all, seen)


def _blend(old: tuple[float, float], new: tuple[float, float]) -> tuple[float, float]:
    return (old[0] + _SMOOTHING * (new[0] - old[0]), old[1] + _SMOOTHING * (new[1] - old[1]))
