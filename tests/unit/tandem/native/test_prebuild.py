"""Libraries that an installation brings along: used without a compiler, and only for the very sources there."""

import os
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from engine.kernels.cpu import build as kernels
from engine.kernels.cpu.library import KernelLibrary
from router.fleet import native_streams
from tandem.native import build as native
from tandem.native.build import NATIVE, PREBUILT, NativeUnavailable, Processors, Recipe, build, prebuild
from tandem.native.library import NativeLibrary
from tests.support.compiler import needs_compiler

SOURCE = 'extern "C" __attribute__((visibility("default"))) long one() { return 1; }\n'


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    (tmp_path / "csrc").mkdir()
    (tmp_path / "csrc/one.cpp").write_text(SOURCE)
    return Recipe(name="ones", sources=tmp_path / "csrc", flags=("-fPIC",))


@needs_compiler
def test_installed_library_needs_no_compiler(recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (library,) = prebuild(recipe, tmp_path / "prefix")
    assert library.parent == tmp_path / "prefix" / PREBUILT
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "prefix"))
    monkeypatch.setenv("PATH", "/nowhere")
    assert build(recipe, tmp_path / "cache") == library
    assert not (tmp_path / "cache").exists()


@needs_compiler
@pytest.mark.parametrize("change", ["source", "header", "flags"])
def test_installed_library_of_other_sources_is_not_used(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    prebuild(recipe, tmp_path / "prefix")
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "prefix"))
    if change == "flags":
        recipe = replace(recipe, flags=("-fPIC", "-O1"))
    else:
        name = "one.cpp" if change == "source" else "one.h"
        (recipe.sources / name).write_text(SOURCE + "// changed\n")
    assert build(recipe, tmp_path / "cache").parent == tmp_path / "cache"


def test_code_for_one_processor_is_not_installed(recipe: Recipe, tmp_path: Path) -> None:
    with pytest.raises(NativeUnavailable, match="the ones are compiled for the processor that they run on"):
        prebuild(replace(recipe, flags=("-fPIC", "-march=native")), tmp_path)


@needs_compiler
def test_best_library_that_fits_the_processor_is_used(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = (
        Processors(flags=("-DKIND=3",), features=frozenset({"a", "b"})),
        Processors(flags=("-DKIND=2",), features=frozenset({"a"})),
        Processors(flags=("-DKIND=1",), features=frozenset()),
    )
    (recipe.sources / "one.cpp").write_text(SOURCE.replace("return 1", "return KIND"))
    recipe = replace(recipe, flags=("-fPIC", NATIVE), processors=kinds)
    libraries = prebuild(recipe, tmp_path / "prefix")
    assert [NativeLibrary(library).bind("one", "", "i")() for library in libraries] == [3, 2, 1]
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "prefix"))
    for features, kind in ({"a", "b", "c"}, 3), ({"a", "c"}, 2), ({"b"}, 1):
        monkeypatch.setattr(native, "_features", lambda found=features: frozenset(found))
        assert build(recipe, tmp_path / "cache") == libraries[3 - kind]
    libraries[2].unlink()
    with pytest.raises(NativeUnavailable):  # compiled here, without its definition
        build(recipe, tmp_path / "cache")


COMPILER = """#!/bin/sh
test "$1" = --version && exit 0
touch running/$$; ls running | wc -l >> seen; sleep 0.05; rm running/$$
while test $# -gt 0; do test "$1" = -o && touch "$2"; shift; done
"""


@pytest.mark.parametrize(("free_bytes", "most"), [(64 << 30, 3), (900 << 20, 2), (1 << 20, 1)])
def test_compilers_are_as_many_as_processors_and_memory_allow(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_bytes: int, most: int
) -> None:
    """All at once had taken more memory than a small pod has (22 of 100 to 350 MB each)."""
    for name in "abcdef":
        (recipe.sources / f"{name}.cpp").write_text(SOURCE)
    shown = tmp_path / "shown"
    (tmp_path / "bin").mkdir()
    (shown / "running").mkdir(parents=True)
    text = COMPILER.replace("running", f"{shown}/running").replace("seen", f"{shown}/seen")
    (tmp_path / "bin/g++").write_text(text)
    (tmp_path / "bin/g++").chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 1, 2})
    monkeypatch.setattr(native, "free_memory_bytes", lambda: free_bytes)
    build(recipe, tmp_path / "cache")
    seen = [int(line) for line in (shown / "seen").read_text().split()]
    assert len(seen) == 8, "seven sources and the linker"
    assert max(seen) <= most
    assert most == 1 or max(seen) > 1


def test_kinds_of_processors_are_ordered_from_the_best() -> None:
    for better, worse in pairwise(kernels.PROCESSORS):
        assert better.features > worse.features
    assert not any(kernels.NATIVE in one.flags for one in kernels.recipe().portable())


@pytest.mark.slow
@needs_compiler
def test_kernels_for_each_kind_compile_and_have_what_it_has(tmp_path: Path) -> None:
    libraries = prebuild(kernels.recipe(), tmp_path)
    assert len(libraries) == len(kernels.PROCESSORS)
    here = native._features()
    for library, kind in zip(libraries, kernels.PROCESSORS, strict=True):
        if not kind.features <= here:
            continue
        features = KernelLibrary(library).features
        assert features.avx2
        assert features.avx512 == ("avx512f" in kind.features)
        assert features.avx512_vnni == ("avx512_vnni" in kind.features)
        assert features.avx512_bf16 == ("avx512_bf16" in kind.features)


@needs_compiler
def test_prebuild_command_prints_where_the_library_is(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tandem.native.prebuild", native_streams.__name__, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert Path(done.stdout.strip()).parent == tmp_path / PREBUILT
    assert Path(done.stdout.strip()).name.startswith("native-streams-")
