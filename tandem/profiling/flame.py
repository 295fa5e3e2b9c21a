"""Renders a flame graph as SVG, for any browser: width is a frame's sample count, depth its position in the stack."""

from dataclasses import dataclass, field
from html import escape
from zlib import crc32

from tandem.profiling.stacks import StackTally

WIDTH, ROW, PAD = 1200.0, 17, 10
_NARROWEST = 0.3
_CHAR = 6.6
_WARM = ((205, 50), (60, 150), (0, 50))
"""Red, green and blue: lowest value and range of each."""


@dataclass(slots=True)
class _Node:
    name: str
    count: int = 0
    below: dict[str, "_Node"] = field(default_factory=dict)


def flame_svg(tally: StackTally, *, title: str) -> str:
    """Render the graph. Frames too narrow to be seen are left out."""
    root = _Node("all")
    for stack, count in tally:
        root.count += count
        node = root
        for name in stack:
            node = node.below.setdefault(name, _Node(name))
            node.count += count
    boxes: list[str] = []
    deepest = _draw(root, 0.0, 0, WIDTH / max(root.count, 1), boxes)
    height = (deepest + 1) * ROW + 2 * PAD + ROW
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH + 2 * PAD:.0f} {height}" '
        f'font-family="monospace" font-size="11"><title>{escape(title)}</title>'
        f'<text x="{PAD}" y="{PAD + 10}">{escape(title)}</text>'
        f'<g transform="translate({PAD},{PAD + ROW})">'
    )
    return "".join([head, *boxes, "</g></svg>"])


def _draw(node: _Node, left: float, depth: int, scale: float, boxes: list[str]) -> int:
    """Draw a frame and those it called; returns the deepest row."""
    width = node.count * scale
    if width < _NARROWEST:
        return depth - 1
    red, green, blue = (low + crc32(f"{node.name}{low}".encode()) % span for low, span in _WARM)
    fits = int(width / _CHAR)
    shown = node.name if len(node.name) <= fits else f"{node.name[: fits - 2]}.." if fits > 3 else ""
    boxes.append(
        f'<g><title>{escape(node.name)}: {node.count}</title><rect x="{left:.1f}" y="{depth * ROW}" '
        f'width="{width:.1f}" height="{ROW - 1}" fill="rgb({red},{green},{blue})"/>'
        f'<text x="{left + 3:.1f}" y="{depth * ROW + 12}">{escape(shown)}</text></g>'
    )
    deepest = depth
    for child in sorted(node.below.values(), key=lambda one: one.name):
        deepest = max(deepest, _draw(child, left, depth + 1, scale, boxes))
        left += child.count * scale
    return deepest
