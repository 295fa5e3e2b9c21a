"""Text for a terminal: without the escape sequences that text from a model or a process may hold; and sizes."""

import re

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def without_controls(text: str) -> str:
    """The text with every control character but newline and tab made visible as U+FFFD."""
    return _CONTROLS.sub("\ufffd", text)


def format_bytes(size_bytes: float) -> str:
    """Render a size as `12.0 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size_bytes < 1024:
            return f"{size_bytes:.0f} B" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.1f} TiB"
