"""A real Prometheus with our own rules, which scrapes a cluster during an incident."""

import asyncio
import json
import shutil
import urllib.parse
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import yaml

from tandem_bench.clusters import free_ports
from tandem_bench.errors import CannotMeasure, require_clone

RULES = Path(__file__).parents[2] / "helm/tandem/rules"
_START_S = 30.0
_PERIOD_S = 0.05
_STEP_S = 1


class Watch:
    """Queries one Prometheus that scrapes one cluster after another."""

    def __init__(self, url: str, targets: Path) -> None:
        self.url = url
        self._targets = targets

    def look_at(self, url: str | None) -> None:
        """Scrape this router from now on, or none."""
        found = [] if url is None else [{"targets": [url.removeprefix("http://")]}]
        half_written = self._targets.with_suffix(".new")
        half_written.write_text(json.dumps(found), encoding="utf-8")
        half_written.replace(self._targets)

    async def range(self, expr: str, start_s: float, end_s: float) -> list[list[tuple[float, float]]]:
        """Return every series of an expression, second by second. Raises CannotMeasure."""
        params = {"query": expr, "start": start_s, "end": end_s, "step": _STEP_S}
        async with httpx.AsyncClient(trust_env=False, timeout=30.0) as http:
            answer = await http.get(f"{self.url}/api/v1/query_range?{urllib.parse.urlencode(params)}")
        body: dict[str, Any] = answer.json()
        if body["status"] != "success":
            raise CannotMeasure(f"Prometheus: {body.get('error')}: {expr}")
        return [
            [(at_s, float(value)) for at_s, value in one["values"] if value != "NaN"] for one in body["data"]["result"]
        ]

    async def held(self, expr: str, start_s: float, end_s: float) -> float:
        """Return the share of this time in which an alert's expression had a result."""
        seconds = {round(at_s) for series in await self.range(expr, start_s, end_s) for at_s, _ in series}
        return len(seconds) / max(1, int(end_s - start_s) + 1)

    async def peak(self, expr: str, start_s: float, end_s: float) -> float | None:
        """Return the largest value of any series."""
        values = [value for series in await self.range(expr, start_s, end_s) for _, value in series]
        return max(values, default=None)


@asynccontextmanager
async def watching() -> AsyncIterator[Watch]:
    """Run a Prometheus with our rules that scrapes every second. Raises CannotMeasure if it, or they, are missing."""
    require_clone(RULES, "an incident with its alerts")
    program = shutil.which("prometheus")
    if program is None:
        raise CannotMeasure("prometheus is not installed (Debian: apt-get install prometheus)")
    with TemporaryDirectory(prefix="tandem-watch-") as name:
        folder, targets = Path(name), Path(name) / "targets.json"
        (port,) = free_ports(1)
        watch = Watch(f"http://127.0.0.1:{port}", targets)
        watch.look_at(None)
        (folder / "prometheus.yaml").write_text(yaml.safe_dump(_config(targets)), encoding="utf-8")
        process = await asyncio.create_subprocess_exec(
            program,
            f"--config.file={folder / 'prometheus.yaml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
            "--log.level=error",
            stdin=asyncio.subprocess.DEVNULL,
        )
        try:
            await _until_ready(watch.url, process)
            yield watch
        finally:
            with suppress(ProcessLookupError):
                process.terminate()
            await process.wait()


def _config(targets: Path) -> dict[str, Any]:
    return {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(path) for path in sorted(RULES.glob("*.yaml"))],
        "scrape_configs": [
            {"job_name": "tandem", "file_sd_configs": [{"files": [str(targets)], "refresh_interval": "1s"}]}
        ],
    }


async def _until_ready(url: str, process: asyncio.subprocess.Process) -> None:
    async with asyncio.timeout(_START_S), httpx.AsyncClient(base_url=url, trust_env=False) as http:
        while True:
            if process.returncode is not None:
                raise CannotMeasure(f"prometheus ended with {process.returncode}")
            with suppress(httpx.TransportError):
                if (await http.get("/-/ready")).status_code == httpx.codes.OK:
                    return
            # The server runs in another process, which gives no event to wait for.
            await asyncio.sleep(_PERIOD_S)
