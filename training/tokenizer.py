"""The tokenizer: byte-level BPE, six special tokens, and the chat template.

Digits are single tokens, so copying a number is copying a row of tokens. Nothing is added on
encode: the chat template writes the beginning-of-text token itself, and a plain prompt has none.
"""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from training.chats import Chat

PAD, BOS, END = "<|pad|>", "<|bos|>", "<|end|>"
SYSTEM, USER, ASSISTANT = "<|system|>", "<|user|>", "<|assistant|>"
SPECIAL_TOKENS = (PAD, BOS, END, SYSTEM, USER, ASSISTANT)
PAD_ID, BOS_ID, END_ID, SYSTEM_ID, USER_ID, ASSISTANT_ID = range(len(SPECIAL_TOKENS))
VOCAB_SIZE = 2048

CHAT_TEMPLATE = (
    "{{ '<|bos|>' }}"
    "{% for message in messages %}"
    "{% if message['role'] == 'system' or message['role'] == 'developer' %}{{ '<|system|>' }}"
    "{% elif message['role'] == 'assistant' %}{{ '<|assistant|>' }}"
    "{% else %}{{ '<|user|>' }}"
    "{% endif %}"
    "{{ message['content'] }}{{ '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Learn the merges; single-threaded order of `texts` makes the result reproducible."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[AddedToken(token, special=True) for token in SPECIAL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def render(chat: Chat) -> str:
    """The text of a whole conversation, exactly as the chat template writes it."""
    system = f"{SYSTEM}{chat.system}{END}" if chat.system is not None else ""
    turns = (f"{USER}{t.user}{END}{ASSISTANT}{t.assistant}{END}" for t in chat.turns)
    return f"{BOS}{system}{''.join(turns)}"


def messages(chat: Chat) -> list[dict[str, str]]:
    """The conversation up to the last question, as a chat API receives it."""
    result = [{"role": "system", "content": chat.system}] if chat.system is not None else []
    for turn in chat.turns:
        result.append({"role": "user", "content": turn.user})
        result.append({"role": "assistant", "content": turn.assistant})
    return result[:-1]


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_length: int) -> None:
    """Write tokenizer.json and tokenizer_config.json as `AutoTokenizer` reads them."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "bos_token": BOS,
        "eos_token": END,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
