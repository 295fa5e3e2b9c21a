"""What a model's files say of embeddings and relevance: pooling, dense layers, prompts, a classification head.

The files are those of sentence-transformers (https://sbert.net): `modules.json` lists what follows the transformer, a
folder holds each module's configuration and weights, `config_sentence_transformers.json` the prompts. Routers and
workers read them, the router without weights. Whatever would change a vector and is not implemented is refused by name.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from tandem.errors import ConfigError
from tandem.model_files import has_model_file, read_model_file
from tandem.values.pooling import PoolingMode

MODULES = "modules.json"
PROMPTS = "config_sentence_transformers.json"
_TRANSFORMER = "sentence_bert_config.json"
_MAX_BYTES = 1 << 20
_MAX_MODULES = 16
_MAX_PROMPTS = 64
_MAX_PROMPT_CHARS = 8192
_MAX_SIZE = 2**20
_FOLDER = re.compile(r"(?!\.)[A-Za-z0-9_.-]{1,64}")
_PACKAGE = "sentence_transformers."
CLASSIFIER = "ForSequenceClassification"
"""End of the architecture's name of a decoder with a classification head."""


_OLD_KEYS = {
    "pooling_mode_cls_token": PoolingMode.CLS,
    "pooling_mode_max_tokens": PoolingMode.MAX,
    "pooling_mode_mean_tokens": PoolingMode.MEAN,
    "pooling_mode_mean_sqrt_len_tokens": PoolingMode.MEAN_SQRT_LEN,
    "pooling_mode_weightedmean_tokens": PoolingMode.WEIGHTED_MEAN,
    "pooling_mode_lasttoken": PoolingMode.LAST,
}
"""The switches of older files, in the order in which several are concatenated."""
ACTIVATIONS = {
    "torch.nn.modules.linear.Identity": "identity",
    "torch.nn.modules.activation.Tanh": "tanh",
    "torch.nn.modules.activation.Sigmoid": "sigmoid",
    "torch.nn.modules.activation.ReLU": "relu",
    "torch.nn.modules.activation.GELU": "gelu",
    "torch.nn.modules.activation.SiLU": "silu",
}


class PoolingTask(Enum):
    """What a model of this kind is for."""

    EMBED = "embed"
    """Vectors of texts."""
    CLASSIFY = "classify"
    """Relevance by a classification head on the last token's state."""
    JUDGE = "judge"
    """Relevance by the probability of one of two next tokens."""


class JudgeStyle(Enum):
    """The conversation in which a generative reranker judges a pair."""

    ROLES = "roles"
    """The chat template has roles `query` and `document`, as sentence-transformers renders a pair."""
    QWEN3 = "qwen3"
    """The user's turn has instruction, query and document as Qwen3-Reranker's model card says; yes or no follows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseLayer:
    """A linear layer behind the pooling, and its activation."""

    folder: str
    """Folder of its weights, `model.safetensors`."""
    in_features: int
    out_features: int
    has_bias: bool
    activation: str
    has_residual: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingModel:
    """What the files define."""

    task: PoolingTask
    modes: tuple[PoolingMode, ...] = (PoolingMode.LAST,)
    """Several: their vectors are concatenated."""
    pooled_size: int = 0
    """Size of what EMBED pools, before any dense layer."""
    includes_prompt: bool = True
    """Whether the tokens of a prompt in front of the text are pooled, too."""
    dense: tuple[DenseLayer, ...] = ()
    normalizes: bool = False
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt_name: str | None = None
    max_tokens: int | None = None
    """Bound on a text's tokens beside the context; None: none."""
    dimensions: tuple[int, ...] = ()
    """Sizes that the model was trained to be cut to; empty: any."""
    activation: str = "sigmoid"
    """Function of the score of CLASSIFY and JUDGE."""
    num_labels: int = 1
    style: JudgeStyle = JudgeStyle.ROLES
    begins_answer: bool = False
    """Whether the conversation of JUDGE ends with the beginning of the answer."""
    true_token_id: int | None = None
    false_token_id: int | None = None
    """Tokens of JUDGE whose logits are compared; None: those of yes and no."""

    @property
    def size(self) -> int:
        """Size of the vectors of EMBED."""
        return self.dense[-1].out_features if self.dense else self.pooled_size

    @property
    def label_token_ids(self) -> tuple[int, ...]:
        """Tokens of JUDGE: of relevance, and of its absence."""
        return tuple(one for one in (self.true_token_id, self.false_token_id) if one is not None)

    @property
    def has_head(self) -> bool:
        """Whether vectors pass through weights beside the transformer's."""
        return bool(self.dense) or self.task is PoolingTask.CLASSIFY

    @property
    def generates(self) -> bool:
        """Whether the model has an output head, and text can be generated."""
        return self.task is PoolingTask.JUDGE

    def prompt(self, name: str | None, *fallbacks: str) -> str:
        """The prompt called `name`; None: the first of `fallbacks` that exists, else the default. Raises KeyError."""
        if name is not None:
            return self.prompts[name]
        found = next((one for one in fallbacks if one in self.prompts), self.default_prompt_name)
        return "" if found is None else self.prompts[found]


