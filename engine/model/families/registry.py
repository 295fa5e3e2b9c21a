"""The registry of model families: the name in `architectures` of `config.json`, and how that is read."""

from engine.model.config_fields import Fields
from engine.model.families.llama import INTERNLM3, LLAMA
from engine.model.families.mistral import MISTRAL
from engine.model.families.qwen import QWEN2, QWEN3
from engine.model.families.reading import ModelFamily
from engine.model.spec import ModelSpec

FAMILIES: dict[str, ModelFamily] = {
    "LlamaForCausalLM": LLAMA,
    "MistralForCausalLM": MISTRAL,
    "Qwen2ForCausalLM": QWEN2,
    "Qwen3ForCausalLM": QWEN3,
    "InternLM3ForCausalLM": INTERNLM3,
}


def parse_family(fields: Fields) -> ModelSpec:
    """Read `config.json` by its architecture. Raises ConfigError, listing what is supported, for any other."""
    names = fields.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or names[0] not in list(FAMILIES):
        raise fields.error("architectures", f"must be one of {', '.join(FAMILIES)}, is {names!r:.80}")
    family = FAMILIES[names[0]]
    return family.parse(fields, family.defaults)
