"""Limits that the machine's memory and arithmetic set for a model, to compare measured rates with.

The roofline model (Williams, Waterman and Patterson, 2009) with the two limits that matter here. A decode step must
read every weight once and every running sequence's keys and values once, so bandwidth bounds it. A prompt costs two
floating-point operations per weight and token, plus attention's products, so arithmetic bounds it. Activations, norms
and sampling are left out: they are small, and a limit must never be too low.
"""

from dataclasses import dataclass
from math import prod

from engine.model.parameters import expected_shapes
from engine.model.spec import ModelSpec, MoeSpec
from tandem.values.kv_layout import DTYPE_BITS


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCost:
    """Bytes and operations of one model, stored and computed in one dtype."""

    streamed_weights: int
    """Numbers that every step reads: all except an embedding that is not also the head, and experts that a token does
    without: more sequences may read more of these, so that for them the limit is above what can be reached.
    """
    layer_weights: int
    """Numbers in the layers' matrices that multiply a token."""
    head_weights: int
    kv_numbers_per_token: int
    attention_width: int
    """Number of query heads times their size, over all layers."""
    item_bytes: int
    weight_bits: int
    """Bits of a number in the layers' matrices; scales are not counted."""
    head_bits: int

    @classmethod
    def from_config(cls, config: ModelSpec, dtype: str, *, bits: int | None = None) -> "ModelCost":
        """The cost of a model computed in `dtype`, KV cache included.

        `bits`: of the weights, if they are quantized; the head then has eight at least, as every engine keeps it.
        """
        width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        head = config.vocab_size * config.hidden_size
        stored = sum(prod(shape) for shape in expected_shapes(config).values())
        idle = sum(_idle_weights(layer.moe, config.hidden_size) for layer in config.layers)
        return cls(
            streamed_weights=stored - idle if config.tie_embeddings else stored - idle - head,
            layer_weights=sum(config.active_weights(layer) for layer in config.layers),
            head_weights=head,
            kv_numbers_per_token=2 * config.num_layers * kv_width,
            attention_width=config.num_layers * width,
            item_bytes=DTYPE_BITS[dtype] // 8,
            weight_bits=bits or DTYPE_BITS[dtype],
            head_bits=max(8, bits) if bits else DTYPE_BITS[dtype],
        )

    @property
    def weights_bytes(self) -> int:
        """Bytes read by every decode step, however many sequences share it."""
        others = self.streamed_weights - self.layer_weights - self.head_weights
        quantized_bits = self.layer_weights * self.weight_bits + self.head_weights * self.head_bits
        return quantized_bits // 8 + others * self.item_bytes

    def decode_step_bytes(self, num_seqs: int, context: float) -> float:
        """Return the bytes read by a step that adds a token to each of `num_seqs` sequences of `context` tokens."""
        return self.weights_bytes + num_seqs * context * self.kv_numbers_per_token * self.item_bytes

    def decode_limit(self, num_seqs: int, context: float, bytes_per_s: float) -> float:
        """Return tokens per second of all sequences together, if only reading takes time."""
        return num_seqs * bytes_per_s / self.decode_step_bytes(num_seqs, context)

    def prompt_flops_per_token(self, length: int) -> float:
        """Return operations per token of a prompt of `length`, with causal attention and one row of logits.

        The token at position p attends to p + 1 tokens, (length + 1) / 2 on average, with two operations each for its
        score and for its value, per query head and dimension.
        """
        attention = 4 * self.attention_width * (length + 1) / 2
        return 2 * self.layer_weights + attention + 2 * self.head_weights / length

    def prefill_limit(self, length: int, flops_per_s: float) -> float:
        """Return prompt tokens per second, if only arithmetic takes time."""
        return flops_per_s / self.prompt_flops_per_token(length)


def _idle_weights(moe: MoeSpec | None, hidden_size: int) -> int:
    """Numbers in the experts of a layer that do not compute a token."""
    return 0 if moe is None else 3 * hidden_size * moe.expert_size * (moe.num_experts - moe.experts_per_token)


def mean_context(prompt_tokens: int, output_tokens: int) -> float:
    """Return the tokens that an average decode step finds cached: the prompt and half of the answer."""
    return prompt_tokens + output_tokens / 2
