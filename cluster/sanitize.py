"""Text from a model or a process may hold escape sequences; a terminal must not obey them."""

import re

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def without_controls(text: str) -> str:
    """The text with every control character but newline and tab made visible as U+FFFD."""
    return _CONTROLS.sub("\ufffd", text)