def read_pooling_model(model: Path, reranker: JudgeStyle | None = None) -> PoolingModel | None:
    """Read a model directory. None: its files define neither embeddings nor relevance.

    `reranker`: what an operator says of a model whose files do not tell that it is one.

    Raises ConfigError, naming file and field, for what is damaged or not implemented.
    """
    if not has_model_file(model / "config.json"):
        return None
    config = _read_object(model / "config.json")
    names = config.get("architectures")
    architecture = names[0] if isinstance(names, list) and len(names) == 1 and isinstance(names[0], str) else ""
    if reranker is JudgeStyle.QWEN3:
        if not architecture.endswith("ForCausalLM"):
            raise ConfigError(f"model.reranker: qwen3 needs a model that generates text, not {architecture!r:.80}")
        return PoolingModel(task=PoolingTask.JUDGE, style=reranker, begins_answer=True)
    is_classifier = architecture.endswith(CLASSIFIER)
    if not has_model_file(model / MODULES):
        if architecture.endswith("Model"):
            raise _error(model, f"a {architecture} has no output head, and no {MODULES} says how its states are pooled")
        return _classifier(model, config) if is_classifier else None
    modules = _read_modules(model)
    kinds = [kind for kind, _ in modules]
    if is_classifier and kinds == ["Transformer"]:
        return _classifier(model, config)
    if kinds == ["Transformer", "LogitScore"]:
        return _judge(model, modules[1][1])
    if is_classifier:
        raise _error(model / MODULES, f"a {architecture} must have the Transformer alone, not {', '.join(kinds)}")
    return _embedder(model, config, modules)


def _embedder(model: Path, config: dict[str, Any], modules: Sequence[tuple[str, str]]) -> PoolingModel:
    kinds = [kind for kind, _ in modules]
    num_dense = kinds.count("Dense")
    normalizes = kinds[-1] == "Normalize"
    if kinds != ["Transformer", "Pooling", *["Dense"] * num_dense, *["Normalize"] * normalizes]:
        order = "Transformer, Pooling, then any number of Dense, then Normalize or not"
        raise _error(model / MODULES, f"must be {order}; is {', '.join(kinds)}")
    modes, pooled_size, includes_prompt = _pooling(model / modules[1][1] / "config.json")
    size = pooled_size
    dense = []
    for _, folder in modules[2 : 2 + num_dense]:
        dense.append(_dense(model, folder, size))
        size = dense[-1].out_features
    if normalizes:
        _only_sentence(model / modules[-1][1] / "config.json")
    prompts, default = _prompts(model)
    return PoolingModel(
        task=PoolingTask.EMBED,
        modes=modes,
        pooled_size=pooled_size,
        includes_prompt=includes_prompt,
        dense=tuple(dense),
        normalizes=normalizes,
        prompts=prompts,
        default_prompt_name=default,
        max_tokens=_transformer(model, "feature-extraction"),
        dimensions=_dimensions(model, config, size),
    )


def _classifier(model: Path, config: dict[str, Any]) -> PoolingModel:
    labels, count = config.get("id2label"), config.get("num_labels")
    num_labels = len(labels) if isinstance(labels, dict) else count if count is not None else 2
    if type(num_labels) is not int or not 1 <= num_labels <= _MAX_SIZE:
        raise _error(model / "config.json", f"num_labels must be an integer in [1, {_MAX_SIZE}]")
    own = config.get("sentence_transformers")
    default = "sigmoid" if num_labels == 1 else "identity"
    given = own.get("activation_fn") if isinstance(own, dict) else None
    return PoolingModel(
        task=PoolingTask.CLASSIFY,
        activation=_score_activation(model, given, default),
        num_labels=num_labels,
        max_tokens=_transformer(model, "sequence-classification"),
    )


