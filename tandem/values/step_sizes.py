"""Sizes and sources by which steps and their drafts are counted: workers count them, routers export them."""

STEP_SIZES = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Upper bounds of buckets in tokens, as of vLLM's `iteration_tokens_total`; larger steps have a bucket of their own."""
DRAFT_PLACES = 16
"""Places in drafts that are counted apart; tokens further on count for the last of them."""
PREDICTION_SOURCE = "prediction"
"""The source that drafts what the client expects: requests' usage tells what became of it."""
DRAFT_SOURCES = ("grammar", PREDICTION_SOURCE, "lookup", "suffix")
"""Sources of drafts, in the order in which they are asked if all are used: names in
`engine.speculation.sources.SOURCES`."""
