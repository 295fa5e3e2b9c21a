"""The build of the CPU kernels: once per machine, and never from files that other users could have placed."""

import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from engine.kernels.cpu.build import KernelsUnavailable, build, openmp_runtime_of, recipe, torch_openmp_runtime
from engine.kernels.cpu.library import CpuFeatures, KernelLibrary, load_kernels
from tandem.native import build as builder
from tandem.native.build import cache_root_of, plan_build

ROOT = Path(__file__).parents[4]
needs_compiler = pytest.mark.skipif(
    not any(builder.shutil.which(name) for name in builder.COMPILERS), reason="no C++ compiler"
)
FEATURES = 'extern "C" __attribute__((visibility("default"))) long tandem_cpu_features() { return 1; }\n'
BUILD_IN_CHILD = (
    "import sys\nfrom pathlib import Path\nfrom engine.kernels.cpu.build import build\n"
    "print(build(Path(sys.argv[1]), sources=Path(sys.argv[2])))\n"
)


@pytest.fixture
def sources(tmp_path):
    """A library of one function: what is tested here is the building, not the kernels."""
    directory = tmp_path / "csrc"
    directory.mkdir()
    (directory / "one.cpp").write_text(FEATURES)
    return directory


def child(cache: Path, sources: Path, **environment: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", BUILD_IN_CHILD, str(cache), str(sources)],
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def slow_compiler(tmp_path: Path) -> Path:
    """A directory for PATH whose g++ writes a file when it runs, and then sleeps."""
    bin_dir = tmp_path / "bin"
    bin_dir.mkdir()
    script = bin_dir / "g++"
    script.write_text(f'#!/bin/sh\n[ "$1" = --version ] && exit 0\necho $$ >> {tmp_path}/started\nexec sleep 600\n')
    script.chmod(0o755)
    return bin_dir


@needs_compiler
def test_cpu_build_reuses_cached_library(sources, tmp_path):
    cache = tmp_path / "cache"
    first = build(cache, sources=sources)
    stamp = first.stat().st_mtime_ns
    assert build(cache, sources=sources) == first
    assert first.stat().st_mtime_ns == stamp
    assert KernelLibrary(first).features == CpuFeatures.from_bits(1)
    assert KernelLibrary(first).features.avx2
    assert not list(cache.glob("build-*/"))


@needs_compiler
def test_cpu_build_cache_is_private(sources, tmp_path):
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o777)
    cache.chmod(0o777)
    library = build(cache, sources=sources)
    assert cache.stat().st_mode & 0o777 == 0o700
    assert library.stat().st_mode & 0o777 == 0o600


@needs_compiler
def test_cpu_build_changed_source_changes_key(sources, tmp_path):
    before = plan_build(recipe(sources)).key
    (sources / "one.h").write_text("// a header counts too\n")
    assert plan_build(recipe(sources)).key != before


@needs_compiler
def test_cpu_build_two_processes_build_once(sources, tmp_path):
    cache = tmp_path / "cache"
    children = [child(cache, sources) for _ in range(2)]
    results = [process.communicate(timeout=120) for process in children]
    assert {process.returncode for process in children} == {0}, results
    assert len({out for out, _ in results}) == 1
    assert len(list(cache.glob("kernels-*.so"))) == 1


@needs_compiler
def test_cpu_build_killed_builder_leaves_no_lock(sources, tmp_path):
    cache = tmp_path / "cache"
    builder_process = child(cache, sources, PATH=f"{slow_compiler(tmp_path)}:{os.environ['PATH']}")
    deadline = time.monotonic() + 60
    while not (tmp_path / "started").exists() or not (tmp_path / "started").read_text().strip():
        assert time.monotonic() < deadline
        assert builder_process.poll() is None
        os.sched_yield()
    builder_process.kill()
    builder_process.communicate()
    compiler = int((tmp_path / "started").read_text())
    leftovers = list(cache.glob("build-*/"))
    try:
        assert leftovers
        assert build(cache, sources=sources).exists()
        assert not list(cache.glob("build-*/"))
    finally:
        os.kill(compiler, signal.SIGKILL)


