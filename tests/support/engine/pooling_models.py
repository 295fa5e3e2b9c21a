"""Small random embedding models and rerankers, saved as their users have them, and what transformers makes of texts.

The pooling here is written out once more, as sentence-transformers' documentation states it.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, processors

from tandem.model_path import model_directory
from tests.support.engine.paged_harness import initialise

_MODULES = "sentence_transformers.models."
_SIZES: dict[str, Any] = {
    "vocab_size": 2048,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
PROMPTS = {"query": "Instruct: find what answers it\nQuery: ", "document": ""}
ROLES_TEMPLATE = (
    "{% for m in messages %}{{ '<|user|>' if m['role'] == 'query' else '<|system|>' }}{{ m['content'] }}"
    "{{ '<|end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
"""A template with roles for a query and a document."""
ACTIVATIONS = {"Tanh": torch.tanh, "Identity": lambda values: values}


@dataclass(slots=True, kw_only=True)
class PoolingFiles:
    """What a model's files are to say."""

    modes: Sequence[str] = ("lasttoken",)
    includes_prompt: bool = True
    dense: Sequence[tuple[int, str]] = ()
    """Width and activation of each dense layer."""
    normalizes: bool = True
    prompts: Mapping[str, str] = field(default_factory=lambda: PROMPTS)
    default_prompt_name: str | None = None
    max_seq_length: int | None = 512
    architecture: str = "Qwen3Model"


