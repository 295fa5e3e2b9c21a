"""Native streams for tests: skipped where nothing compiles them, and nowhere else."""

import pytest

from tests.support.router import native_world


def test_streams_without_a_compiler_skip_the_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(pytest.skip.Exception, match="there is no C\\+\\+ compiler here"):
        native_world.make_native_streams(1)


def test_streams_that_do_not_compile_fail_the_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_world, "native_streams", lambda most: None)
    monkeypatch.setattr(native_world, "has_compiler", lambda: True)
    with pytest.raises(AssertionError, match="does not compile"):
        native_world.make_native_streams(1)