def _judge(model: Path, folder: str) -> PoolingModel:
    path = model / folder / "config.json"
    score = _read_object(path)
    for name in ("true_token_id", "false_token_id"):
        if type(score.get(name)) is not int or score[name] < 0:
            raise _error(path, f"{name} must be a token id")
    if score.get("module_input_name", "causal_logits") != "causal_logits":
        raise _error(path, "module_input_name must be causal_logits")
    prompts, default = _prompts(model)
    given = _read_object(model / PROMPTS).get("activation_fn") if has_model_file(model / PROMPTS) else None
    return PoolingModel(
        task=PoolingTask.JUDGE,
        prompts=prompts,
        default_prompt_name=default,
        max_tokens=_transformer(model, "text-generation"),
        begins_answer=_begins_answer(model),
        activation=_score_activation(model, given, "sigmoid"),
        true_token_id=score["true_token_id"],
        false_token_id=score["false_token_id"],
    )


def _score_activation(model: Path, given: Any, default: str) -> str:
    found = default if given is None else ACTIVATIONS.get(given) if isinstance(given, str) else None
    if found not in ("sigmoid", "identity"):
        raise _error(model, f"activation_fn of scores must be Sigmoid or Identity, is {given!r:.80}")
    return found


def _read_modules(model: Path) -> list[tuple[str, str]]:
    """Kind and folder of each module, in order."""
    path = model / MODULES
    listed = _parse(path)
    if not isinstance(listed, list) or not 1 <= len(listed) <= _MAX_MODULES:
        raise _error(path, f"must be a list of 1 to {_MAX_MODULES} modules")
    found = []
    for one in sorted(listed, key=lambda one: one.get("idx", 0) if isinstance(one, dict) else 0):
        kind, folder = (one.get("type"), one.get("path")) if isinstance(one, dict) else (None, None)
        if not isinstance(kind, str) or not isinstance(folder, str):
            raise _error(path, "each module must have a type and a path")
        short = kind.rsplit(".", 1)[-1]
        if not kind.startswith(_PACKAGE) or short not in ("Transformer", "Pooling", "Dense", "Normalize", "LogitScore"):
            served = "Transformer, Pooling, Dense, Normalize and LogitScore of sentence-transformers"
            raise _error(path, f"module {kind[:120]!r} is not supported, only {served}")
        if (short == "Transformer") != (folder == "") or (folder and not _FOLDER.fullmatch(folder)):
            bound = "'' for the Transformer, which lies in the directory itself, and the name of a folder in it else"
            raise _error(path, f"path of {short} must be {bound}, is {folder[:80]!r}")
        found.append((short, folder))
    return found


def _pooling(path: Path) -> tuple[tuple[PoolingMode, ...], int, bool]:
    config = _read_object(path)
    given = config.get("pooling_mode")
    if given is None:
        modes = tuple(mode for key, mode in _OLD_KEYS.items() if _boolean(path, config, key, False))
        modes = modes or (PoolingMode.MEAN,)
    else:
        names, known = [given] if isinstance(given, str) else given, {mode.value: mode for mode in PoolingMode}
        if not isinstance(names, list) or not names or any(name not in list(known) for name in names):
            raise _error(path, f"pooling_mode must be of {', '.join(known)}, is {given!r:.80}")
        modes = tuple(known[name] for name in names)
    if len(set(modes)) != len(modes):
        raise _error(path, "pooling_mode names a mode twice")
    size = config.get("embedding_dimension", config.get("word_embedding_dimension"))
    if type(size) is not int or not 1 <= size <= _MAX_SIZE:
        raise _error(path, f"word_embedding_dimension must be an integer in [1, {_MAX_SIZE}]")
    return modes, size * len(modes), _boolean(path, config, "include_prompt", True)


def _dense(model: Path, folder: str, size: int) -> DenseLayer:
    path = model / folder / "config.json"
    config = _read_object(path)
    wide = config.get("out_features")
    if config.get("in_features") != size or type(wide) is not int or not 1 <= wide <= _MAX_SIZE:
        bound = f"in_features must be {size}, what is before it has, and out_features in [1, {_MAX_SIZE}]"
        raise _error(path, bound)
    activation = config.get("activation_function", "torch.nn.modules.activation.Tanh")
    if activation not in list(ACTIVATIONS):
        raise _error(path, f"activation_function must be one of {', '.join(ACTIVATIONS)}, is {activation!r:.80}")
    _only_sentence(path)
    return DenseLayer(
        folder=folder,
        in_features=size,
        out_features=wide,
        has_bias=_boolean(path, config, "bias", True),
        activation=ACTIVATIONS[activation],
        has_residual=_boolean(path, config, "use_residual", False),
    )


