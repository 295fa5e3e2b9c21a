"""Train the built-in model: `python -m training.train --help`.

Life of a run: learn (or reload) the tokenizer, then for every step draw rows from (seed, step),
take one step, and now and then measure, checkpoint and export. The same seed, options and number
of threads give the same model.
"""

import argparse
import time
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F
from torch.optim import AdamW, Muon, Optimizer
from tqdm import tqdm

from training.checkpoint import Progress, export, load_checkpoint, save_checkpoint
from training.corpus import Corpus, split_text, target_weights, tokenizer_texts
from training.initialize import initialize
from training.model import LlamaModel, ModelConfig
from training.schedule import (
    TOKENS_PER_STEP,
    learning_rate_scale,
    row_length,
    stage_at,
)
from training.tokenizer import train_tokenizer

_MUON_LR = 5e-3
_ADAM_LR = 3e-3
_MAX_GRAD_NORM = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    out: Path
    work: Path
    text: Path | None
    seed: int
    steps: int
    minutes: float | None
    threads: int
    save_every: int
    resume: bool


def parse_options(arguments: list[str] | None = None) -> Options:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m training.train",
        description="Train Tandem's built-in model and export it in Hugging Face layout.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--out", type=Path, default=Path("engine/builtin_model"), help="export folder")
    add("--work", type=Path, default=Path("build/training"), help="folder for the checkpoint")
    add("--text", type=Path, help="a plain text to read as well; its last 5%% is held out")
    add("--seed", type=int, default=0, help="seed of the data and of the initial weights")
    add("--steps", type=int, default=3000, help=f"steps of {TOKENS_PER_STEP} tokens")
    add("--minutes", type=float, help="finish by then, decay included, even with fewer steps")
    add("--threads", type=int, default=1, help="CPU threads")
    add("--save-every", type=int, default=200, help="steps between checkpoints and exports")
    add("--resume", action="store_true", help="go on from the checkpoint in --work")
    return Options(**vars(parser.parse_args(arguments)))


class Run:
    """One training run; owns the model, its optimizers and the progress."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.config = ModelConfig()
        torch.manual_seed(options.seed)
        self.model = LlamaModel(self.config)
        initialize(self.model, self.config)
        self.optimizers = make_optimizers(self.model)
        self.progress = Progress(seed=options.seed)
        text = options.text.read_text(encoding="utf-8") if options.text else ""
        trained_text, _ = split_text(text)
        self.tokenizer = self._tokenizer(trained_text)
        self.corpus = Corpus(self.tokenizer, trained_text)
        self.digit_ids = frozenset(i for d in "0123456789" for i in self.corpus.encode(d))
        if options.resume:
            self.progress = load_checkpoint(self.checkpoint, self.model, self.optimizers)

    @property
    def checkpoint(self) -> Path:
        """The one file a run resumes from."""
        return self.options.work / "checkpoint.safetensors"

    @property
    def fraction(self) -> float:
        """Share of the run that is done, by steps or by the clock, whichever is further."""
        by_steps = self.progress.step / self.options.steps
        if self.options.minutes is None:
            return by_steps
        return max(by_steps, self.progress.elapsed_s / (60.0 * self.options.minutes))

    def train(self) -> None:
        """Take steps until the run is done, saving now and then and at the end."""
        bar = tqdm(total=self.options.steps, initial=self.progress.step, unit="step", mininterval=2)
        average = 0.0
        while (fraction := self.fraction) < 1.0:
            started = time.monotonic()
            loss = self.step(fraction)
            self.progress.step += 1
            self.progress.elapsed_s += time.monotonic() - started
            average = loss if average == 0.0 else 0.98 * average + 0.02 * loss
            bar.set_postfix(loss=f"{average:.3f}", done=f"{fraction:.1%}", refresh=False)
            bar.update()
            if self.progress.step % self.options.save_every == 0:
                self.save()
        bar.close()
        self.save()

    def step(self, fraction: float) -> float:
        """One optimizer step on rows that depend only on the seed, the step and the stage."""
        rng = Random(f"{self.options.seed}:{self.progress.step}")
        stage = stage_at(fraction)
        length = row_length(rng, stage)
        rows = np.array(
            [self.corpus.row(rng, stage.mix, length + 1) for _ in range(TOKENS_PER_STEP // length)],
            dtype=np.int64,
        )
        weights = torch.from_numpy(target_weights(rows, self.digit_ids)[:, 1:].copy())
        scale = learning_rate_scale(self.progress.step, fraction)
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
            for group in optimizer.param_groups:
                group["lr"] = group["base_lr"] * scale
        loss = weighted_loss(self.model, torch.from_numpy(rows), weights)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), _MAX_GRAD_NORM)
        for optimizer in self.optimizers:
            optimizer.step()
        self.progress.num_tokens += rows[:, 1:].size
        return loss.item()

    def save(self) -> None:
        """Write the checkpoint and the export."""
        save_checkpoint(self.checkpoint, self.model, self.optimizers, self.progress)
        export(self.options.out, self.model, self.config, self.tokenizer)

    def _tokenizer(self, text: str) -> Tokenizer:
        """Learnt once per run: a resumed run must not get other token ids."""
        path = self.options.work / "tokenizer.json"
        if self.options.resume:
            return Tokenizer.from_file(str(path))
        tokenizer = train_tokenizer(tokenizer_texts(self.options.seed, text))
        path.parent.mkdir(parents=True, exist_ok=True)
        tokenizer.save(str(path))
        return tokenizer


def make_optimizers(model: LlamaModel) -> tuple[Optimizer, ...]:
    """Muon for the hidden matrices, AdamW for the embedding and the norms."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    muon = Muon(matrices, lr=_MUON_LR, weight_decay=0.02, adjust_lr_fn="match_rms_adamw")
    adam = AdamW(others, lr=_ADAM_LR, betas=(0.9, 0.95), weight_decay=0.0)
    for optimizer in (muon, adam):
        for group in optimizer.param_groups:
            group["base_lr"] = group["lr"]
    return muon, adam


def weighted_loss(model: LlamaModel, rows: Tensor, weights: Tensor) -> Tensor:
    """Mean cross-entropy of the next token, by weight."""
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(rows[:, :-1])
    losses = F.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten(), reduction="none")
    flat = weights.flatten()
    return (losses * flat).sum() / flat.sum()


def main() -> None:
    """Train as the command line says."""
    options = parse_options()
    torch.set_num_threads(options.threads)
    Run(options).train()


if __name__ == "__main__":
    main()
