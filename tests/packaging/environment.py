"""A virtual environment of a test's own: what somebody has who installs Tandem, and no checkout."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Self

from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
INSTALLED_TORCH = version("torch")
_LONGEST_S = 1500.0
_LAST_CHARACTERS = 6000
_LISTING = "import importlib.metadata as m, json; print(json.dumps({d.name: d.version for d in m.distributions()}))"


class CommandFailed(Exception):
    """A command ended with an exit code above 0; the message has its last output."""


class Environment:
    """Starts every command outside of the checkout, without this process's Python path and settings.

    As a context manager it is removed with its block: it has gigabytes.
    """

    def __init__(self, folder: Path, *, cache: Path | None = None) -> None:
        """Make it, with nothing but pip. `cache`: where compiled code goes; None: where the user has it."""
        self.outside = folder / "outside"
        self.outside.mkdir()
        self._bin = folder / "environment/bin"
        self._variables = _variables(self._bin, cache)
        subprocess.run([sys.executable, "-m", "venv", str(self._bin.parent)], check=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        shutil.rmtree(self._bin.parent)

    def install(self, *arguments: str) -> None:
        """Let pip install, from wherever it is configured to look. Raises CommandFailed."""
        # Bytecode is made of what is imported: most of the files never are.
        self.run("pip", "install", "--no-compile", "--disable-pip-version-check", "--progress-bar=off", *arguments)

    def install_torch(self, *wanted: str) -> str:
        """Install the first of these versions that can be had, and return it. Raises CommandFailed."""
        reason = ""
        for one in wanted:
            try:
                self.install(f"torch=={one}")
            except CommandFailed as failed:
                reason = str(failed)
            else:
                return self.versions()["torch"]
        raise CommandFailed(f"{reason}\nNo torch of {', '.join(wanted)}: tell pip where there is one (PIP_FIND_LINKS)")

    def versions(self) -> dict[str, str]:
        """What is installed, by canonical name."""
        listed = json.loads(self.run("python", "-c", _LISTING))
        return {canonicalize_name(name): found for name, found in listed.items()}

    def run(self, program: str, *arguments: str, cwd: Path | None = None, more: Mapping[str, str] | None = None) -> str:
        """Wait for a program of this environment; its output, both streams in one. Raises CommandFailed.

        `more`: variables besides those that every command here has.
        """
        code, output = self.outcome(program, *arguments, cwd=cwd, more=more)
        if code != 0:
            raise CommandFailed(f"{program} {' '.join(arguments)}: exit code {code}\n{output[-_LAST_CHARACTERS:]}")
        return output

    def outcome(
        self, program: str, *arguments: str, cwd: Path | None = None, more: Mapping[str, str] | None = None
    ) -> tuple[int, str]:
        """Like `run`, with the exit code instead of an exception."""
        output = self.outside.with_name("output.txt")
        with self.started(program, *arguments, output=output, cwd=cwd, more=more) as process:
            code = process.wait(_LONGEST_S)
        return code, output.read_text(encoding="utf-8", errors="replace")

    @contextmanager
    def started(
        self,
        program: str,
        *arguments: str,
        output: Path,
        cwd: Path | None = None,
        more: Mapping[str, str] | None = None,
    ) -> Iterator["subprocess.Popen[bytes]"]:
        """A program that runs; with the block it ends, and what it started in its group too."""
        with output.open("wb") as stream:
            process = subprocess.Popen(
                [str(self._bin / program), *arguments],
                cwd=cwd or self.outside,
                env={**self._variables, **(more or {})},
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                process_group=0,
            )
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _variables(folder: Path, cache: Path | None) -> dict[str, str]:
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "PYTEST_", "TANDEM_", "VIRTUAL_ENV"))
    }
    kept["PATH"] = os.pathsep.join([str(folder), kept.get("PATH", os.defpath)])
    if cache is not None:
        # pip's own would be there as well, and everything would be downloaded again.
        command = [sys.executable, "-m", "pip", "cache", "dir"]
        listed = subprocess.run(command, capture_output=True, text=True, check=True)
        kept |= {"XDG_CACHE_HOME": str(cache), "PIP_CACHE_DIR": listed.stdout.strip()}
    return kept


def demo_answers(environment: Environment) -> str:
    """What `tandem demo` printed; its answer, which it must find in the story that it tells the model, is there."""
    output = environment.run("tandem", "demo")
    assert output.count("> What is the code of amber?") == 2, output
    assert output.count("4821") >= 3, output  # once in the introduction, and in both answers
    return output
