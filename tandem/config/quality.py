"""The probe of answers' quality."""

from pydantic import Field

from tandem.config.section import Seconds, Section

_TEXT = (
    "Once upon a time there was a little fox who lived at the edge of a quiet wood. Every morning she went down to the "
    "river to drink, and every morning an old heron stood there on one leg and said nothing. One day the fox asked him "
    "what he was waiting for. The heron looked at the water for a long time. Then he said that he was waiting for "
    "somebody to ask him. The fox laughed, and from that day on they had breakfast together."
)


class QualityConfig(Section):
    """A text that every worker is asked to read: how probable it is to its model is told as a metric."""

    period_s: Seconds | None = None
    """How often each worker reads it, first as it joins; null: never."""
    text: str = Field(default=_TEXT, min_length=32, max_length=8192)
    """Some hundred words of the kind that the model is used for."""
