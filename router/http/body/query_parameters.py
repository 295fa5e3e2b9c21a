"""Parameters of a query: FastAPI reads them into a model of these, and describes them by it."""

from pydantic import BaseModel, ConfigDict


class QueryParameters(BaseModel):
    """The parameters of one path operation. Others are refused by their names."""

    model_config = ConfigDict(extra="forbid", frozen=True)
