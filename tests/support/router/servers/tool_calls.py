"""Tools that tests let the model call, what it says to call them, and the families of parsers."""

from tests.support.router.servers.http_client import HELLO

FAMILIES = ["hermes", "qwen3_coder", "mistral", "llama3", "deepseek", "pythonic"]
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "Of a place.", "parameters": CITY}}
CLOCK = {"type": "function", "function": {"name": "clock"}}
NAMED = {"type": "function", "function": {"name": "weather"}}
TOOLS = HELLO | {"tools": [WEATHER, CLOCK]}
CALLS = (
    'I look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Köln 😀"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
)
