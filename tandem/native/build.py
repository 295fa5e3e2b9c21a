"""Compiles a folder of C++ once per machine, and keeps the library in the user's cache.

An installation may bring the library along, in `lib/tandem` (`tandem.native.prebuild`), as images do.

The sources take raw pointers and need only system headers, so that g++ takes seconds and the result fits every process.
Concurrent builds exclude each other by `flock`, which ends with its holder.
"""

import fcntl
import hashlib
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from tandem.process.host_memory import free_memory_bytes

COMPILERS = ("g++", "c++")
COMPILE_TIMEOUT_S = 300
COMPILER_BYTES = 400 << 20
"""Memory that one compiler may take: the kernels' take 100 to 350 MB each."""
NATIVE = "-march=native"
"""Flag for the processor that the compiler runs on."""
KEPT_LIBRARIES = 8
PREBUILT = Path("lib/tandem")
"""Folder of an installation for compiled libraries."""


class NativeUnavailable(Exception):
    """Compiled code is not available, and the caller has to do without it; the message gives the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Processors:
    """A kind of processors, for which a library can be compiled on another machine."""

    flags: tuple[str, ...]
    """Flags of the compiler, in place of NATIVE."""
    features: frozenset[str]
    """What a processor needs, by the names in /proc/cpuinfo."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Sources and flags of one library."""

    name: str
    """Plural noun for file names and messages, such as "movers" in "the movers do not compile here"."""
    sources: Path
    """A folder; every `.cpp` in it is compiled."""
    flags: tuple[str, ...]
    libraries: tuple[str, ...] = ()
    """Extra arguments of the linker."""
    processors: tuple[Processors, ...] = ()
    """With NATIVE among the flags: kinds of processors to compile for ahead of time, the best first."""

    def read_sources(self) -> tuple[tuple[str, bytes], ...]:
        """Names and contents of all sources. Raises NativeUnavailable where there are none."""
        found = sorted([*self.sources.glob("*.cpp"), *self.sources.glob("*.h")])
        if not found:
            raise NativeUnavailable(f"the sources of the {self.name} are missing in {self.sources}")
        return tuple((file.name, file.read_bytes()) for file in found)

    def portable(self, features: frozenset[str] | None = None) -> tuple["Recipe", ...]:
        """Return recipes of libraries that run on other machines, too, the best first; for processors with these
        features, or all.
        """
        if NATIVE not in self.flags:
            return (self,)
        flags = tuple(flag for flag in self.flags if flag != NATIVE)
        kinds = (kind for kind in self.processors if features is None or kind.features <= features)
        return tuple(replace(self, flags=(*flags, *kind.flags), processors=()) for kind in kinds)


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildPlan:
    """Everything that determines the library; two equal plans produce the same file name."""

    recipe: Recipe
    compiler: str
    sources: tuple[tuple[str, bytes], ...]  # names and contents: exactly the bytes that went into `key` are compiled
    key: str


def build(recipe: Recipe, cache_root: Path | None = None) -> Path:
    """Return the compiled library, building it unless it is cached; the cache is `cache_root_of(recipe)` by default.

    Concurrent processes build it once; where the installation has it, none does. Raises NativeUnavailable without a
    compiler, when the sources do not compile, or when another user could have written to the cache.
    """
    if (ready := prebuilt_library(recipe)) is not None:
        return ready
    plan = plan_build(recipe)
    directory = cache_root or cache_root_of(recipe)
    try:
        _claim_directory(directory)
        library = directory / f"{recipe.name}-{plan.key}.so"
        if not library.exists():
            with _exclusive(directory / "build.lock"):
                if not library.exists():
                    _compile(plan, directory, library)
        if library.stat().st_uid != os.getuid():
            raise NativeUnavailable(f"{library} belongs to another user")
    except OSError as error:
        raise NativeUnavailable(f"the {recipe.name} could not be built in {directory}: {error}") from error
    return library


def prebuilt_library(recipe: Recipe) -> Path | None:
    """Return the library that the installation brought along, made from these very sources; None where it has none that
    runs here.
    """
    directory = Path(sys.prefix) / PREBUILT
    if not directory.is_dir():
        return None
    libraries = (_prebuilt(one, directory) for one in recipe.portable(_features()))
    return next((library for library in libraries if library.exists()), None)


def prebuild(recipe: Recipe, root: Path) -> list[Path]:
    """Compile for an installation whose files lie below `root`; return the libraries. Raises NativeUnavailable."""
    libraries = []
    for one in recipe.portable():
        library = _prebuilt(one, root / PREBUILT)
        library.parent.mkdir(parents=True, exist_ok=True)
        _compile(plan_build(one), library.parent, library)
        library.chmod(0o644)  # it is installed by one user and used by others
        libraries.append(library)
    if not libraries:
        raise NativeUnavailable(f"the {recipe.name} are compiled for the processor that they run on")
    return libraries