def _only_sentence(path: Path) -> None:
    """Refuse a module that reads or writes something else than the text's one vector."""
    if not has_model_file(path):
        return
    config = _read_object(path)
    for name in ("module_input_name", "module_output_name"):
        if config.get(name) not in (None, "sentence_embedding"):
            raise _error(path, f"{name} must be sentence_embedding, is {config[name]!r:.80}")


def _transformer(model: Path, task: str) -> int | None:
    """Check the transformer's own file; return its bound on tokens."""
    path = model / _TRANSFORMER
    if not has_model_file(path):
        return None
    config = _read_object(path)
    if config.get("transformer_task", task) != task:
        raise _error(path, f"transformer_task must be {task}, is {config['transformer_task']!r:.40}")
    if _boolean(path, config, "do_lower_case", False):
        raise _error(path, "do_lower_case is not supported")
    if config.get("query_expansion"):
        raise _error(path, "query_expansion is not supported")
    given = config.get("processing_kwargs") or {}
    allowed = {"chat_template": {"add_generation_prompt": True}} if task == "text-generation" else {}
    if given not in ({}, allowed):
        raise _error(path, f"processing_kwargs must be {json.dumps(allowed)}, is {given!r:.80}")
    if task == "text-generation":
        _only_messages(path, config)
    most = config.get("max_seq_length")
    if most is not None and (type(most) is not int or most < 1):
        raise _error(path, "max_seq_length must be a positive integer or null")
    return most


def _only_messages(path: Path, config: dict[str, Any]) -> None:
    """Refuse a reranker that does not see query and document through its template: without `message`, sentence-
    transformers joins the two texts.
    """
    modalities = config.get("modality_config")
    message = modalities.get("message") if isinstance(modalities, dict) else None
    if not isinstance(message, dict) or message.get("format", "flat") != "flat":
        raise _error(path, f"modality_config must have message in the format flat, is {modalities!r:.120}")


def _begins_answer(model: Path) -> bool:
    path = model / _TRANSFORMER
    return has_model_file(path) and bool(_read_object(path).get("processing_kwargs"))


def _prompts(model: Path) -> tuple[dict[str, str], str | None]:
    path = model / PROMPTS
    config = _read_object(path) if has_model_file(path) else {}
    given, default = config.get("prompts") or {}, config.get("default_prompt_name")
    if not isinstance(given, dict) or len(given) > _MAX_PROMPTS:
        raise _error(path, f"prompts must be an object of at most {_MAX_PROMPTS} texts")
    prompts = {name: "" if text is None else text for name, text in given.items()}
    if not all(isinstance(text, str) and len(text) <= _MAX_PROMPT_CHARS for text in prompts.values()):
        raise _error(path, f"prompts must be texts of at most {_MAX_PROMPT_CHARS} characters")
    if default is not None and default not in list(prompts):
        raise _error(path, f"default_prompt_name {default!r:.80} is not one of its prompts")
    return prompts, default


def _dimensions(model: Path, config: dict[str, Any], size: int) -> tuple[int, ...]:
    given = config.get("matryoshka_dimensions")
    if given is None:
        return ()
    if not isinstance(given, list) or not all(type(one) is int and 1 <= one <= size for one in given):
        raise _error(model / "config.json", f"matryoshka_dimensions must be integers in [1, {size}]")
    return tuple(sorted(given))


def _boolean(path: Path, config: dict[str, Any], name: str, default: bool) -> bool:
    value = config.get(name, default)
    if not isinstance(value, bool):
        raise _error(path, f"{name} must be true or false, is {value!r:.40}")
    return value


def _read_object(path: Path) -> dict[str, Any]:
    found = _parse(path)
    if not isinstance(found, dict):
        raise _error(path, "must be a JSON object")
    return found


def _parse(path: Path) -> Any:
    text = read_model_file(path, max_bytes=_MAX_BYTES if path.name != "config.json" else 64 * _MAX_BYTES)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _error(path, f"is not valid JSON: {type(error).__name__}") from None


def _error(path: Path, problem: str) -> ConfigError:
    return ConfigError(f"{path}: {problem}")
