"""The bodies of /v1beta/cachedContents, in Google's format."""

import re
from datetime import UTC, datetime
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from router.api.prompts import MAX_MESSAGES
from router.api.request.named_caches import MAX_DISPLAY_NAME_CHARS
from router.http.body.answer_object import Count, ExactObject
from router.http.body.query_parameters import QueryParameters
from router.http.body.strict_body import StrictBody, at_most
from router.text.chat_template import Message
from tandem.errors import InvalidRequest

_MAX_PARTS = 256
_TTL = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,9})?)s")
_TIME = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]{1,9})?(Z|[+-][0-9]{2}:[0-9]{2})")
_TimeText = Annotated[str, Field(json_schema_extra={"format": "date-time"})]
_ROLES = {"user": "user", "model": "assistant"}


class GooglePart(StrictBody):
    """A text part; other parts are not supported yet."""

    text: str


class GoogleContent(StrictBody):
    parts: Annotated[list[GooglePart], at_most(_MAX_PARTS), Field(min_length=1)]
    role: Literal["user", "model"] | None = None

    def message(self, role: str | None = None) -> Message:
        """Join the parts by line breaks into one message."""
        text = "\n".join(part.text for part in self.parts)
        return Message(role=role or _ROLES[self.role or "user"], content=text)


class CacheExpiry(StrictBody):
    """Expiry of a cache: the body of PATCH, and part of POST's."""

    ttl: Annotated[str | None, Field(json_schema_extra={"pattern": f"^{_TTL.pattern}$"})] = None
    """Seconds followed by `s`."""
    expireTime: Annotated[str | None, Field(json_schema_extra={"format": "date-time"})] = None  # the wire's name
    """Time in RFC 3339."""

    def expires_s(self, now_s: float, default_s: float | None = None) -> float:
        """Return Unix time. Raises InvalidRequest when it is missing, given twice, or invalid."""
        if self.ttl is not None and self.expireTime is not None:
            raise InvalidRequest("send either ttl or expireTime", param="expireTime")
        if self.expireTime is not None:
            return _unix_time(self.expireTime)
        if self.ttl is None:
            if default_s is None:
                raise InvalidRequest("send ttl or expireTime: nothing else can be changed", param="ttl")
            return now_s + default_s
        if (match := _TTL.fullmatch(self.ttl)) is None:
            raise InvalidRequest('ttl must be seconds, such as "300s"', param="ttl")
        return now_s + float(match[1])


class CreateBody(CacheExpiry):
    model: str
    contents: Annotated[list[GoogleContent], at_most(MAX_MESSAGES)] | None = None
    systemInstruction: GoogleContent | None = None
    displayName: Annotated[str, Field(max_length=MAX_DISPLAY_NAME_CHARS)] | None = None

    def messages(self) -> list[Message]:
        """Return the beginning of a conversation. Raises InvalidRequest if there is none."""
        system = [self.systemInstruction.message("system")] if self.systemInstruction is not None else []
        messages = system + [content.message() for content in self.contents or ()]
        if not messages:
            raise InvalidRequest("send contents, systemInstruction or both", param="contents")
        return messages


class GoogleErrorFields(ExactObject):
    code: Annotated[int, Field(ge=400, le=599)]
    message: str
    status: str


class GoogleErrorObject(ExactObject):
    error: GoogleErrorFields


class UsageMetadataObject(ExactObject):
    totalTokenCount: Count


class CachedContentObject(ExactObject):
    name: Annotated[str, Field(pattern="^cachedContents/")]
    model: Annotated[str, Field(pattern="^models/")]
    createTime: _TimeText
    updateTime: _TimeText
    expireTime: _TimeText
    usageMetadata: UsageMetadataObject
    displayName: Annotated[str, Field(max_length=MAX_DISPLAY_NAME_CHARS)] = ""


class CachedContentList(ExactObject):
    cachedContents: list[CachedContentObject]
    nextPageToken: str = ""


class NothingObject(ExactObject):
    """An answer without fields."""


def _zero_if_empty(text: str) -> str:
    return text or "0"


_Number = Annotated[int, BeforeValidator(_zero_if_empty), Field(ge=0, le=999_999)]


class CachedContentQuery(QueryParameters):
    pageSize: _Number = 0
    """Page size; 0: as many as there may be."""
    pageToken: _Number = 0


class CacheUpdateQuery(QueryParameters):
    updateMask: Literal["ttl", "expireTime"] | None = None


def _unix_time(text: str) -> float:
    try:
        if _TIME.fullmatch(text) is None:
            raise ValueError
        # Python parses six fractional digits.
        return datetime.fromisoformat(re.sub(r"(\.[0-9]{6})[0-9]+", r"\1", text)).timestamp()
    except (ValueError, OverflowError):
        raise InvalidRequest("expireTime must be a time such as 2026-01-31T12:00:00Z", param="expireTime") from None


def shown_time(unix_s: float) -> str:
    """Format a time as RFC 3339, in UTC."""
    return datetime.fromtimestamp(unix_s, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
