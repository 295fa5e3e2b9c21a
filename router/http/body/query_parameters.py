"""The base model of query parameters, which FastAPI validates and describes."""

from pydantic import BaseModel, ConfigDict


class QueryParameters(BaseModel):
    """The query parameters of one path operation. Unknown ones are refused by name."""

    model_config = ConfigDict(extra="forbid", frozen=True)
