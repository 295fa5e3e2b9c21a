"""vLLM for CPUs: its engine stepped in this process, without IPC. Runs in vLLM's own environment.

The caller (`contestants.py`) sets what vLLM's documentation advises for CPUs: the OpenMP runtime preloaded, threads
bound to cores, a fixed KV space.
"""

import importlib
import time
from typing import Any


class Adapter:
    """One `LLMEngine`; prompts are token ids and no tokenizer is loaded."""

    def __init__(self, options: dict[str, Any]) -> None:
        library: Any = importlib.import_module("vllm")
        arguments = importlib.import_module("vllm.engine.arg_utils").EngineArgs(
            model=options["model"],
            dtype=options["dtype"],
            skip_tokenizer_init=True,
            max_model_len=options["max_model_len"],
            max_num_seqs=max(options["max_num_seqs"], 8),
            disable_log_stats=True,
        )
        self._engine = importlib.import_module("vllm.v1.engine.llm_engine").LLMEngine.from_engine_args(arguments)
        self._params = library.SamplingParams
        self._next_id = 0
        self.about = {
            "version": library.__version__,
            "max_num_batched_tokens": self._engine.vllm_config.scheduler_config.max_num_batched_tokens,
        }

    def run(self, prompts: list[list[int]], num_tokens: int, newcomers: list[list[int]]) -> dict[str, Any]:
        waiting = list(newcomers)
        started_s = time.perf_counter()
        residents = [self._add(prompt, num_tokens) for prompt in prompts]
        times: dict[str, list[float]] = {name: [] for name in residents}
        tokens: dict[str, list[int]] = {name: [] for name in residents}
        newcomer, num_newcomers = "", 0
        while any(len(times[name]) < num_tokens for name in residents):
            outputs = self._engine.step()
            now_s = time.perf_counter() - started_s
            for output in outputs:
                name = output.request_id.split("-")[0]
                if name in times:
                    new = output.outputs[0].token_ids[len(tokens[name]) :]
                    tokens[name] += new
                    times[name] += [now_s] * len(new)
                elif output.finished:
                    newcomer, num_newcomers = "", num_newcomers + 1
            if waiting and not newcomer and all(times.values()):
                newcomer = self._add(waiting.pop(), 1)
        while self._engine.has_unfinished_requests():
            self._engine.step()
        return {
            "arrivals_s": [times[name] for name in residents],
            "tokens": [tokens[name] for name in residents],
            "num_newcomers": num_newcomers,
        }

    def _add(self, prompt: list[int], num_tokens: int) -> str:
        self._next_id += 1
        name = f"r{self._next_id}"
        params = self._params(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        self._engine.add_request(name, {"prompt_token_ids": prompt}, params)
        return name

    def close(self) -> None:
        """Do nothing: nothing outlives the process."""
