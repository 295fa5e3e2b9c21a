"""Libraries that an installation brings along: used without a compiler, and only for the very sources there."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from router.fleet import native_streams
from tandem.native.build import PREBUILT, NativeUnavailable, Recipe, build, prebuild
from tests.support.compiler import needs_compiler

SOURCE = 'extern "C" __attribute__((visibility("default"))) long one() { return 1; }\n'


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    (tmp_path / "csrc").mkdir()
    (tmp_path / "csrc/one.cpp").write_text(SOURCE)
    return Recipe(name="ones", sources=tmp_path / "csrc", flags=("-fPIC",))


@needs_compiler
def test_installed_library_needs_no_compiler(recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = prebuild(recipe, tmp_path / "prefix")
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
def test_prebuild_command_prints_where_the_library_is(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tandem.native.prebuild", native_streams.__name__, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert Path(done.stdout.strip()).parent == tmp_path / PREBUILT
    assert Path(done.stdout.strip()).name.startswith("native-streams-")
