"""What a request's times are judged by."""

from pydantic import Field

from tandem.config.section import Section


class ObjectivesConfig(Section):
    """When a request went well: goodput counts those. Alarms have the same objectives, in the rules for Prometheus."""

    ttft_s: float = Field(default=2.5, gt=0.0)
    """Within which the first token comes."""
    per_token_s: float = Field(default=0.1, gt=0.0)
    """That a token after the first takes, in the mean of one request."""
