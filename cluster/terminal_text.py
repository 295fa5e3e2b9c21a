"""Text for a terminal: sizes, and text without escape sequences that a model or process may emit."""

import re

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def without_controls(text: str) -> str:
    """Replace every control character except newline and tab by U+FFFD."""
    return _CONTROLS.sub("\ufffd", text)


def format_bytes(size_bytes: float) -> str:
    """Render a size, as `12.0 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size_bytes < 1024:
            return f"{size_bytes:.0f} B" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.1f} TiB"
