"""The base of every section of the configuration."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Seconds = Annotated[float, Field(gt=0, le=86400)]


class Section(BaseModel):
    """Base of all sections: frozen, and refusing unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)
