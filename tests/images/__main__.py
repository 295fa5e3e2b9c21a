"""`python -m tests.images`: builds both images by their own steps, here, and runs a cluster of them.

Prints what it found; the first thing that is wrong ends it. Needs root: layers are mounts. These are made by a second
process in a namespace of its own, and the first one cleans up when that, and so every mount, is gone.
"""

import hashlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from tests.images.building import Image, build
from tests.images.containers import Cluster, output_of
from tests.images.context import gather
from tests.images.dockerfile import FOLDER
from tests.images.layers import Layers, namespace


def main() -> int:
    """Build and run the images in a mount namespace of their own, so that nothing stays mounted."""
    if len(sys.argv) > 1:
        _build_and_run(Path(sys.argv[1]), machine=sys.argv[2])
        return 0
    with tempfile.TemporaryDirectory(prefix="tandem-images-") as folder:
        command = ["unshare", "--mount", "--fork", "--kill-child"]
        return subprocess.run(
            [*command, sys.executable, "-m", "tests.images", folder, namespace()], check=False
        ).returncode


def _build_and_run(folder: Path, *, machine: str) -> None:
    (folder / "layers").mkdir()
    layers = Layers(folder / "layers", machine=machine)
    context = gather(folder / "context")
    router = build(FOLDER / "router.Dockerfile", "router", context, layers)
    again = build(FOLDER / "router.Dockerfile", "router", context, layers)
    # This machine has a torch for CPUs where pip looks.
    worker = build(FOLDER / "worker.Dockerfile", "cpu", context, layers, {"TORCH_INDEX": "configured"})
    _report("router: the same bytes twice", lambda: _is_same(router, again))
    for image in (router, worker):
        _report("sizes of layers", lambda image=image: _sizes(image))
    _look(layers, router, worker)
    _serve(layers, router, worker, folder)


def _look(layers: Layers, router: Image, worker: Image) -> None:
    at = layers.show(router.layers, "look")
    _report("router: version", lambda: output_of(at, router, "tandem", "version").strip())
    _report("router: SBOM names what is installed", lambda: _bill(at, router))
    checks = json.loads(output_of(at, router, "tandem", "doctor", "--router", "--json"))["checks"]
    _report("router: doctor", lambda: ", ".join(f"{one['name']} {one['status']}" for one in checks))
    assert "not installed" in output_of(at, router, "tandem", "version")
    _report("router: native code", lambda: _native(at, router))
    at = layers.show(worker.layers, "look")
    _report("worker: version", lambda: output_of(at, worker, "tandem", "version").strip())
    _report("worker: SBOM names what is installed", lambda: _bill(at, worker))
    checks = json.loads(output_of(at, worker, "tandem", "doctor", "--json"))["checks"]
    _report("worker: doctor", lambda: ", ".join(f"{one['name']} {one['status']}" for one in checks))
    _report("worker: CPU kernels", lambda: _kernels(at, worker))


def _native(at: Path, router: Image) -> str:
    """Where the router finds it; it would be in the cache if it had been compiled there."""
    program = "from router.fleet.native_streams import *; assert native_streams(StreamRoom(1)); print(build(RECIPE))"
    found = output_of(at, router, "python3", "-c", program).strip()
    assert found.startswith("/opt/tandem/lib/tandem/native-streams-"), found
    return found


def _kernels(at: Path, worker: Image) -> str:
    """What a worker is ready with: nothing was compiled there."""
    library, mover = "engine.kernels.cpu.library", "kv_transfer.memory.mover"
    program = f"import torch, {library}, {mover}; print({library}.load_kernels().path, {mover}.build({mover}.RECIPE))"
    kernels, movers = output_of(at, worker, "python3", "-c", program).split()
    assert kernels.startswith("/opt/tandem/lib/tandem/kernels-"), kernels
    assert movers.startswith("/opt/tandem/lib/tandem/movers-"), movers
    return output_of(at, worker, "env", "XDG_CACHE_HOME=/tmp", "python3", "-m", "engine.kernels.cpu")


def _serve(layers: Layers, router: Image, worker: Image, folder: Path) -> None:
    with Cluster(layers, router, worker, folder) as cluster:
        for role in ("decode", "prefill", "router"):
            assert not cluster.is_healthy(role), f"{role} is well before it runs"
        for role in ("decode", "prefill", "router"):
            cluster.begin(role)
        for role in ("decode", "prefill", "router"):
            cluster.wait_for(role)
        answer = cluster.ask()
        assert answer["usage"]["completion_tokens"] == 8, answer
        _report("an answer", lambda: answer["choices"][0]["text"])
        assert not cluster.zombies()
        codes = {role: cluster.stop(role) for role in ("router", "prefill", "decode")}
        _report("SIGTERM to number 1", lambda: str(codes))
        assert set(codes.values()) == {0}, codes


def _bill(at: Path, image: Image) -> str:
    bill = json.loads((at / "opt/tandem/share/tandem/sbom.cdx.json").read_text())
    named = {one["name"].lower().replace("_", "-").replace(".", "-"): one["version"] for one in bill["components"]}
    listing = "import importlib.metadata as m, json; print(json.dumps({d.name: d.version for d in m.distributions()}))"
    there = json.loads(output_of(at, image, "python3", "-c", listing))
    there = {name.lower().replace("_", "-").replace(".", "-"): version for name, version in there.items()}
    own = there.pop("tandem-serve")
    assert bill["metadata"]["component"]["version"] == own
    assert named == there, set(named.items()) ^ set(there.items())
    return f"{len(named)} packages, {bill['bomFormat']} {bill['specVersion']}"


def _is_same(one: Image, other: Image) -> str:
    digests = [_digest(image.layers[-1] / "opt") for image in (one, other)]
    assert digests[0] == digests[1], _difference(one.layers[-1], other.layers[-1])
    return digests[0]


def _digest(tree: Path) -> str:
    """Of names, modes, times and contents."""
    found = hashlib.sha256()
    for path in sorted(tree.rglob("*")):
        state = path.lstat()
        content = str(path.readlink()).encode() if path.is_symlink() else path.read_bytes() if path.is_file() else b""
        found.update(f"{path.relative_to(tree)} {state.st_mode} {state.st_mtime} {len(content)}\n".encode() + content)
    return found.hexdigest()


def _difference(one: Path, other: Path) -> str:
    done = subprocess.run(["diff", "-rq", str(one), str(other)], capture_output=True, text=True, check=False)
    return done.stdout[:4000] or "names, modes or times"


def _sizes(image: Image) -> str:
    done = subprocess.run(["du", "-sm", *map(str, image.layers)], capture_output=True, text=True, check=True)
    return ", ".join(f"{Path(line.split()[1]).name} {line.split()[0]} MB" for line in done.stdout.splitlines())


def _report(what: str, find: Callable[[], str]) -> None:
    print(f"{what}: {find()}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
