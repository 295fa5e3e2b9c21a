"""Checksum functions side by side: the standard library's, ISA-L's, Google's CRC-32C, xxHash's XXH3."""

import importlib
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from typing import Any

_SPAN_BYTES = 128 << 20
_REPEATS = 5


class Sender:
    """Measures alone; `run` returns its results instead of seconds."""

    def __init__(self, options: Mapping[str, Any], _pools: Mapping[str, Any]) -> None:
        self._numpy: Any = importlib.import_module("numpy")
        self._piece_kib: list[int] = options["piece_kib"]
        crc32c: Callable[[bytes], int] = importlib.import_module("google_crc32c").value
        self._functions: dict[str, Callable[[Any], Any]] = {
            "zlib_crc32": zlib.crc32,
            "isal_crc32": importlib.import_module("isal.isal_zlib").crc32,
            # It accepts only bytes, so a view has to be copied for it first.
            "google_crc32c": lambda view: crc32c(bytes(view)),
            "xxh3_64": importlib.import_module("xxhash").xxh3_64_intdigest,
        }
        self.about: dict[str, Any] = {}

    def run(self, name: str) -> list[dict[str, Any]]:
        """Run interleaved repeats, best of each; the two CRC-32 functions must agree."""
        source = self._numpy.random.default_rng(0).integers(0, 256, _SPAN_BYTES, dtype=self._numpy.uint8)
        target = source.copy()
        sample = source[: 1 << 20].tobytes()
        if self._functions["zlib_crc32"](sample) != self._functions["isal_crc32"](sample):
            raise RuntimeError("isal's CRC-32 is not zlib's")
        blocked = {
            key: min(_blocked_share(function, source.data) for _ in range(_REPEATS))
            for key, function in self._functions.items()
        }
        found = []
        for kib in self._piece_kib:
            size = kib << 10
            pieces = [slice(i, i + size) for i in range(0, _SPAN_BYTES, size)]
            best: dict[str, list[float]] = {key: [float("inf")] * 2 for key in self._functions}
            copy_s = float("inf")
            for _ in range(_REPEATS):
                copy_s = min(copy_s, self._copy_s(source, target, pieces, None))
                for key, function in self._functions.items():
                    seen = (
                        _hot_s(function, memoryview(sample)[:size], len(pieces)),
                        self._copy_s(source, target, pieces, function),
                    )
                    best[key] = [min(pair) for pair in zip(best[key], seen, strict=True)]
            for key, (hot_s, copied_s) in best.items():
                found.append(
                    {
                        "name": key,
                        "kib": kib,
                        "hot": _SPAN_BYTES / hot_s,
                        "cost_percent": 100 * (copied_s / copy_s - 1),
                        "blocked_percent": 100 * blocked[key],
                    }
                )
        return found

    def _copy_s(self, source: Any, target: Any, pieces: list[slice], function: Callable[[Any], Any] | None) -> float:
        copyto = self._numpy.copyto
        started_s = time.perf_counter()
        for piece in pieces:
            copyto(target[piece], source[piece])
            if function is not None:
                function(source[piece].data)
        return time.perf_counter() - started_s


def _hot_s(function: Callable[[Any], Any], piece: memoryview, count: int) -> float:
    started_s = time.perf_counter()
    for _ in range(count):
        function(piece)
    return time.perf_counter() - started_s


def _blocked_share(function: Callable[[Any], Any], view: memoryview) -> float:
    """Return the longest time no other thread ran, over the time of one long call: 1 if the GIL is held."""
    ended = threading.Event()
    gaps: list[float] = []

    def watch() -> None:
        last_s = time.perf_counter()
        longest_s = 0.0
        while not ended.is_set():
            now_s = time.perf_counter()
            longest_s = max(longest_s, now_s - last_s)
            last_s = now_s
        gaps.append(longest_s)

    watcher = threading.Thread(target=watch)
    watcher.start()
    started_s = time.perf_counter()
    function(view)
    took_s = time.perf_counter() - started_s
    ended.set()
    watcher.join()
    return min(1.0, gaps[0] / took_s)
