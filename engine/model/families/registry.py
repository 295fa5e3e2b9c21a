"""The registry of model families: the name in `architectures` of `config.json`, and how that is read."""

from engine.model.config_fields import Fields
from engine.model.families.cohere import COHERE, COHERE2
from engine.model.families.gemma import GEMMA2, GEMMA3
from engine.model.families.glm import GLM, GLM4
from engine.model.families.granite import GRANITE
from engine.model.families.llama import INTERNLM3, LLAMA
from engine.model.families.mistral import MISTRAL, MIXTRAL
from engine.model.families.olmo import OLMO2, OLMO3, OLMOE
from engine.model.families.phi import PHI3
from engine.model.families.qwen import QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE
from engine.model.families.reading import ModelFamily
from engine.model.families.smollm import SMOLLM3
from engine.model.families.stablelm import STABLELM
from engine.model.spec import ModelSpec

FAMILIES: dict[str, ModelFamily] = {
    "LlamaForCausalLM": LLAMA,
    "MistralForCausalLM": MISTRAL,
    "Qwen2ForCausalLM": QWEN2,
    "Qwen3ForCausalLM": QWEN3,
    "Phi3ForCausalLM": PHI3,
    "GraniteForCausalLM": GRANITE,
    "Olmo2ForCausalLM": OLMO2,
    "Olmo3ForCausalLM": OLMO3,
    "SmolLM3ForCausalLM": SMOLLM3,
    "InternLM3ForCausalLM": INTERNLM3,
    "StableLmForCausalLM": STABLELM,
    "GlmForCausalLM": GLM,
    "Glm4ForCausalLM": GLM4,
    "CohereForCausalLM": COHERE,
    "Cohere2ForCausalLM": COHERE2,
    "Gemma2ForCausalLM": GEMMA2,
    "Gemma3ForCausalLM": GEMMA3,
    "MixtralForCausalLM": MIXTRAL,
    "Qwen2MoeForCausalLM": QWEN2_MOE,
    "Qwen3MoeForCausalLM": QWEN3_MOE,
    "OlmoeForCausalLM": OLMOE,
}


def parse_family(fields: Fields) -> ModelSpec:
    """Read `config.json` by its architecture. Raises ConfigError, listing what is supported, for any other."""
    names = fields.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or names[0] not in list(FAMILIES):
        raise fields.error("architectures", f"must be one of {', '.join(FAMILIES)}, is {names!r:.80}")
    family = FAMILIES[names[0]]
    return family.parse(fields, family.defaults)
