"""Answers compared with what /openapi.json says of them, streams event by event."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
from jsonschema import Draft202012Validator


class Described:
    """An OpenAPI document, and checks of responses against it."""

    def __init__(self, document: dict[str, Any]) -> None:
        self.document = document

    @classmethod
    async def by(cls, client: httpx.AsyncClient) -> "Described":
        answer = await client.get("/openapi.json", headers={"Authorization": "Bearer a-key"} | dict(client.headers))
        return cls(answer.json())

    def fits(self, schema: dict[str, Any], value: Any) -> bool:
        return not self.errors(schema, value)

    def errors(self, schema: dict[str, Any], value: Any) -> list[str]:
        whole = Draft202012Validator({**schema, "components": self.document["components"]})
        return [f"{error.json_path}: {error.message}"[:500] for error in whole.iter_errors(value)]

    def body(self, method: str, path: str) -> dict[str, Any]:
        content = self.document["paths"][path][method.lower()]["requestBody"]["content"]
        return content["application/json"]["schema"]

    def check(self, method: str, shown: str, answer: httpx.Response) -> None:
        """It is as described: the object, or every event of the stream."""
        documented = self.document["paths"][shown][method.lower()]["responses"][str(answer.status_code)]["content"]
        media = answer.headers["content-type"].partition(";")[0]
        if media != "text/event-stream":
            assert not self.errors(documented[media]["schema"], answer.json()), (shown, answer.text)
            return
        schema = documented[media]["itemSchema"]
        seen = list(events_of(answer.text))
        assert seen
        for event in seen:
            assert self.fits(schema, event), (shown, event)
            # What stands in the text of `data` is of the branch of its own event, or of one whose events have no name.
            branches = [one for one in schema.get("anyOf", [schema]) if self.fits(one, event)]
            inner = [branch["properties"]["data"].get("contentSchema") for branch in branches]
            if event["data"] == "[DONE]":
                assert None in inner, (shown, event)
                continue
            faults = [self.errors(one, json.loads(event["data"])) for one in inner if one is not None]
            assert [] in faults, (shown, event, faults)


def events_of(text: str) -> Iterator[dict[str, str]]:
    """As a reader of streams takes them apart."""
    for part in text.removesuffix("\n\n").split("\n\n"):
        yield dict(line.split(": ", 1) for line in part.split("\n"))
