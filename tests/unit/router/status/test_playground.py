"""The page's playground queries a model as it is served: its own JavaScript, run by node."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).resolve().parents[4] / "router/status/page"
ASKED = {"prompt": "a fox", "model": "m", "maxTokens": 9, "temperature": 0.5}
pytestmark = pytest.mark.skipif(shutil.which("node") is None, reason="no node here")


def evaluated(expression: str) -> Any:
    """The value of an expression over the module's exports."""
    program = f'const page = await import("{PAGE}/playground.js"); console.log(JSON.stringify({expression}));'
    done = subprocess.run(
        ["node", "--no-warnings", "--input-type=module", "--eval", program], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("chats", "path", "fields"),
    [
        (True, "/v1/chat/completions", {"messages": [{"role": "user", "content": "a fox"}]}),
        (False, "/v1/completions", {"prompt": "a fox"}),
    ],
)
def test_playground_without_chat_template_completes_text(chats: bool, path: str, fields: dict[str, Any]) -> None:
    found = evaluated(f"page.requestFor({json.dumps(ASKED | {'chats': chats})})")
    common = {"model": "m", "max_tokens": 9, "temperature": 0.5, "stream": True}
    assert found == {"path": path, "body": {**common, **fields, "stream_options": {"include_usage": True}}}


def test_playground_reads_text_of_either_route() -> None:
    choices = [
        {"delta": {"content": "a"}},
        {"delta": {"reasoning_content": "b"}},
        {"text": "c"},
        {"text": "", "finish_reason": "length"},
    ]
    found = evaluated(f"{json.dumps(choices)}.map(page.newsOf)")
    assert [(one["text"], one["thought"]) for one in found] == [("a", ""), ("", "b"), ("c", ""), ("", "")]
