"""llama.cpp through its C interface, batched as its server does. Runs in llama.cpp's own environment.

The model is written once as GGUF and quantized by llama.cpp itself; both files are stored next to it in the cache. Only
Qwen3's tensors are known here, which the benchmark's random models have.
"""

import importlib
import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
"""A layer's tensors: Hugging Face's name, GGUF's name."""
_OUTER_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_FILE_TYPES = {
    "bf16": "LLAMA_FTYPE_MOSTLY_BF16",
    "q8_0": "LLAMA_FTYPE_MOSTLY_Q8_0",
    "q4_0": "LLAMA_FTYPE_MOSTLY_Q4_0",
    "q4_k_m": "LLAMA_FTYPE_MOSTLY_Q4_K_M",
}
_BATCH_TOKENS = 2048
"""llama.cpp's default, as are 512 tokens in one computation."""


class Adapter:
    """One context with a sequence for each running prompt."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._llama: Any = importlib.import_module("llama_cpp")
        self._numpy: Any = importlib.import_module("numpy")
        llama = self._llama
        llama.llama_backend_init()
        path = self._quantized(Path(options["model"]), Path(options["converted"]), options["file_type"])
        self._model = llama.llama_model_load_from_file(str(path).encode(), llama.llama_model_default_params())
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {path}")
        params = llama.llama_context_default_params()
        params.n_seq_max = options["max_num_seqs"]
        # A whole number of its cells for each sequence, between which the context is divided.
        params.n_ctx = params.n_seq_max * -(-options["max_model_len"] // 256) * 256
        params.n_batch = _BATCH_TOKENS
        params.n_threads = params.n_threads_batch = options["num_threads"]
        params.no_perf = True
        self._context = llama.llama_init_from_model(self._model, params)
        if not self._context:
            raise RuntimeError("llama.cpp cannot make a context")
        self._memory = llama.llama_get_memory(self._context)
        self._num_ids = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self._model))
        self._batch = llama.llama_batch_init(_BATCH_TOKENS, 0, 1)
        self.about = {"version": llama.__version__, "file_type": options["file_type"], "max_num_batched_tokens": 2048}

    def run(self, prompts: list[list[int]], num_tokens: int, newcomers: list[list[int]]) -> dict[str, Any]:
        waiting = list(newcomers)
        residents = [_Sequence(index, prompt, num_tokens) for index, prompt in enumerate(prompts)]
        running = list(residents)
        newcomer, num_newcomers = None, 0
        started_s = time.perf_counter()
        while any(not one.is_over for one in residents):
            self._step(running, started_s)
            for one in [one for one in running if one.is_over]:
                running.remove(one)
                self._llama.llama_memory_seq_rm(self._memory, one.index, -1, -1)
            if newcomer is not None and newcomer.is_over:
                newcomer, num_newcomers = None, num_newcomers + 1
            if waiting and newcomer is None and all(one.tokens for one in residents):
                newcomer = _Sequence(len(prompts), waiting.pop(), 1)
                running.append(newcomer)
        self._llama.llama_memory_clear(self._memory, False)
        return {
            "arrivals_s": [one.times_s for one in residents],
            "tokens": [one.tokens for one in residents],
            "num_newcomers": num_newcomers,
        }

    def _step(self, running: list["_Sequence"], started_s: float) -> None:
        """Compute the next token of every sequence that decodes, and of prompts as much as fits beside them."""
        batch, size = self._batch, 0
        ends: list[tuple[int, _Sequence]] = []
        for one in sorted(running, key=lambda one: len(one.left)):
            part = one.left[: _BATCH_TOKENS - size]
            one.left = one.left[len(part) :]
            for token in part:
                batch.token[size], batch.pos[size] = token, one.position
                batch.n_seq_id[size], batch.seq_id[size][0] = 1, one.index
                batch.logits[size] = 0
                one.position, size = one.position + 1, size + 1
            if part and not one.left:
                batch.logits[size - 1] = 1
                ends.append((size - 1, one))
        batch.n_tokens = size
        if self._llama.llama_decode(self._context, batch):
            raise RuntimeError("llama.cpp cannot compute a batch")
        chosen = [(one, self._greedy(row)) for row, one in ends]
        now_s = time.perf_counter() - started_s
        for one, token in chosen:
            one.left = [token]
            one.tokens.append(token)
            one.times_s.append(now_s)

    def _greedy(self, row: int) -> int:
        logits = self._llama.llama_get_logits_ith(self._context, row)
        return int(self._numpy.ctypeslib.as_array(logits, shape=(self._num_ids,)).argmax())

    def _quantized(self, model: Path, folder: Path, file_type: str) -> Path:
        """Return the model's file of this type, made on first use."""
        folder.mkdir(parents=True, exist_ok=True)
        plain, path = folder / "bf16.gguf", folder / f"{file_type}.gguf"
        if not plain.exists():
            draft = plain.with_suffix(".draft")
            write_gguf(model, draft)
            draft.replace(plain)
        if not path.exists():
            draft = path.with_suffix(".draft")
            params = self._llama.llama_model_quantize_default_params()
            params.ftype = getattr(self._llama, _FILE_TYPES[file_type])
            if self._llama.llama_model_quantize(str(plain).encode(), str(draft).encode(), params):
                raise RuntimeError(f"llama.cpp cannot write {file_type}")
            draft.replace(path)
        return path

    def close(self) -> None:
        """Do nothing: nothing outlives the process."""


class _Sequence:
    def __init__(self, index: int, prompt: list[int], num_tokens: int) -> None:
        self.index = index
        self.left = list(prompt)
        """Tokens to compute before the next one is known."""
        self.position = 0
        self.tokens: list[int] = []
        self.times_s: list[float] = []
        self._num_tokens = num_tokens

    @property
    def is_over(self) -> bool:
        return len(self.tokens) >= self._num_tokens


def write_gguf(model: Path, path: Path) -> None:
    """Write a checkpoint of a Qwen3 model in bfloat16 as GGUF, without a vocabulary: prompts are token ids."""
    gguf: Any = importlib.import_module("gguf")
    config = json.loads((model / "config.json").read_text())
    if config["model_type"] != "qwen3":
        raise ValueError(f"only Qwen3's tensors are known here, not those of {config['model_type']}")
    writer = gguf.GGUFWriter(str(path), "qwen3")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(_rope_base(config))
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    numpy: Any = importlib.import_module("numpy")
    for name, stored in _tensors(model):
        if stored["dtype"] != "BF16":
            raise ValueError(f"{name} must be in bfloat16, is in {stored['dtype']}")
        codes = numpy.frombuffer(stored["data"], numpy.uint16).reshape(stored["shape"])
        if codes.ndim == 1:
            # Norms are in float32, of which bfloat16 is the upper half.
            writer.add_tensor(_gguf_name(name), (codes.astype(numpy.uint32) << 16).view(numpy.float32))
        else:
            writer.add_tensor(_gguf_name(name), codes.view(numpy.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _rope_base(config: Mapping[str, Any]) -> float:
    return float(config.get("rope_theta") or config["rope_parameters"]["rope_theta"])


def _tensors(model: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    safetensors: Any = importlib.import_module("safetensors")
    for path in sorted(model.glob("*.safetensors")):
        yield from safetensors.deserialize(path.read_bytes())


def _gguf_name(name: str) -> str:
    if name in _OUTER_NAMES:
        return _OUTER_NAMES[name]
    _model, _layers, number, rest = name.split(".", 3)
    return f"blk.{number}.{_NAMES[rest.removesuffix('.weight')]}.weight"
