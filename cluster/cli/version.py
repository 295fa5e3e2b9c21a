"""The version of Tandem, for users."""

import importlib.metadata
import platform
import subprocess
import tomllib
from pathlib import Path

GIT_TIMEOUT_S = 5.0


def version_line() -> str:
    """Render the version, as `tandem 0.1.0 (commit 1a2b3c4), Python 3.11.9, torch 2.13.0`."""
    root = Path(__file__).resolve().parents[2]
    commit = git_commit(root)
    shown = f" (commit {commit})" if commit else ""
    torch = _installed("torch") or "not installed"
    own = _installed("tandem-serve") or _declared(root) or "(unknown version)"
    return f"tandem {own}{shown}, Python {platform.python_version()}, torch {torch}"


def git_commit(root: Path) -> str | None:
    """Return the checkout's commit, with `-dirty` if files differ from it; None outside a checkout or without git."""
    if not (root / ".git").exists():
        return None
    # Found on the path: git has no fixed location, and the output is only displayed.
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=GIT_TIMEOUT_S, check=False)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def _declared(root: Path) -> str | None:
    """Return the version that a checkout which is not installed declares."""
    try:
        project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    except (OSError, tomllib.TOMLDecodeError, KeyError):
        return None
    return str(project.get("version"))


def _installed(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
