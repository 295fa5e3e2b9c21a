"""Compiles the C++ kernels of this folder once per machine, and keeps the result in the user's cache.

The sources use no torch headers: they take raw pointers, so g++ needs seconds and the result fits every torch. That is
also why this calls the compiler itself: torch's extension loader would want ninja, link libtorch, and guard the build
by a lock file that outlives a killed builder. Here the guard is `flock`, which dies with its holder.
"""

import fcntl
import hashlib
import os
import re
import shutil
import stat
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).parent / "csrc"
COMPILERS = ("g++", "c++")
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fopenmp", "-fPIC", "-fno-math-errno", "-fvisibility=hidden")
COMPILE_TIMEOUT_S = 300
KEPT_LIBRARIES = 8
_OPENMP_RUNTIME = re.compile(r"/lib(?:gomp|iomp5|omp)[^/]*\.so[^/]*$")


class KernelsUnavailable(Exception):
    """The compiled kernels cannot serve here; the engine falls back to torch. The message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildPlan:
    """Everything that determines the library; two equal plans produce the same file name."""

    compiler: str
    sources: tuple[tuple[str, bytes], ...]  # names and contents: what is compiled is what the key was made of
    openmp: str  # what the linker is given for OpenMP
    key: str


def build(cache_root: Path | None = None, *, sources: Path = SOURCES) -> Path:
    """The compiled library, built now unless the cache has it.

    Processes that arrive together build once: the others wait for the first. Raises KernelsUnavailable without a
    compiler, when the sources do not compile, or when the cache directory cannot be trusted with code.
    """
    plan = plan_build(sources)
    directory = cache_root or default_cache_root()
    try:
        _claim_directory(directory)
        library = directory / f"kernels-{plan.key}.so"
        if not library.exists():
            with _exclusive(directory / "build.lock"):
                if not library.exists():
                    _compile(plan, directory, library)
        if library.stat().st_uid != os.getuid():
            raise KernelsUnavailable(f"{library} belongs to another user")
    except OSError as error:
        raise KernelsUnavailable(f"the kernels could not be built in {directory}: {error}") from error
    return library


def plan_build(sources: Path = SOURCES) -> BuildPlan:
    """Read sources, compiler and processor, and name the library they make. Raises KernelsUnavailable."""
    compiler = next((path for name in COMPILERS if (path := shutil.which(name))), None)
    if compiler is None:
        raise KernelsUnavailable(f"no C++ compiler found ({' or '.join(COMPILERS)})")
    try:
        version = subprocess.run([compiler, "--version"], capture_output=True, timeout=30, check=True).stdout  # noqa: S603
    except (OSError, subprocess.SubprocessError) as error:
        raise KernelsUnavailable(f"the C++ compiler {compiler} does not run: {error}") from error
    openmp = mapped_openmp_runtime() or "-lgomp"
    digest = hashlib.sha256()
    files = tuple((file.name, file.read_bytes()) for file in sorted([*sources.glob("*.cpp"), *sources.glob("*.h")]))
    for part in (*FLAGS, compiler, openmp, _processor(), *(name for name, _ in files)):
        digest.update(part.encode() + b"\0")
    for content in (version, *(content for _, content in files)):
        digest.update(len(content).to_bytes(8) + content)
    return BuildPlan(compiler=compiler, sources=files, openmp=openmp, key=digest.hexdigest()[:24])


def default_cache_root() -> Path:
    """`$XDG_CACHE_HOME/tandem/kernels`, as the XDG base directory specification has it."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "tandem" / "kernels"


def mapped_openmp_runtime() -> str | None:
    """The OpenMP library that this process already has, which is torch's once torch is imported.

    Linking against that very file makes the kernels run on torch's thread pool: a second pool would fight it for
    the cores, because idle OpenMP threads spin.
    """
    runtimes = sorted(openmp_runtimes())
    return runtimes[0] if runtimes else None


def openmp_runtimes() -> set[str]:
    """Every OpenMP library mapped into this process."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return set()
    paths = (line.split(maxsplit=5)[-1] for line in maps.splitlines() if "/" in line)
    return {path for path in paths if _OPENMP_RUNTIME.search(path)}


def _processor() -> str:
    """What `-march=native` depends on: homes are shared between unequal machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return os.uname().machine
    wanted = ("flags", "Features", "model", "cpu family", "CPU part")
    return "\n".join(sorted({line for line in lines if line.split(":")[0].strip() in wanted}))


def _claim_directory(directory: Path) -> None:
    """Make the cache directory; refuse one in which another user could place code for us to load."""
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    state = directory.stat()
    if state.st_uid != os.getuid():
        raise KernelsUnavailable(f"{directory} belongs to another user")
    if stat.S_IMODE(state.st_mode) & 0o077:
        directory.chmod(0o700)


@contextmanager
def _exclusive(path: Path) -> Iterator[None]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _compile(plan: BuildPlan, directory: Path, library: Path) -> None:
    """Compile every source at once, link, and rename into place; the caller holds the lock."""
    for leftover in directory.glob("build-*/"):  # of a builder that was killed
        shutil.rmtree(leftover, ignore_errors=True)
    work = directory / f"build-{plan.key}"
    work.mkdir(mode=0o700)
    try:
        for name, content in plan.sources:
            (work / name).write_bytes(content)
        stems = [Path(name).stem for name, _ in plan.sources if name.endswith(".cpp")]
        compiles = [[plan.compiler, *FLAGS, "-c", f"{stem}.cpp", "-o", f"{stem}.o"] for stem in stems]
        _run_all(compiles, work)
        objects = [f"{stem}.o" for stem in stems]
        _run_all([[plan.compiler, "-shared", "-o", library.name, *objects, plan.openmp]], work)
        linked = work / library.name
        linked.chmod(0o600)
        linked.replace(library)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    _prune(directory)


def _prune(directory: Path) -> None:
    """Forget all but the newest libraries; a process that has an older one mapped keeps it."""
    libraries = sorted(directory.glob("kernels-*.so"), key=lambda file: file.stat().st_mtime, reverse=True)
    for old in libraries[KEPT_LIBRARIES:]:
        old.unlink(missing_ok=True)


def _run_all(commands: Sequence[Sequence[str]], directory: Path) -> None:
    """Run the commands side by side. Raises KernelsUnavailable with the first complaint of one that failed."""
    running = [
        subprocess.Popen(command, cwd=directory, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)  # noqa: S603
        for command in commands
    ]
    complaints: list[str] = []
    try:
        for process in running:
            _, errors = process.communicate(timeout=COMPILE_TIMEOUT_S)
            if process.returncode != 0:
                lines = [line for line in errors.splitlines() if "error" in line] or errors.splitlines()
                complaints.append(lines[0] if lines else f"exit code {process.returncode}")
    except subprocess.TimeoutExpired as error:
        raise KernelsUnavailable(f"the C++ compiler took more than {COMPILE_TIMEOUT_S} s") from error
    finally:
        for process in running:
            if process.poll() is None:
                process.kill()
                process.communicate()
    if complaints:
        raise KernelsUnavailable(f"the kernels do not compile here: {complaints[0]}")
