"""What a builder would send: the working tree without what `.dockerignore` leaves out."""

import fnmatch
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


def files() -> list[str]:
    """Of the checkout, as git knows them, that are not ignored."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    ).stdout.decode()
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    return sorted(
        name for name in listed.split("\0") if name and (ROOT / name).is_file() and not is_ignored(name, lines)
    )


def is_ignored(name: str, lines: list[str]) -> bool:
    """The last line that matches decides; a line matches what is below it, too."""
    ignored = False
    for line in lines:
        pattern = line.removeprefix("!")
        if _matches(name, pattern):
            ignored = not line.startswith("!")
    return ignored


def _matches(name: str, pattern: str) -> bool:
    parts = name.split("/")
    if pattern.startswith("**/"):
        return any(fnmatch.fnmatchcase(part, pattern[3:]) for part in parts)
    return any(fnmatch.fnmatchcase("/".join(parts[:end]), pattern) for end in range(1, len(parts) + 1))


def gather(into: Path) -> Path:
    """Copy the build context into a folder and return it."""
    for name in files():
        (into / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, into / name)
    return into
