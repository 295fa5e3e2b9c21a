"""The registry of model families: the name in `architectures` of `config.json`, and how that is read."""

from dataclasses import replace

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
from tandem.pooling_model import CLASSIFIER

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


_CAUSAL = "ForCausalLM"
_OTHERS = ("TextModel", "Model", CLASSIFIER)
"""Ends of the names of the same decoders without an output head: bare, as embedding models are saved, or with a
classification head."""


def has_output_head(architecture: str) -> bool:
    """Whether a model of this architecture gives logits of tokens."""
    return architecture.endswith(_CAUSAL)


def parse_family(fields: Fields) -> ModelSpec:
    """Read `config.json` by its architecture. Raises ConfigError, listing what is supported, for any other, and for
    decoders that attend to later tokens.
    """
    names = fields.get("architectures")
    family = family_of(names[0]) if isinstance(names, list) and len(names) == 1 else None
    if family is None:
        raise fields.error("architectures", f"must be one of {', '.join(FAMILIES)}, is {names!r:.80}")
    # Decoders that were trained to be encoders: their layers are the same, but their attention is not causal.
    fields.only("is_causal", True)
    fields.only("use_bidirectional_attention", False)
    spec = family.parse(fields, family.defaults)
    return spec if has_output_head(spec.architecture) else replace(spec, tie_embeddings=True)


def family_of(architecture: object) -> ModelFamily | None:
    """The family of an architecture by its name, with whatever head; None where it is not supported."""
    if not isinstance(architecture, str):
        return None
    end = next((end for end in _OTHERS if architecture.endswith(end)), _CAUSAL)
    return FAMILIES.get(architecture.removesuffix(end) + _CAUSAL)