def save_tokenizer(path: Path, *, ends: bool, template: str | None = None, words: Sequence[str] = ()) -> None:
    """The built-in model's tokenizer. `ends`: its post-processor appends the end token, as Qwen3-Embedding's does;
    `template`: for conversations, None: none; `words`: more tokens, behind the vocabulary.
    """
    source = model_directory("builtin")
    library = Tokenizer.from_str((source / "tokenizer.json").read_text())
    library.add_tokens([AddedToken(word) for word in words])
    if ends:
        library.post_processor = processors.TemplateProcessing(
            single="$A <|end|>", pair="$A $B <|end|>", special_tokens=[("<|end|>", 2)]
        )
    library.save(str(path / "tokenizer.json"))
    config = json.loads((source / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    if template is not None:
        config["chat_template"] = template
    (path / "tokenizer_config.json").write_text(json.dumps(config))


def save_model(path: Path, architecture: str, **changes: Any) -> None:
    """A random decoder, saved as transformers saves it."""
    import transformers

    family = architecture.removesuffix("Model").split("For")[0]
    config = getattr(transformers, f"{family}Config")(**{**_SIZES, "tie_word_embeddings": True, **changes})
    torch.manual_seed(1)
    model = getattr(transformers, architecture)(config).eval()
    initialise(model)
    model.save_pretrained(path)


def save_embedder(path: Path, files: PoolingFiles) -> None:
    """An embedding model with the files of sentence-transformers."""
    path.mkdir(parents=True, exist_ok=True)
    save_tokenizer(path, ends=True)
    save_model(path, files.architecture)
    modules = [("Transformer", ""), ("Pooling", "1_Pooling")]
    size = _SIZES["hidden_size"]
    pooling = {"word_embedding_dimension": size, "include_prompt": files.includes_prompt}
    names = {
        "cls": "cls_token",
        "max": "max_tokens",
        "mean": "mean_tokens",
        "mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    }
    names |= {"weightedmean": "weightedmean_tokens", "lasttoken": "lasttoken"}
    pooling |= {f"pooling_mode_{names[mode]}": mode in files.modes for mode in names}
    _write(path / "1_Pooling" / "config.json", pooling)
    width = size * len(files.modes)
    for number, (out, activation) in enumerate(files.dense, 2):
        folder = f"{number}_Dense"
        where = "linear" if activation == "Identity" else "activation"
        config = {"in_features": width, "out_features": out, "bias": activation != "Identity"}
        _write(
            path / folder / "config.json", config | {"activation_function": f"torch.nn.modules.{where}.{activation}"}
        )
        weights = {"linear.weight": torch.randn(out, width) / width**0.5}
        if config["bias"]:
            weights["linear.bias"] = torch.randn(out) / 8
        save_file(weights, path / folder / "model.safetensors")
        modules.append(("Dense", folder))
        width = out
    if files.normalizes:
        modules.append(("Normalize", f"{len(modules)}_Normalize"))
    _write_modules(path, modules)
    _write(path / "sentence_bert_config.json", {"max_seq_length": files.max_seq_length, "do_lower_case": False})
    prompts = {"prompts": dict(files.prompts), "default_prompt_name": files.default_prompt_name}
    _write(path / "config_sentence_transformers.json", prompts)


def save_judge(path: Path, labels: tuple[int, int] = (300, 301)) -> None:
    """A generative reranker as sentence-transformers saves it."""
    path.mkdir(parents=True, exist_ok=True)
    save_tokenizer(path, ends=False, template=ROLES_TEMPLATE)
    save_model(path, "Qwen3ForCausalLM")
    _write(path / "1_LogitScore" / "config.json", {"true_token_id": labels[0], "false_token_id": labels[1]})
    settings = {"transformer_task": "text-generation", "max_seq_length": 512}
    settings["processing_kwargs"] = {"chat_template": {"add_generation_prompt": True}}
    forward = {"method": "forward", "method_output_name": "logits"}
    settings["module_output_name"] = "causal_logits"
    settings["modality_config"] = {"text": forward, "message": {**forward, "format": "flat"}}
    _write(path / "sentence_bert_config.json", settings)
    _write(path / "config_sentence_transformers.json", {"model_type": "CrossEncoder", "prompts": {}})
    modules = "sentence_transformers.cross_encoder.modules.logit_score."
    _write_modules(path, [("Transformer", ""), ("LogitScore", "1_LogitScore")], {"LogitScore": modules})


def save_classifier(path: Path, num_labels: int = 1) -> None:
    """A decoder with a classification head."""
    path.mkdir(parents=True, exist_ok=True)
    save_tokenizer(path, ends=True)
    save_model(path, "Qwen3ForSequenceClassification", num_labels=num_labels)


def _write(path: Path, content: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content))


def _write_modules(path: Path, modules: Sequence[tuple[str, str]], packages: Mapping[str, str] | None = None) -> None:
    listed = [
        {"idx": i, "name": str(i), "path": folder, "type": (packages or {}).get(kind, _MODULES) + kind}
        for i, (kind, folder) in enumerate(modules)
    ]
    _write(path / "modules.json", listed)


class PoolingOracle:
    """What transformers and the formulas of sentence-transformers say."""

    def __init__(self, path: Path) -> None:
        self._library = Tokenizer.from_file(str(path / "tokenizer.json"))
        self._path = path

    def states(self, ids: Sequence[int]) -> torch.Tensor:
        """Last hidden states behind the final norm, `[num_tokens, hidden_size]`."""
        from transformers import AutoModel

        return _states(AutoModel.from_pretrained(self._path, dtype=torch.float32), ids)

    def encode(self, text: str, pair: str | None = None) -> list[int]:
        """Token ids of a text, with what the post-processor adds."""
        return list(self._library.encode(text, pair).ids)

    def embeddings(self, texts: Sequence[str | Sequence[int]], files: PoolingFiles, prompt: str = "") -> torch.Tensor:
        """Vectors of texts behind a prompt, or of token ids, `[num_texts, size]`."""
        from transformers import AutoModel

        model = AutoModel.from_pretrained(self._path, dtype=torch.float32)
        skipped = 0 if files.includes_prompt or not prompt else len(self.encode(prompt)) - 1
        found = []
        for text in texts:
            ids = self.encode(prompt + text) if isinstance(text, str) else text
            states = _states(model, ids)
            vector = torch.cat([pool(states, mode, skipped if isinstance(text, str) else 0) for mode in files.modes])
            for number, (_, activation) in enumerate(files.dense, 2):
                weights = _weights(self._path / f"{number}_Dense" / "model.safetensors")
                vector = F.linear(vector, weights["linear.weight"], weights.get("linear.bias"))
                vector = ACTIVATIONS[activation](vector)
            found.append(F.normalize(vector, dim=0) if files.normalizes else vector)
        return torch.stack(found)

    @torch.no_grad()
    def judged(self, prompt: str, labels: tuple[int, int] = (300, 301)) -> float:
        """Probability of the first label against the second after a rendered prompt."""
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(self._path, dtype=torch.float32)
        ids = self._library.encode(prompt, add_special_tokens=False).ids
        logits = model(torch.tensor([ids])).logits[0, -1]
        return float(logits[list(labels)].softmax(0)[0])

    @torch.no_grad()
    def classified(self, query: str, document: str) -> float:
        """The head's score of a pair, through a sigmoid."""
        from transformers import AutoModelForSequenceClassification

        model = AutoModelForSequenceClassification.from_pretrained(self._path, dtype=torch.float32)
        return float(model(torch.tensor([self.encode(query, document)])).logits[0, 0].sigmoid())


@torch.no_grad()
def _states(model: Any, ids: Sequence[int]) -> torch.Tensor:
    return model(torch.tensor([list(ids)])).last_hidden_state[0]


def _weights(path: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(path)


def pool(states: torch.Tensor, mode: str, skipped: int = 0) -> torch.Tensor:
    """Pool states, `[num_tokens, hidden_size]`, without the first `skipped`."""
    kept = states[skipped:]
    weights = torch.arange(1, len(states) + 1, dtype=torch.float32)[skipped:, None]
    return {
        "cls": kept[0],
        "lasttoken": kept[-1],
        "max": kept.amax(0),
        "mean": kept.mean(0),
        "mean_sqrt_len_tokens": kept.sum(0) / len(kept) ** 0.5,
        "weightedmean": (kept * weights).sum(0) / weights.sum(),
    }[mode]
