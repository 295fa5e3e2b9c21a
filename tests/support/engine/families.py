"""Small random models of every family that the registry has, made with transformers."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.support.engine.paged_harness import initialise

_SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


@dataclass(frozen=True, slots=True)
class FamilyCase:
    """One model of a family."""

    name: str
    architecture: str
    """The name in transformers."""
    changes: dict[str, Any] = field(default_factory=dict)
    saved: dict[str, Any] = field(default_factory=dict)
    """Changes of the configuration that is saved, for models that transformers does not have."""
    norms_around: float = 1.0
    """Mean of the weights of norms as they are stored."""

    layers: int | None = None
    """The least number of layers that have every kind of the model's; None: two."""

    @property
    def served_as(self) -> str:
        """The architecture that the saved model says."""
        return self.saved.get("architectures", [self.architecture])[0]

    @property
    def has_experts(self) -> bool:
        """Whether some layers are mixtures of experts."""
        return "num_experts_per_tok" in self.changes

    def model(self, seed: int = 0, **sizes: Any) -> Any:
        """The model in transformers, with weights large enough that mistakes show."""
        import transformers

        config = getattr(
            transformers, self.architecture.replace("ForCausalLM", "") + _CONFIG.get(self.architecture, "Config")
        )
        values = {**_SIZES, **self.changes, **sizes}
        torch.manual_seed(seed)
        model = getattr(transformers, self.architecture)(config(**values, attn_implementation="eager")).eval()
        initialise(model, norms_around=self.norms_around)
        return model

    def save(self, model: Any, path: Path) -> None:
        """Save it as a directory that users have."""
        model.save_pretrained(path)
        if self.saved:
            file = path / "config.json"
            file.write_text(json.dumps({**json.loads(file.read_text()), **self.saved}))


_CONFIG = {"Gemma3ForCausalLM": "TextConfig"}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.3, 1.4, 1.6, 2.0],
    "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 7.0],
    "original_max_position_embeddings": 64,
}
FAMILY_CASES = (
    FamilyCase("phi3", "Phi3ForCausalLM", {"sliding_window": 7}),
    FamilyCase("phi4-mini", "Phi3ForCausalLM", {"rope_parameters": _LONGROPE, "original_max_position_embeddings": 64}),
    FamilyCase(
        "granite",
        "GraniteForCausalLM",
        {
            "embedding_multiplier": 6.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.1,
            "logits_scaling": 4.0,
            "attention_bias": True,
        },
    ),
    FamilyCase("olmo2", "Olmo2ForCausalLM", {"attention_bias": True}),
    FamilyCase("olmo3", "Olmo3ForCausalLM", {"sliding_window": 9}, layers=4),
    FamilyCase("smollm3", "SmolLM3ForCausalLM", {"tie_word_embeddings": True}, layers=4),
    FamilyCase(
        "internlm3",
        "LlamaForCausalLM",
        {"attention_bias": True, "mlp_bias": True},
        {"architectures": ["InternLM3ForCausalLM"], "qkv_bias": True, "bias": True, "attention_bias": None},
    ),
    FamilyCase("falcon3", "LlamaForCausalLM", {"head_dim": 32, "rope_theta": 1_000_042.0}),
    FamilyCase("stablelm", "StableLmForCausalLM", {"use_qkv_bias": True}),
    FamilyCase("stablelm-12b", "StableLmForCausalLM", {"qk_layernorm": True, "use_parallel_residual": True}),
    FamilyCase("glm", "GlmForCausalLM", {"head_dim": 16}),
    FamilyCase("glm4", "Glm4ForCausalLM", {"head_dim": 16, "attention_bias": True}),
    FamilyCase("cohere", "CohereForCausalLM", {"logit_scale": 0.3, "tie_word_embeddings": True}),
    FamilyCase("cohere2", "Cohere2ForCausalLM", {"sliding_window": 6, "tie_word_embeddings": True}, layers=4),
    FamilyCase(
        "gemma2",
        "Gemma2ForCausalLM",
        {
            "head_dim": 16,
            "sliding_window": 6,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 3.0,
        },
        norms_around=0.0,
    ),
    FamilyCase(
        "gemma3",
        "Gemma3ForCausalLM",
        {
            "head_dim": 16,
            "sliding_window": 6,
            "query_pre_attn_scalar": 24,
            "tie_word_embeddings": True,
            "num_hidden_layers": 6,
        },
        norms_around=0.0,
        layers=6,
    ),
    FamilyCase("mixtral", "MixtralForCausalLM", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    FamilyCase(
        "qwen2-moe",
        "Qwen2MoeForCausalLM",
        {
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 48,
            "shared_expert_intermediate_size": 112,
            "mlp_only_layers": [2],
            "use_sliding_window": True,
            "sliding_window": 9,
            "max_window_layers": 3,
        },
        layers=4,
    ),
    FamilyCase(
        "qwen3-moe",
        "Qwen3MoeForCausalLM",
        {
            "head_dim": 32,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 48,
            "norm_topk_prob": True,
            "decoder_sparse_step": 2,
        },
    ),
    FamilyCase(
        "olmoe",
        "OlmoeForCausalLM",
        {"num_experts": 7, "num_experts_per_tok": 4, "attention_bias": True, "norm_topk_prob": False},
    ),
)
DENSE_CASES = tuple(case for case in FAMILY_CASES if not case.has_experts)
