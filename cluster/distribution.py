"""Tandem's own distribution: its version for users, and what it requires.

A checkout's pyproject.toml goes before the metadata of an installation, which is as old as the last `pip install`.
"""

import importlib.metadata
import platform
import subprocess
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from packaging.requirements import Requirement

NAME = "tandem-serve"
GIT_TIMEOUT_S = 5.0
_ROOT = Path(__file__).resolve().parents[1]


def version_line() -> str:
    """Render the version, as `tandem 0.1.0 (commit 1a2b3c4), Python 3.11.9, torch 2.13.0`."""
    commit = _git_commit(_ROOT)
    shown = f" (commit {commit})" if commit else ""
    torch = installed_version("torch") or "not installed"
    own = installed_version(NAME) or _checkout().get("version") or "(unknown version)"
    return f"tandem {own}{shown}, Python {platform.python_version()}, torch {torch}"


def installed_version(distribution: str) -> str | None:
    """Return the version of an installed distribution; None where there is none, or only a part of its metadata."""
    try:
        return importlib.metadata.version(distribution)
    except (importlib.metadata.PackageNotFoundError, KeyError):
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeclaredRequirements:
    """What Tandem requires on this platform."""

    source: str
    """Where that is declared, for users."""
    always: tuple["Requirement", ...]
    by_extra: dict[str, tuple["Requirement", ...]]


def declared_requirements() -> DeclaredRequirements | None:
    """Read what Tandem requires; None where neither a checkout nor an installation says it."""
    if project := _checkout():
        optional: dict[str, list[str]] = project.get("optional-dependencies", {})
        return DeclaredRequirements(
            source="pyproject.toml",
            always=_here(project["dependencies"], ""),
            by_extra={extra: _here(texts, "") for extra, texts in optional.items()},
        )
    try:
        own = importlib.metadata.distribution(NAME)
    except importlib.metadata.PackageNotFoundError:
        return None
    if not own.requires:
        return None
    always = _here(own.requires, "")
    extras: list[str] = own.metadata.get_all("Provides-Extra") or []
    return DeclaredRequirements(
        source=f"{NAME} {own.version}",
        always=always,
        by_extra={extra: tuple(one for one in _here(own.requires, extra) if one not in always) for extra in extras},
    )


def extras_of(requirement: "Requirement") -> tuple["Requirement", ...]:
    """Return what the extras that a requirement names require in turn, as far as its distribution is installed."""
    try:
        texts = importlib.metadata.requires(requirement.name) or []
    except importlib.metadata.PackageNotFoundError:
        return ()
    always = _here(texts, "")
    return tuple(one for extra in sorted(requirement.extras) for one in _here(texts, extra) if one not in always)


def _here(texts: list[str], extra: str) -> tuple["Requirement", ...]:
    """Parse requirements, and keep those whose markers apply on this platform with the extra."""
    from packaging.requirements import Requirement

    parsed = map(Requirement, texts)
    return tuple(one for one in parsed if one.marker is None or one.marker.evaluate({"extra": extra}))


def _checkout() -> dict[str, Any]:
    """Return the table `project` of the checkout that this file is in; empty outside of one."""
    try:
        project = tomllib.loads((_ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    except (OSError, tomllib.TOMLDecodeError, KeyError):
        return {}
    # Some packages leave a file of theirs among the installed ones.
    return dict(project) if project.get("name") == NAME else {}


def _git_commit(root: Path) -> str | None:
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
