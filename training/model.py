"""A small Llama whose parameter names are those of Hugging Face, so export is a plain copy."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from training.tokenizer import BOS_ID, END_ID, PAD_ID, VOCAB_SIZE


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Architecture; four key-value heads let tensor parallelism of 1, 2 and 4 split evenly."""

    vocab_size: int = VOCAB_SIZE
    hidden_size: int = 256
    intermediate_size: int = 640
    num_layers: int = 4
    num_heads: int = 8
    num_kv_heads: int = 4
    head_dim: int = 32
    max_positions: int = 2048
    rope_theta: float = 500_000.0
    rms_norm_eps: float = 1e-5

    def to_hugging_face(self) -> dict[str, Any]:
        """config.json; RoPE is stated in both the old and the new form."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.max_positions,
            "rope_theta": self.rope_theta,
            "rope_parameters": {"rope_theta": self.rope_theta, "rope_type": "default"},
            "rms_norm_eps": self.rms_norm_eps,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": True,
            "initializer_range": 0.02,
            "bos_token_id": BOS_ID,
            "eos_token_id": END_ID,
            "pad_token_id": PAD_ID,
            "torch_dtype": "bfloat16",
            "dtype": "bfloat16",
        }


class RMSNorm(nn.Module):
    """Normalization by the root mean square, with a learnt scale."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Apply to [..., hidden_size]."""
        return F.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), self.eps)


class Attention(nn.Module):
    """Causal attention; neighbouring query heads share one key-value head."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.group = config.num_heads // config.num_kv_heads
        kv_size = config.num_kv_heads * config.head_dim
        q_size = config.num_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, q_size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(q_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Apply to [batch, length, hidden_size]."""
        batch, length, _ = x.shape
        split = (batch, length, -1, self.head_dim)
        q = _rotate(self.q_proj(x).view(split), cos, sin).transpose(1, 2)
        k = _rotate(self.k_proj(x).view(split), cos, sin).transpose(1, 2)
        v = self.v_proj(x).view(split).transpose(1, 2)
        k = k.repeat_interleave(self.group, dim=1)  # [batch, num_heads, length, head_dim]
        v = v.repeat_interleave(self.group, dim=1)
        # On CPU the bf16 backward of this kernel is several times slower than the fp32 one.
        with torch.autocast("cpu", enabled=False):
            out = F.scaled_dot_product_attention(q.float(), k.float(), v.float(), is_causal=True)
        projected: Tensor = self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))
        return projected


class MLP(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Apply to [..., hidden_size]."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class DecoderLayer(nn.Module):
    """Attention, then the MLP, each normalized first and added back."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Apply to [batch, length, hidden_size]."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Decoder(nn.Module):
    """Embedding, layers and last norm: `model.*` in the names of the checkpoint."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, tokens: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Hidden states of [batch, length] token ids."""
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x, cos, sin)
        out: Tensor = self.norm(x)
        return out


class LlamaModel(nn.Module):
    """`LlamaForCausalLM` for training: no cache, no mask but the causal one, tied embeddings."""

    cos: Tensor  # [max_positions, 1, head_dim / 2]
    sin: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.model = Decoder(config)
        half = torch.arange(0, config.head_dim, 2).float() / config.head_dim
        angles = torch.outer(torch.arange(config.max_positions).float(), config.rope_theta**-half)
        self.register_buffer("cos", angles.cos()[:, None, :], persistent=False)
        self.register_buffer("sin", angles.sin()[:, None, :], persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of [batch, length] token ids."""
        length = tokens.shape[1]
        hidden = self.model(tokens, self.cos[:length], self.sin[:length])
        return F.linear(hidden, self.model.embed_tokens.weight)  # [batch, length, vocab]


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding in the half-split order of Hugging Face."""
    first, second = x.chunk(2, dim=-1)  # [batch, length, heads, head_dim / 2]
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
