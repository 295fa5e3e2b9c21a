"""A model's architecture from `config.json` and `generation_config.json`, checked and normalised.

Defaults for absent fields are those of transformers. What depends on the architecture is in `engine.model.families`.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from engine.model.config_fields import Fields
from engine.model.families.registry import parse_family
from engine.model.files import ModelDirectory
from engine.model.spec import ModelSpec
from tandem.errors import ConfigError
from tandem.pooling_model import read_pooling_model

_MAX_EOS = 64
_STORED_DTYPES = ("float32", "bfloat16", "float16")


def load_model_config(path: str | Path) -> ModelSpec:
    """Read a model directory's configuration, or a GGUF file's.

    Raises ConfigError, naming file and field, for anything unsupported, out of bounds or contradictory.
    """
    directory = ModelDirectory(path)
    raw = directory.read_json("config.json")
    generation = directory.read_json("generation_config.json") if directory.has("generation_config.json") else {}
    config = parse_model_config(raw, generation)
    pooling = read_pooling_model(directory.root)
    if pooling is not None and not pooling.generates:
        config = replace(config, tie_embeddings=True)  # such checkpoints seldom have an output head, and need none
    if (gguf := directory.gguf_path()) is None:
        return config
    if config.weight_format is not None:
        raise ConfigError(f"config.json: quantization_config cannot describe {gguf.name}, which has its own types")
    return replace(config, weight_format=f"GGUF ({gguf.name})")


def parse_model_config(raw: dict[str, Any], generation: dict[str, Any]) -> ModelSpec:
    """Check and normalise the two JSON objects of a model directory."""
    fields = Fields(raw, "config.json")
    model = parse_family(fields)
    return replace(
        model,
        stored_dtype=_stored_dtype(fields),
        eos_token_ids=_eos_token_ids(fields, Fields(generation, "generation_config.json"), model.vocab_size),
        weight_format=_weight_format(fields),
    )


def _weight_format(fields: Fields) -> str | None:
    if fields.has("quip_params"):
        # No document describes the layout, and its authors' program needs CUDA: there is nothing to test a reader by.
        raise fields.error("quip_params", "says that weights are stored as QuIP#, which is not read")
    if not fields.has("quantization_config"):
        return None
    # Imported late: it loads torch, which `tandem up` seldom needs.
    from engine.model.checkpoints.registry import parse_format

    found = parse_format(fields.get("quantization_config"))
    return None if found is None else found.description


def _stored_dtype(fields: Fields) -> str | None:
    name = fields.get("dtype") or fields.get("torch_dtype")
    if name is None:
        return None
    if name not in _STORED_DTYPES:
        raise fields.error("dtype", f"must be one of {', '.join(_STORED_DTYPES)}, is {name!r:.40}")
    return str(name)


def _eos_token_ids(config: Fields, generation: Fields, vocab_size: int) -> tuple[int, ...]:
    """End tokens; generation_config.json's take precedence, since instruction-tuned models often add some only
    there.
    """
    found: set[int] = set()
    for fields in (config, generation):
        if (value := fields.get("eos_token_id")) is None:
            continue
        ids = value if isinstance(value, list) else [value]
        valid = all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i < vocab_size for i in ids)
        if not valid or len(ids) > _MAX_EOS:
            bound = f"at most {_MAX_EOS} token ids below vocab_size {vocab_size}"
            raise fields.error("eos_token_id", f"must be {bound}, is {value!r:.40}")
        found = set(ids)
    return tuple(sorted(found))
