"""Gain from preparing the next step while the GPU runs the present one, with recorded graphs and without."""

from itertools import product
from random import Random

from tandem_bench.gpu.serving import Limits, Serving, pool_blocks, random_prompts
from tandem_bench.gpu.sources import random_model
from tandem_bench.gpu.stage import Findings, Stage
from tandem_bench.report import figure


def pipelining(stage: Stage) -> Findings:
    """Measure the mean decode step of one batch in four ways, and the gain from pipelining."""
    batch, length, num_tokens = (2, 20, 6) if stage.is_small else (16, 256, 32)
    model = random_model(stage.shape, seed=stage.seed, options=stage.backend_options)
    rng = Random(f"pipelining:{stage.seed}")
    prompts = random_prompts(rng, batch, length, model.config.vocab_size)
    seconds: dict[tuple[bool, bool], float] = {}
    answers = set()
    for graphs, pipelined in product((False, True), repeat=2):
        limits = Limits(
            num_blocks=pool_blocks(batch, length + num_tokens),
            max_rows=batch,
            max_tokens=batch * length,
            chunk_tokens=batch * length,
            max_model_len=length + num_tokens + 16,
            pipelined=pipelined,
            graphs=graphs,
        )
        with Serving(model, limits) as serving:
            serving.run(prompts, num_tokens)
            served = serving.run(prompts, num_tokens)
        answers.add((graphs, served.tokens))
        seconds[graphs, pipelined] = served.decode_step_s(batch)
        name = f"pipelining.{'graphs' if graphs else 'eager'}.{'on' if pipelined else 'off'}"
        yield figure(name, seconds[graphs, pipelined] * 1e3, "ms")
    for graphs in (False, True):
        gain = seconds[graphs, False] / seconds[graphs, True]
        yield figure(f"pipelining.{'graphs' if graphs else 'eager'}.gain", gain, "x")
    # Kernels are the same with and without pipelining; graphs may split attention differently.
    yield figure("pipelining.answers", len(answers) - 2, "that differ", at_most=0)
