"""The images: a base of Debian's packages, both of Tandem's on top of it, and those of the services beside them."""

import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from tests.containers.engine import Engine
from tests.images.context import ROOT

BASE = "localhost/tandem-base:test"
SERVICES = "localhost/tandem-services:test"
PROMETHEUS = "localhost/tandem-prometheus:test"
COLLECTOR = "localhost/tandem-collector:test"
_SUITE, _MIRROR = "bookworm", "http://deb.debian.org/debian"
_PACKAGES = "python3,python3-venv,ca-certificates"
_CERTIFICATES = "/etc/ssl/certs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Images:
    """Names of what was built."""

    router: str
    worker: str


def build_images(engine: Engine, version: str) -> Images:
    """Both of Tandem's images, by the target that everybody uses, and those beside them."""
    folder = engine.folder / "base"
    engine.gently("debootstrap", "--variant=minbase", f"--include={_PACKAGES}", _SUITE, str(folder), _MIRROR)
    engine.import_folder(folder, BASE)
    shutil.rmtree(folder)
    said = build_arguments()
    more = {"TORCH_INDEX": "configured"}
    engine.gently("make", "image-build", "CONTAINER=buildah", f"BUILD_ARGS={shlex.join(said)}", cwd=ROOT, more=more)
    images = Images(router=f"localhost/tandem-router:{version}", worker=f"localhost/tandem-worker:{version}")
    _build_services(engine, images.router)
    return images


def build_arguments() -> list[str]:
    """The base, and whatever pip needs here to find packages."""
    said = ["--build-arg", f"BASE={BASE}"]
    mounted = {_CERTIFICATES}
    for name, value in _pip_settings().items():
        said += ["--build-arg", f"PIP_{name.upper().replace('-', '_')}={value}"]
        for place in value.split():
            path = Path(urlsplit(place).path if place.startswith("file:") else place)
            if path.is_absolute() and path.exists():
                # An index of files refers to the folder above it; certificates are those of the machine.
                mounted.add(str(path.parent if name != "find-links" else path))
    return said + [word for place in sorted(mounted) for word in ("--volume", f"{place}:{place}:ro")]


def _pip_settings() -> dict[str, str]:
    """Where packages are, as pip here is told by its files and variables."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    told: dict[str, str] = {}
    for line in lines:
        key, _, value = line.partition("=")
        name = key.rpartition(".")[2]
        if name in ("index-url", "extra-index-url", "find-links", "cert"):
            told[name] = value.strip("'\"").replace("\\n", " ")
    return told


def _build_services(engine: Engine, router: str) -> None:
    """Redis and Prometheus of Debian, in one layer; and what takes the place of OpenTelemetry's collector."""
    context = engine.folder / "services"
    context.mkdir()
    install = "apt-get update && apt-get install --yes --no-install-recommends redis-server prometheus wget"
    engine.build(f"FROM {BASE}\nRUN {install} && rm -rf /var/lib/apt/lists/*\n", SERVICES, context=context)
    engine.build(f'FROM {SERVICES}\nENTRYPOINT ["/usr/bin/prometheus"]\n', PROMETHEUS, context=context)
    shutil.copy(Path(__file__).with_name("collector.py"), context)
    lines = [f"FROM {router}", "COPY collector.py /collector.py", 'ENTRYPOINT ["python3", "/collector.py"]']
    # Without the health check of the router, whose image this begins with.
    text = "\n".join([*lines, "HEALTHCHECK NONE", ""])
    engine.build(text, COLLECTOR, context=context)
