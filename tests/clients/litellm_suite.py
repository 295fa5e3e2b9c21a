"""Run by an interpreter that has `litellm`."""

import asyncio
import os
from importlib.metadata import version

import litellm

URL, KEY = f"{os.environ['TANDEM_URL']}/v1", os.environ["TANDEM_KEY"]
TALK = [{"role": "user", "content": "The code of amber is 4821. What is the code of amber?"}]
PLACE = {"api_base": URL, "api_key": KEY, "temperature": 0, "max_tokens": 16}


def main() -> None:
    """Run every check of this client, one after the other."""
    for model in ("openai/tandem-tiny", "hosted_vllm/tandem-tiny"):
        whole = litellm.completion(model=model, messages=TALK, **PLACE)
        text = whole.choices[0].message.content
        assert text.strip() == "4821", text
        assert whole.usage.completion_tokens > 0
        pieces = litellm.completion(model=model, messages=TALK, stream=True, **PLACE)
        assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == text
    plain = litellm.text_completion(model="text-completion-openai/tandem-tiny", prompt="Once upon", **PLACE)
    assert plain.choices[0].text
    many = litellm.batch_completion(model="openai/tandem-tiny", messages=[TALK] * 4, **PLACE)
    assert [one.choices[0].message.content for one in many] == [text] * 4
    later = asyncio.run(litellm.acompletion(model="openai/tandem-tiny", messages=TALK, **PLACE))
    assert later.choices[0].message.content == text
    try:
        litellm.completion(model="openai/tandem-tiny", messages=TALK, **{**PLACE, "api_key": "wrong"})
    except litellm.AuthenticationError:
        print(f"litellm {version('litellm')}: chat, streams, text, batch, async, errors, as openai and as hosted_vllm")
        return
    raise AssertionError("a wrong key was taken")


main()
