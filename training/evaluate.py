"""Measure an exported model: `python -m training.evaluate --model DIR`.

Loads the export through `transformers`, in fp32, and uses seeds that training never draws. An
answer counts as exact when the most likely token is the right one at every position of the answer
and of the end-of-turn token; that is the same as greedy decoding printing exactly that answer.
"""

import argparse
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from tandem_bench import stories
from training import chats, needles
from training.chats import Chat
from training.corpus import split_text
from training.tokenizer import BOS, END, messages

_WINDOW = 512
_NUM_FACTS = 6

Forward = Callable[[list[int]], Tensor]
"""Token ids to float32 logits after each of them, `[num_tokens, vocab_size]`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measured figure; `met` is None when nothing is promised."""

    name: str
    value: float
    unit: str
    goal: str
    met: bool | None


class Judge:
    """An exported model and the questions put to it."""

    def __init__(self, folder: Path, forward: Forward | None = None) -> None:
        """`forward`: another implementation of the model than transformers in float32."""
        self._forward = forward or _transformers(folder)
        self.chat_tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def encode(self, text: str) -> list[int]:
        """Token ids of a text that already holds its special tokens."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def count(self, pieces: list[str]) -> list[int]:
        """Number of tokens of every piece."""
        return [len(self.encode(piece)) for piece in pieces]

    @torch.inference_mode()
    def logits(self, ids: list[int]) -> Tensor:
        """What the model expects after every token: `[num_tokens, vocab_size]`."""
        return self._forward(ids)

    def is_exact(self, chat: Chat) -> bool:
        """Whether greedy decoding gives the last answer of the chat, and then stops."""
        rendered = self.chat_tokenizer.apply_chat_template(messages(chat), tokenize=False, add_generation_prompt=True)
        prompt = self.encode(rendered)
        answer = self.encode(chat.turns[-1].assistant + END)
        predicted = self.logits(prompt + answer)[len(prompt) - 1 : -1].argmax(-1)
        return predicted.tolist() == answer

    def negative_log_likelihood(self, ids: list[int]) -> tuple[float, int]:
        """Summed over all tokens but the first, with their number."""
        logits = self.logits(ids)[:-1]
        total = F.cross_entropy(logits, torch.tensor(ids[1:]), reduction="sum").item()
        return total, len(ids) - 1


def _transformers(folder: Path) -> Forward:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def forward(ids: list[int]) -> Tensor:
        result: Tensor = model(torch.tensor([ids])).logits[0]
        return result

    return forward


def needle_chats(judge: Judge, length: int, num: int, text: str) -> Iterator[Chat]:
    """Six facts in a text of `length` tokens; half of the fillers are lines of the real text."""
    lines = tuple(line for line in text.splitlines() if line.strip())
    shape = needles.Shape(num_tokens=length, num_facts=_NUM_FACTS, num_questions=1, vary=False)
    for i in range(num):
        rng = Random(f"held-out:needle:{length}:{i}")
        use_text = bool(lines) and i % 2 == 1
        filler = needles.line_filler(rng, lines) if use_text else needles.story_filler(rng)
        yield needles.needle_chat(rng, shape, filler, judge.count)


def json_chats(num: int) -> Iterator[Chat]:
    """JSON requests as in training, on seeds of their own."""
    return (chats.json_chat(Random(f"held-out:json:{i}")) for i in range(num))


def needle_row(judge: Judge, length: int, num: int, text: str, goal: float | None) -> Row:
    """How often the value is found and said exactly."""
    exact = [judge.is_exact(chat) for chat in needle_chats(judge, length, num, text)]
    return _share(f"needle, {length} tokens", exact, goal)


def json_row(judge: Judge, num: int, goal: float) -> Row:
    """How often the object is exactly the one that was asked for."""
    return _share("JSON object", [judge.is_exact(chat) for chat in json_chats(num)], goal)


def story_row(judge: Judge, num: int) -> Row:
    """Perplexity on whole generated stories."""
    told = (stories.tell(Random(f"held-out:story:{i}")).text for i in range(num))
    return _perplexity(judge, "perplexity, stories", [judge.encode(f"{BOS}{t}{END}") for t in told])


def text_row(judge: Judge, text: str) -> Row:
    """Perplexity on a real text, in windows that share no context."""
    ids = judge.encode(text)
    windows = [ids[i : i + _WINDOW] for i in range(0, len(ids) - 1, _WINDOW)]
    return _perplexity(judge, "perplexity, real text", windows)


def _share(name: str, exact: list[bool], goal: float | None) -> Row:
    value = 100.0 * sum(exact) / len(exact)
    return Row(
        name=f"{name} ({len(exact)} samples)",
        value=round(value, 2),
        unit="% exact",
        goal="stated" if goal is None else f">= {goal:g}",
        met=None if goal is None else value >= goal,
    )


def _perplexity(judge: Judge, name: str, windows: list[list[int]]) -> Row:
    totals = [judge.negative_log_likelihood(ids) for ids in windows]
    num_tokens = sum(count for _, count in totals)
    value = math.exp(sum(total for total, _ in totals) / num_tokens)
    return Row(
        name=f"{name} ({num_tokens} tokens)",
        value=round(value, 3),
        unit="per token",
        goal="stated",
        met=None,
    )


def evaluate(folder: Path, text: str, num: int, lengths: list[int], forward: Forward | None = None) -> list[Row]:
    """All the figures; only the last part of `text`, never trained on, is read. `forward`: see Judge."""
    judge = Judge(folder, forward)
    _, held_out = split_text(text)
    rows = [story_row(judge, num)]
    if held_out:
        rows.append(text_row(judge, held_out))
    for length in lengths:
        rows.append(needle_row(judge, length, num, held_out, 95.0 if length <= 512 else None))
    rows.append(json_row(judge, num, 95.0))
    return rows


def main() -> None:
    """Print the figures, and write them as JSON if asked."""
    parser = argparse.ArgumentParser(
        prog="python -m training.evaluate",
        description="Measure an exported model on held-out data.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--model", type=Path, default=Path("engine/builtin_model"), help="exported folder")
    add("--text", type=Path, help="the text of the training run; its last 5%% is measured")
    add("--samples", type=int, default=200, help="questions and stories of each kind")
    add("--lengths", type=int, nargs="+", default=[512, 1024, 1900], help="needle lengths")
    add("--threads", type=int, default=1, help="CPU threads")
    add("--json", type=Path, help="write the figures to this file as well")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    text = options.text.read_text(encoding="utf-8") if options.text else ""
    rows = evaluate(options.model, text, options.samples, options.lengths)
    for row in rows:
        met = {True: "met", False: "NOT MET", None: ""}[row.met]
        print(f"{row.name:<40} {row.value:>9.3f} {row.unit:<10} {row.goal:>8}  {met}")
    if options.json is not None:
        content = {"rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
