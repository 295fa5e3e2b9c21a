"""The limit within one host: one thread copies from pool to pool, both mapped: the ranges, or as much at once."""

import importlib
import time
from collections.abc import Mapping
from typing import Any


class Sender:
    def __init__(self, options: Mapping[str, Any], pools: Mapping[str, Any]) -> None:
        self._is_whole: bool = options["is_whole"]
        self._numpy: Any = importlib.import_module("numpy")
        self._source, self._target = (
            self._numpy.frombuffer(pools[name].view, dtype=self._numpy.uint8) for name in ("source", "target")
        )
        self._pairs: dict[str, list[tuple[Any, Any]]] = {}
        self.about = {"numpy": self._numpy.__version__}

    def connect(self, address: Any) -> None:
        """Do nothing, as there is no other end."""

    def prepare(self, case: Mapping[str, Any], ticket: Any) -> None:
        copies = case["copies"]
        if self._is_whole:
            copies = [(0, 0, sum(length for _, _, length in copies))]
        self._pairs[case["name"]] = [
            (self._target[there : there + length], self._source[here : here + length]) for here, there, length in copies
        ]

    def run(self, name: str) -> float:
        copyto = self._numpy.copyto
        started_s = time.perf_counter()
        for target, source in self._pairs[name]:
            copyto(target, source)
        return time.perf_counter() - started_s