def _prebuilt(recipe: Recipe, directory: Path) -> Path:
    digest = hashlib.sha256()
    for part in (*recipe.flags, *recipe.libraries):
        digest.update(part.encode() + b"\0")
    for name, content in recipe.read_sources():
        digest.update(name.encode() + b"\0" + len(content).to_bytes(8) + content)
    return directory / f"{recipe.name}-{digest.hexdigest()[:24]}.so"


def plan_build(recipe: Recipe) -> BuildPlan:
    """Read sources, compiler and processor, and derive the library's key. Raises NativeUnavailable."""
    compiler = next((path for name in COMPILERS if (path := shutil.which(name))), None)
    if compiler is None:
        raise NativeUnavailable(f"no C++ compiler found ({' or '.join(COMPILERS)})")
    try:
        version = subprocess.run([compiler, "--version"], capture_output=True, timeout=30, check=True).stdout  # noqa: S603
    except (OSError, subprocess.SubprocessError) as error:
        raise NativeUnavailable(f"the C++ compiler {compiler} does not run: {error}") from error
    digest = hashlib.sha256()
    files = recipe.read_sources()
    for part in (*recipe.flags, compiler, *recipe.libraries, _processor(), *(name for name, _ in files)):
        digest.update(part.encode() + b"\0")
    for content in (version, *(content for _, content in files)):
        digest.update(len(content).to_bytes(8) + content)
    return BuildPlan(recipe=recipe, compiler=compiler, sources=files, key=digest.hexdigest()[:24])


def cache_root_of(recipe: Recipe) -> Path:
    """`$XDG_CACHE_HOME/tandem/NAME`, as specified by the XDG base directory specification."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "tandem" / recipe.name


def _features() -> frozenset[str]:
    """Features of the processor, as the kernel names them; none where it does not say."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return next((frozenset(line.split(":")[1].split()) for line in lines if line.startswith("flags")), frozenset())


def _processor() -> str:
    """The properties that `-march=native` depends on, because a home may be shared between different machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return os.uname().machine
    wanted = ("flags", "Features", "model", "cpu family", "CPU part")
    return "\n".join(sorted({line for line in lines if line.split(":")[0].strip() in wanted}))


def _claim_directory(directory: Path) -> None:
    """Create the cache directory; refuse one in which another user could place code."""
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    state = directory.stat()
    if state.st_uid != os.getuid():
        raise NativeUnavailable(f"{directory} belongs to another user")
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
    """Compile all sources in parallel, link, and rename into place; the caller holds the lock."""
    for leftover in directory.glob("build-*/"):  # of a builder that was killed
        shutil.rmtree(leftover, ignore_errors=True)
    work = directory / f"build-{plan.key}"
    work.mkdir(mode=0o700)
    try:
        for name, content in plan.sources:
            (work / name).write_bytes(content)
        stems = [Path(name).stem for name, _ in plan.sources if name.endswith(".cpp")]
        recipe = plan.recipe
        compiles = [[plan.compiler, *recipe.flags, "-c", f"{stem}.cpp", "-o", f"{stem}.o"] for stem in stems]
        _run_all(compiles, work, recipe.name)
        objects = [f"{stem}.o" for stem in stems]
        _run_all([[plan.compiler, "-shared", "-o", library.name, *objects, *recipe.libraries]], work, recipe.name)
        linked = work / library.name
        linked.chmod(0o600)
        linked.replace(library)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    _prune(directory, recipe.name)


def _prune(directory: Path, name: str) -> None:
    """Delete all but the newest libraries; a process that has mapped an older one keeps it."""
    libraries = sorted(directory.glob(f"{name}-*.so"), key=lambda file: file.stat().st_mtime, reverse=True)
    for old in libraries[KEPT_LIBRARIES:]:
        old.unlink(missing_ok=True)


def _run_all(commands: Sequence[Sequence[str]], directory: Path, name: str) -> None:
    """Run the commands, some at once. Raises NativeUnavailable with the first error message of one that failed."""

    def complaint(command: Sequence[str]) -> str | None:
        try:
            done = subprocess.run(  # noqa: S603
                command,
                cwd=directory,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                timeout=COMPILE_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise NativeUnavailable(f"the C++ compiler took more than {COMPILE_TIMEOUT_S} s") from error
        if done.returncode == 0:
            return None
        lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
        return lines[0] if lines else f"exit code {done.returncode}"

    with ThreadPoolExecutor(_num_compilers()) as pool:
        for found in pool.map(complaint, commands):
            if found is not None:
                raise NativeUnavailable(f"the {name} do not compile here: {found}")


def _num_compilers() -> int:
    """How many compilers may run at once: one for each processor, and fewer in a small pod of a large machine."""
    return max(1, min(len(os.sched_getaffinity(0)), free_memory_bytes() // COMPILER_BYTES))
