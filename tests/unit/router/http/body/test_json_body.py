"""Large bodies: read off the event loop, bounded in values, and as strictly as small ones."""

import threading

import pytest
from starlette.requests import Request

from router.api.request import strict_json
from router.api.request.strict_json import check_num_values
from router.http.body.json_body import INLINE_BYTES, BodyBounds, read_object
from tandem.errors import InvalidRequest, RequestTooLarge

BOUNDS = BodyBounds(max_bytes=1 << 23, max_values=50_000)
IDS = b"[" + b"12345," * 20_000 + b"7]"


async def _read(body: bytes) -> dict[str, object]:
    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": body, "more_body": False}

    return await read_object(Request({"type": "http", "headers": []}, receive), BOUNDS)


async def test_json_body_large_is_parsed_off_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []
    parse = strict_json._parse_fast
    monkeypatch.setattr(strict_json, "_parse_fast", lambda b: (threads.append(threading.current_thread()), parse(b))[1])
    await _read(b'{"prompt": "a"}')
    assert set(threads) == {threading.main_thread()}
    threads.clear()
    assert (await _read(b'{"prompt": "' + b"a" * INLINE_BYTES + b'"}'))["prompt"] == "a" * INLINE_BYTES
    assert threading.main_thread() not in threads


@pytest.mark.parametrize("values", [b"{},", b"1,", b'"",', b'"\\"",', b"[],"])
async def test_json_body_with_too_many_values_is_refused_unparsed(
    values: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(strict_json, "_parse_fast", lambda _: pytest.fail("was parsed"))
    with pytest.raises(RequestTooLarge, match="values"):
        await _read(b'{"a": [' + values * BOUNDS.max_values + b"1]}")


@pytest.mark.parametrize("text", [b"a,", b"\\\\,", b'\\",', b"[1,", b"{},"])
def test_json_body_commas_in_strings_do_not_count(text: bytes) -> None:
    check_num_values(b'{"prompt": "' + text * BOUNDS.max_values + b'"}', BOUNDS.max_values)


async def test_json_body_token_ids_are_parsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    second: list[int] = []
    loads = strict_json.json.loads
    monkeypatch.setattr(strict_json.json, "loads", lambda b, **k: (second.append(len(b)), loads(b, **k))[1])
    data = await _read(b'{"prompt": ' + IDS + b', "n": 2}')
    assert (data["n"], len(data["prompt"])) == (2, 20_001)
    assert sum(second) < 100


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": %s, "n": 1, "n": 2}' % IDS,
        b'{"prompt": %s, "prompt": %s}' % (IDS, IDS),
        b'{"prompt": %s, "n": NaN}' % IDS,
        b'{"prompt": %s, "n": "\\ud800"}' % IDS,
        b'{"prompt": [%s 1 2]}' % (b"12345," * 20_000),
        b'{"prompt": %s' % IDS,
    ],
)
async def test_json_body_large_is_parsed_strictly(body: bytes) -> None:
    assert len(body) > INLINE_BYTES
    with pytest.raises(InvalidRequest, match="not valid JSON"):
        await _read(body)


async def test_json_body_large_integers_and_similar_keys_keep_their_value() -> None:
    key = "[" + "1," * 40 + "1]"
    body = b'{"prompt": %s, "seed": 123456789012345678901234567890, "%s": "%s"}' % (IDS, key.encode(), key.encode())
    data = await _read(body)
    assert data["seed"] == 123456789012345678901234567890
    assert data[key] == key
    two = b'{"prompt": %s, "%s": 1, "%s": 2}' % (IDS, key.encode(), key.replace("1]", "2]").encode())
    assert len(await _read(two)) == 3
