"""The process around one measured engine: JSON lines in, JSON lines out. Standard library only.

It runs in the engine's own environment, where nothing of Tandem is installed, so it is started by its path (`python -P
tandem_bench/peers/host.py`) and loads the engine's adapter by path, too. The first input line has the adapter's file
and its options; the first output line says that the engine is ready. Each further input line is a job, each answer one
line; the end of the input ends the process. What the engine prints goes to standard error.
"""

import importlib.util
import json
import os
import sys
import time
import traceback
from collections.abc import Mapping
from typing import Any, Protocol


class Adapter(Protocol):
    """Class that each `on_*.py` in this folder defines as `Adapter`, constructed with the options."""

    about: Mapping[str, Any]
    """Versions and settings, for the report."""

    def run(self, prompts: list[list[int]], num_tokens: int, newcomers: list[list[int]]) -> dict[str, Any]:
        """Generate `num_tokens` greedily after each prompt, all submitted at once, ignoring end tokens.

        With `newcomers`, those come one after another, each for one token, from the moment when all of `prompts` have
        their first token until all have their last. Returns `arrivals_s`: for each prompt the times of its tokens, in
        seconds since the call; `num_newcomers` served; and any further figures of the engine.
        """
        ...

    def close(self) -> None:
        """Release what would otherwise outlive the process."""
        ...


def main() -> int:
    """Serve jobs until the input ends; return 1 after reporting a failure of the engine."""
    # Libraries print freely: keep the channel of the answers separate.
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def reply(message: Mapping[str, Any]) -> None:
        replies.write(json.dumps(message) + "\n")
        replies.flush()

    try:
        options = json.loads(sys.stdin.readline())
        started_s = time.monotonic()
        adapter = _load(options["file"])(options)
        reply({"about": dict(adapter.about), "load_s": time.monotonic() - started_s})
        for line in sys.stdin:
            job = json.loads(line)
            reply(adapter.run(job["prompts"], job["num_tokens"], job["newcomers"]))
        adapter.close()
    except Exception as error:  # noqa: BLE001  # the process's outermost frame: the parent must be notified
        traceback.print_exc()
        reply({"error": f"{type(error).__name__}: {error}"[:500]})
        return 1
    return 0


def _load(file: str) -> type[Any]:
    spec = importlib.util.spec_from_file_location("adapter", file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is not a module")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    adapter: type[Any] = module.Adapter
    return adapter


if __name__ == "__main__":
    sys.exit(main())
