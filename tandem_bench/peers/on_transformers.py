"""transformers: one static batch through `generate`, as its users batch. Runs in transformers' own environment."""

import importlib
import time
from typing import Any


class Adapter:
    """Model as `from_pretrained` loads it: SDPA attention, dynamic cache, torch's CPU operators."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._torch: Any = importlib.import_module("torch")
        library: Any = importlib.import_module("transformers")
        self._torch.set_num_threads(options["num_threads"])
        dtype = getattr(self._torch, options["dtype"])
        self._model = library.AutoModelForCausalLM.from_pretrained(options["model"], dtype=dtype).eval()
        # End tokens are treated like any other token.
        self._model.generation_config.eos_token_id = None
        self._model.generation_config.pad_token_id = 0
        self.about = {
            "version": library.__version__,
            "torch": self._torch.__version__,
            "attention": self._model.config._attn_implementation,
        }

    def run(self, prompts: list[list[int]], num_tokens: int, newcomers: list[list[int]]) -> dict[str, Any]:
        """Run a job as host.Adapter does. Prompts must be equally long; newcomers cannot join a running batch."""
        if newcomers:
            raise ValueError("a batch of transformers is closed: no request can join it")
        times: list[float] = []
        started_s = time.perf_counter()

        def note(_ids: Any, _scores: Any, **_: Any) -> Any:
            times.append(time.perf_counter() - started_s)
            return self._torch.zeros(len(prompts), dtype=self._torch.bool)

        ids = self._torch.tensor(prompts)
        with self._torch.inference_mode():
            out = self._model.generate(
                ids,
                attention_mask=self._torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=num_tokens,
                stopping_criteria=[note],
            )
        tokens = out[:, ids.shape[1] :].tolist()
        return {"arrivals_s": [times] * len(prompts), "tokens": tokens, "num_newcomers": 0}

    def close(self) -> None:
        """Do nothing: nothing outlives the process."""
