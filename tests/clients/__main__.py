"""Clients that nobody here wrote, against a real cluster: `python -m tests.clients NAME`, or `all`.

Each has an environment of its own, made once, and a cluster over both pools that asks for an API key. Prints what the
client says and ends with 1 if one of them was not content.
"""

import argparse
import asyncio
import os
import sys
import tempfile
from pathlib import Path

from tandem.values.api_key import entry_of, new_key
from tandem_bench.peers.environments import ensure
from tests.clients.suites import SUITES, Place, Suite
from tests.support.running_cluster import running

_MOST_S = 1800.0


async def run(suite: Suite, python: Path | None) -> int:
    """The exit code of the client's process."""
    interpreter = python or await asyncio.to_thread(ensure, suite.environment, print)
    key = new_key()
    with tempfile.TemporaryDirectory(prefix="tandem-client-") as folder:
        settings = {
            "router__api_keys": [entry_of(key)],
            "router__operator_access": {"metrics": "open"},
            "router__batches": {"path": str(Path(folder) / "batches")},
        }
        model = Path(folder) / "model"
        if suite.save is not None:
            suite.save(model)
            settings |= {"model__path": str(model), "model__dtype": "float32"}
        async with running(**settings) as cluster:
            place = Place(url=cluster.local.http_url, key=key, python=interpreter, folder=Path(folder))
            environment = {
                **{name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "HF_HUB_OFFLINE")},
                "TANDEM_URL": place.url,
                "TANDEM_KEY": key,
                "TANDEM_MODEL": str(model),
                "OPENAI_API_KEY": key,
                "PATH": f"{interpreter.parent}{os.pathsep}{os.environ.get('PATH', '')}",
                "NO_PROXY": "127.0.0.1",
                "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            }
            process = await asyncio.create_subprocess_exec(*suite.command(place), env=environment, cwd=folder)
            try:
                async with asyncio.timeout(_MOST_S):
                    code = await process.wait()
            finally:
                if process.returncode is None:
                    process.kill()
                    await process.wait()
            await cluster.until_idle()
    return code


def main() -> int:
    """Run the named suites and return 1 if one of them fails."""
    parser = argparse.ArgumentParser(prog="python -m tests.clients", description=__doc__)
    parser.add_argument("name", choices=[*SUITES, "all"])
    parser.add_argument("--python", type=Path, help="an interpreter that has the client, in place of an environment")
    args = parser.parse_args()
    failed = []
    for name in SUITES if args.name == "all" else [args.name]:
        print(f"== {name}", flush=True)
        # Absolute, not resolved: where the link stands says which packages its interpreter has.
        if code := asyncio.run(run(SUITES[name], args.python and args.python.absolute())):
            failed.append(f"{name} (exit code {code})")
    print("not content: " + ", ".join(failed) if failed else "content")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
