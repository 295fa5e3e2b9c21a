"""Asks a release's routers for a few tokens; runs in the pod of `helm test`, where only Python is certain."""

import json
import os
import ssl
import sys
import urllib.request

URL, KEY = os.environ["ASK_URL"], os.environ.get("ASK_KEY")
AUTHORITY = os.environ.get("ASK_CA", "")
TIMEOUT_S = 60.0


def ask(path: str, body: dict[str, object] | None = None) -> bytes:
    """The answer's body; raises for whatever is no success."""
    context = ssl.create_default_context(cafile=AUTHORITY if os.path.exists(AUTHORITY) else None)
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {KEY}"} if KEY else {})
    request = urllib.request.Request(URL + path, data=data, headers=headers)
    with urllib.request.urlopen(request, timeout=TIMEOUT_S, context=context) as answer:
        return answer.read()


ask("/readyz")
print("ready: a canary came through the workers")
if KEY or os.environ.get("ASK_OPEN") == "1":
    model = json.loads(ask("/v1/models"))["data"][0]["id"]
    said = json.loads(ask("/v1/completions", {"model": model, "prompt": "Once upon a time", "max_tokens": 8}))
    used = said["usage"]
    print(f"{model}: {used['completion_tokens']} tokens of an answer to {used['prompt_tokens']}")
    if not used["completion_tokens"]:
        sys.exit("no tokens came")
