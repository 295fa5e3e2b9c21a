"""What a model directory says of embeddings and relevance is read whole, or refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest

from tandem.errors import ConfigError
from tandem.pooling_model import JudgeStyle, PoolingTask, read_pooling_model
from tandem.values.pooling import PoolingMode

TRANSFORMER, POOLING, NORMALIZE = ("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")
LAST = {"word_embedding_dimension": 8, "pooling_mode_lasttoken": True}


def write(path: Path, name: str, content: Any) -> None:
    file = path / name
    file.parent.mkdir(exist_ok=True)
    file.write_text(content if isinstance(content, str) else json.dumps(content))


def model(path: Path, *modules: tuple[str, str], architecture: str = "Qwen3ForCausalLM", **files: Any) -> Path:
    """A directory; `files` by their names without `.json`, with `__` for a slash."""
    write(path, "config.json", {"architectures": [architecture], **files.pop("config", {})})
    if modules:
        listed = [
            {"idx": i, "name": str(i), "path": folder, "type": f"sentence_transformers.models.{kind}"}
            for i, (folder, kind) in enumerate(modules)
        ]
        write(path, "modules.json", listed)
    for name, content in files.items():
        write(path, name.replace("__", "/").replace("p1", "1_Pooling") + ".json", content)
    return path


def embedder(path: Path, *more: tuple[str, str], **files: Any) -> Path:
    return model(path, TRANSFORMER, POOLING, *more, **{"p1__config": LAST, **files})


def test_pooling_model_plain_model_defines_nothing(tmp_path: Path) -> None:
    assert read_pooling_model(model(tmp_path)) is None
    assert read_pooling_model(tmp_path / "none") is None


def test_pooling_model_reads_every_file(tmp_path: Path) -> None:
    dense = {
        "in_features": 16,
        "out_features": 4,
        "bias": False,
        "activation_function": "torch.nn.modules.linear.Identity",
    }
    found = read_pooling_model(
        embedder(
            tmp_path,
            ("2_Dense", "Dense"),
            ("3_Normalize", "Normalize"),
            **{"2_Dense__config": dense},
            p1__config={"word_embedding_dimension": 8, "pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}
            | {"include_prompt": False},
            config_sentence_transformers={"prompts": {"query": "q: ", "empty": None}, "default_prompt_name": "query"},
            sentence_bert_config={"max_seq_length": 77, "do_lower_case": False},
            config={"matryoshka_dimensions": [4, 2]},
        )
    )
    assert found is not None
    assert (found.task, found.modes) == (PoolingTask.EMBED, (PoolingMode.CLS, PoolingMode.MEAN))
    assert (found.pooled_size, found.size, found.dimensions, found.max_tokens) == (16, 4, (2, 4), 77)
    assert (found.normalizes, found.includes_prompt, found.has_head, found.generates) == (True, False, True, False)
    assert (found.prompt(None), found.prompt("empty"), found.prompt(None, "empty")) == ("q: ", "", "")
    with pytest.raises(KeyError):
        found.prompt("other")


@pytest.mark.parametrize("mode", PoolingMode)
def test_pooling_model_new_name_of_mode_is_read(tmp_path: Path, mode: PoolingMode) -> None:
    found = read_pooling_model(embedder(tmp_path, p1__config={"embedding_dimension": 8, "pooling_mode": mode.value}))
    assert found is not None
    assert (found.modes, found.normalizes, found.has_head) == ((mode,), False, False)


def test_pooling_model_classifier_has_labels_and_activation(tmp_path: Path) -> None:
    config: dict[str, Any] = {"id2label": {"0": "relevant"}}
    found = read_pooling_model(model(tmp_path, architecture="LlamaForSequenceClassification", config=config))
    assert found is not None
    assert (found.task, found.num_labels, found.activation) == (PoolingTask.CLASSIFY, 1, "sigmoid")
    config["sentence_transformers"] = {"activation_fn": "torch.nn.modules.linear.Identity"}
    found = read_pooling_model(model(tmp_path, TRANSFORMER, architecture="X2ForSequenceClassification", config=config))
    assert found is not None
    assert (found.activation, found.has_head, found.generates) == ("identity", True, False)


def judge(path: Path, modality_config: Any) -> Path:
    return model(
        path,
        TRANSFORMER,
        ("1_LogitScore", "LogitScore"),
        **{"1_LogitScore__config": {"true_token_id": 7, "false_token_id": 3}},
        sentence_bert_config={
            "transformer_task": "text-generation",
            "processing_kwargs": {"chat_template": {"add_generation_prompt": True}},
            "modality_config": modality_config,
        },
    )


def test_pooling_model_judge_has_labels_and_style(tmp_path: Path) -> None:
    found = read_pooling_model(judge(tmp_path, {"message": {"method": "forward", "format": "flat"}}))
    assert found is not None
    assert (found.task, found.label_token_ids, found.begins_answer) == (PoolingTask.JUDGE, (7, 3), True)
    assert (found.generates, found.style, found.activation) == (True, JudgeStyle.ROLES, "sigmoid")


@pytest.mark.parametrize("modalities", [None, {"text": {}}, {"message": {"format": "structured"}}, []], ids=str)
def test_pooling_model_judge_that_sees_no_template_is_refused(tmp_path: Path, modalities: Any) -> None:
    with pytest.raises(ConfigError, match=r"modality_config must have message in the format flat, is "):
        read_pooling_model(judge(tmp_path, modalities))


def test_pooling_model_qwen3_is_what_the_operator_says(tmp_path: Path) -> None:
    found = read_pooling_model(model(tmp_path), JudgeStyle.QWEN3)
    assert found is not None
    assert (found.task, found.style, found.label_token_ids) == (PoolingTask.JUDGE, JudgeStyle.QWEN3, ())
    with pytest.raises(ConfigError, match=r"model.reranker: qwen3 needs a model that generates text"):
        read_pooling_model(model(tmp_path, architecture="Qwen3Model"), JudgeStyle.QWEN3)


@pytest.mark.parametrize(
    ("files", "match"),
    [
        ({"modules": "[{"}, "modules.json: is not valid JSON"),
        ({"modules": {}}, "must be a list of 1 to 16 modules"),
        ({"modules": [{"type": "x"}]}, "must have a type and a path"),
        ({"modules": [{"type": "custom.Pooling", "path": ""}]}, "module 'custom.Pooling' is not supported"),
        ({"modules": [{"type": "sentence_transformers.models.CNN", "path": "1_CNN"}]}, "CNN' is not supported"),
        ({"modules": [{"type": "sentence_transformers.models.Pooling", "path": "../x"}]}, "path of Pooling must be"),
        ({"modules": [{"type": "sentence_transformers.models.Transformer", "path": "0_T"}]}, "path of Transformer"),
        ({"modules": [{"type": "sentence_transformers.models.Transformer", "path": ""}]}, "must be Transformer, Pool"),
        ({"p1__config": {"pooling_mode": "best", "embedding_dimension": 8}}, "pooling_mode must be of cls"),
        ({"p1__config": {"pooling_mode": ["cls", "cls"], "embedding_dimension": 8}}, "names a mode twice"),
        ({"p1__config": {"pooling_mode_lasttoken": True}}, "word_embedding_dimension must be an integer"),
        ({"p1__config": {**LAST, "include_prompt": 1}}, "include_prompt must be true or false"),
        ({"sentence_bert_config": {"max_seq_length": 0}}, "max_seq_length must be a positive integer"),
        ({"sentence_bert_config": {"do_lower_case": True}}, "do_lower_case is not supported"),
        ({"sentence_bert_config": {"transformer_task": "fill-mask"}}, "transformer_task must be feature-extraction"),
        ({"sentence_bert_config": {"processing_kwargs": {"text": {}}}}, "processing_kwargs must be {}"),
        ({"sentence_bert_config": {"query_expansion": {"length": 9}}}, "query_expansion is not supported"),
        ({"config_sentence_transformers": {"prompts": {"a": 5}}}, "prompts must be texts of at most 8192"),
        ({"config_sentence_transformers": {"prompts": {"a": "x" * 8193}}}, "prompts must be texts of at most 8192"),
        ({"config_sentence_transformers": {"default_prompt_name": "a"}}, "default_prompt_name 'a' is not one"),
        ({"config": {"matryoshka_dimensions": [9]}}, r"matryoshka_dimensions must be integers in \[1, 8\]"),
    ],
)
def test_pooling_model_wrong_file_is_refused_by_name(tmp_path: Path, files: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        read_pooling_model(embedder(tmp_path, **files))


@pytest.mark.parametrize(
    ("dense", "match"),
    [
        ({"in_features": 9, "out_features": 4}, "in_features must be 8"),
        ({"in_features": 8, "out_features": 0}, "out_features in"),
        (
            {"in_features": 8, "out_features": 4, "activation_function": "os.system"},
            "activation_function must be one of",
        ),
        ({"in_features": 8, "out_features": 4, "module_input_name": "token_embeddings"}, "must be sentence_embedding"),
    ],
)
def test_pooling_model_wrong_dense_layer_is_refused_by_name(tmp_path: Path, dense: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        read_pooling_model(embedder(tmp_path, ("2_Dense", "Dense"), **{"2_Dense__config": dense}))


def test_pooling_model_headless_decoder_without_modules_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"a Qwen3Model has no output head, and no modules.json says how"):
        read_pooling_model(model(tmp_path, architecture="Qwen3Model"))


def test_pooling_model_order_of_modules_is_kept(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is Transformer, Pooling, Normalize, Dense"):
        read_pooling_model(embedder(tmp_path, NORMALIZE, ("3_Dense", "Dense")))
