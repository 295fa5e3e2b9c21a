"""Base classes of models that describe answers: FastAPI serializes with them, and /openapi.json is built from them."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=0)]
AnyObject = dict[str, Any]


class AnswerObject(BaseModel):
    """An object of an answer, to which fields may be added."""

    model_config = ConfigDict(extra="allow")


class ExactObject(AnswerObject):
    """An object of an answer with these fields and no others."""

    model_config = ConfigDict(extra="forbid")


class NamedEvent(AnswerObject):
    """The data of an event whose `event` line equals its `type`."""

    type: str


class ErrorFields(ExactObject):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorObject(ExactObject):
    """An error in OpenAI's format."""

    error: ErrorFields
