"""How steps are counted by their tokens: workers count, routers show."""

STEP_SIZES = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Upper ends of buckets, as of vLLM's `iteration_tokens_total`; what is larger has one of its own."""