@needs_compiler
def test_cpu_build_waiting_process_uses_other_build(sources, tmp_path):
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o700)
    with (cache / "build.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        waiting = child(cache, sources, PATH=f"{slow_compiler(tmp_path)}:{os.environ['PATH']}")
        library = cache / f"kernels-{key_under(tmp_path / 'bin', sources)}.so"
        library.write_bytes(b"built by another")
        fcntl.flock(lock, fcntl.LOCK_UN)
    out, errors = waiting.communicate(timeout=60)
    assert out.strip() == str(library), errors
    assert not (tmp_path / "started").exists()


def key_under(bin_dir: Path, sources: Path) -> str:
    """The key that a process with another compiler first in its PATH computes."""
    code = "import sys\nfrom pathlib import Path\nfrom engine.kernels.cpu.build import recipe\n"
    code += "from tandem.native.build import plan_build\n"
    done = subprocess.run(
        [sys.executable, "-c", code + "print(plan_build(recipe(Path(sys.argv[1]))).key)", str(sources)],
        cwd=ROOT,
        env={**os.environ, "PATH": f"{bin_dir}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


@needs_compiler
def test_cpu_build_old_libraries_are_removed(sources, tmp_path):
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o700)
    for number in range(builder.KEPT_LIBRARIES + 3):
        old = cache / f"kernels-{number:024d}.so"
        old.write_bytes(b"")
        os.utime(old, (number, number))
    library = build(cache, sources=sources)
    kept = sorted(cache.glob("kernels-*.so"))
    assert len(kept) == builder.KEPT_LIBRARIES
    assert library in kept
    assert cache / f"kernels-{0:024d}.so" not in kept


def test_cpu_build_without_compiler_raises(sources, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(KernelsUnavailable, match=r"no C\+\+ compiler"):
        build(tmp_path / "cache", sources=sources)


@needs_compiler
def test_cpu_build_compile_error_is_quoted(sources, tmp_path):
    (sources / "two.cpp").write_text("int broken( {\n")
    with pytest.raises(KernelsUnavailable, match=r"do not compile here: two\.cpp:1"):
        build(tmp_path / "cache", sources=sources)
    assert not list((tmp_path / "cache").glob("kernels-*.so"))


@needs_compiler
def test_cpu_build_directory_of_another_user_is_refused(sources, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "getuid", lambda: os.geteuid() + 1)
    with pytest.raises(KernelsUnavailable, match="belongs to another user"):
        build(tmp_path, sources=sources)


@needs_compiler
def test_cpu_build_uncreatable_directory_is_reported(sources, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(KernelsUnavailable, match="could not be built"):
        build(tmp_path / "file" / "cache", sources=sources)


def test_cpu_build_cache_follows_xdg_specification(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_root_of(recipe()) == tmp_path / "tandem" / "kernels"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_root_of(recipe()) == Path.home() / ".cache" / "tandem" / "kernels"


def test_cpu_build_invalid_library_is_refused(tmp_path):
    (tmp_path / "kernels.so").write_bytes(b"not a library")
    with pytest.raises(KernelsUnavailable, match="does not load"):
        KernelLibrary(tmp_path / "kernels.so")


def test_cpu_build_kernels_share_threads_of_torch():
    torch.ones(4096, 64).sum()
    try:
        library = load_kernels()
    except KernelsUnavailable as missing:
        pytest.skip(str(missing))
    assert library.features.avx2
    assert openmp_runtime_of(str(library.path)) == torch_openmp_runtime() is not None


@needs_compiler
@pytest.mark.parametrize("first", ["torch", "the other runtime"])
def test_cpu_build_kernels_share_threads_of_torch_beside_another_openmp_runtime(first, tmp_path):
    torchs = Path(torch_openmp_runtime())
    name = torchs.name.replace("gomp", "gomq")
    other = tmp_path / name
    # As packages rename their copies: the loader takes a library of a known name for the one that it has.
    other.write_bytes(torchs.read_bytes().replace(torchs.name.encode() + b"\0", name.encode() + b"\0"))
    imports = ["import torch", f"import ctypes; ctypes.CDLL({str(other)!r}).omp_get_max_threads()"]
    program = f"""
from pathlib import Path
{chr(10).join(imports if first == "torch" else reversed(imports))}
from engine.kernels.cpu.build import openmp_runtime_of, torch_openmp_runtime
from engine.kernels.cpu.library import load_kernels
library = load_kernels()
assert {str(other)!r} in Path("/proc/self/maps").read_text()
assert openmp_runtime_of(str(library.path)) == torch_openmp_runtime() == {str(torchs)!r}
assert library.function("tandem_cpu_features", "", "i")() & 1
"""
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)
