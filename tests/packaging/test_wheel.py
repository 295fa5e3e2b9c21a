"""The wheel of a checkout, in an empty environment: complete, and enough to serve with.

It brings no tests, no training, no chart and no dashboards: nothing that it runs reads them without a clone.
"""

import json
import re
import signal
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.packaging.environment import INSTALLED_TORCH, Environment, demo_answers
from tests.support.compiler import has_compiler

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
NOT_SHIPPED = {"tests", "training"}
WAIT_S = 600.0
"""For what must happen, however slow the machine is; no test passes or fails by how long it took."""


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Empty: no library that a checkout left in the user's cache stands in for one that the wheel cannot make."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def environment(wheel: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Environment]:
    """Installed as README.md says: PyTorch first."""
    with Environment(tmp_path_factory.mktemp("wheel"), cache=cache) as made:
        made.install_torch(INSTALLED_TORCH)
        made.install(f"{wheel}[hub,redis]")
        yield made


def test_wheel_has_every_file_of_its_packages_and_no_other(wheel: Path, checkout: list[str]) -> None:
    packages = {name.partition("/")[0] for name in checkout if name.count("/") == 1 and name.endswith("/__init__.py")}
    assert packages > NOT_SHIPPED
    expected = {name for name in checkout if name.partition("/")[0] in packages - NOT_SHIPPED}
    with zipfile.ZipFile(wheel) as opened:
        names = set(opened.namelist())
    about = {name for name in names if ".dist-info/" in name}
    assert any(name.endswith("/LICENSE") for name in about)
    found = names - about
    assert sorted(expected - found) == []
    assert sorted(found - expected) == []


def test_wheel_is_installed_without_other_extras(environment: Environment) -> None:
    there = environment.versions()
    assert {"tandem-serve", "huggingface-hub", "redis", "hiredis"} <= there.keys()
    assert not {"transformers", "matplotlib", "ray", "opentelemetry-sdk", "pytest"} & there.keys()
    environment.run("pip", "check")


def test_wheel_help_lists_commands(environment: Environment) -> None:
    shown = environment.run("tandem", "--help")
    assert all(command in shown for command in ("up", "demo", "chat", "top", "doctor", "bench")), shown


def test_wheel_version_names_no_checkout(environment: Environment) -> None:
    shown = environment.run("tandem", "--version")
    assert shown.startswith("tandem "), shown
    assert "commit" not in shown, shown
    assert f"torch {INSTALLED_TORCH}" in shown, shown


def test_wheel_bench_without_its_extra_names_the_extra(environment: Environment) -> None:
    code, shown = environment.outcome("tandem", "bench", "spine")
    assert code == 2, shown
    assert "needs transformers, which the extra `bench` installs" in " ".join(shown.split()), shown


def test_wheel_demo_answers_with_code_compiled_from_it(environment: Environment, cache: Path) -> None:
    demo_answers(environment)
    made = {path.parent.name for path in cache.glob("tandem/*/*.so")}
    # Without a compiler it answered by PyTorch's own operators.
    assert made >= {"kernels", "movers", "native-streams"} if has_compiler() else not made


def test_wheel_cluster_serves_chat_and_stops_on_ctrl_c(environment: Environment) -> None:
    output = environment.outside / "up.txt"
    with environment.started("tandem", "up", "--port", "0", "--grpc-port", "0", output=output) as process:
        until(lambda: process.poll() is not None or "Ctrl-C" in output.read_text(encoding="utf-8"))
        said = output.read_text(encoding="utf-8")
        address = re.search(r"curl -N (http://[^/\s]+)/v1/chat/completions", said)
        assert address is not None, said
        everybody = psutil.Process(process.pid).children(recursive=True)
        assert len(everybody) >= 3, said
        with httpx.Client(base_url=address[1], timeout=WAIT_S, trust_env=False) as client:
            whole, streamed = ask(client), ask_for_stream(client)
        assert whole
        assert streamed == whole
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT_S) == 0, output.read_text(encoding="utf-8")
        assert not psutil.wait_procs(everybody, timeout=WAIT_S)[1]
    assert "draining" in output.read_text(encoding="utf-8")


def question(client: httpx.Client) -> dict[str, object]:
    model = client.get("/v1/models").json()["data"][0]["id"]
    messages = [{"role": "user", "content": "Tell me a story about a fox."}]
    return {"model": model, "messages": messages, "max_tokens": 24, "temperature": 0}


def ask(client: httpx.Client) -> str:
    response = client.post("/v1/chat/completions", json=question(client))
    assert response.status_code == 200, response.text
    text = response.json()["choices"][0]["message"]["content"]
    assert isinstance(text, str)
    return text


def ask_for_stream(client: httpx.Client) -> str:
    text, is_done = "", False
    with client.stream("POST", "/v1/chat/completions", json={**question(client), "stream": True}) as response:
        assert response.status_code == 200
        for line in filter(None, response.iter_lines()):
            if line == "data: [DONE]":
                is_done = True
                continue
            for choice in json.loads(line.removeprefix("data: "))["choices"]:
                text += choice["delta"].get("content") or ""
    assert is_done, text
    return text


def until(reached: Callable[[], bool]) -> None:
    """Ask until it is so, within `WAIT_S`: what another process writes to a file wakes nobody."""
    deadline_s = time.monotonic() + WAIT_S
    while not reached():
        assert time.monotonic() < deadline_s, "not reached"
        time.sleep(0.1)
