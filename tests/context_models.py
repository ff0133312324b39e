"""A small random language model and tokenizers of words with a chat template, for tests of contexts."""

from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

MARKS = ("[UNK]", "<user>", "<end>", "<model>", ".", "!", "?", ":", "Context", "Question", "Answer", "Who")
WORDS = [*MARKS, *(f"w{i}" for i in range(14)), *(f"W{i}" for i in range(14))]
TEMPLATE = "{% for m in messages %}<user> {{ m['content'] }} <end>{% endfor %} <model>"


def llama(positions: int = 2048) -> Any:
    """Two layers, whose attention is far from even."""
    torch.manual_seed(0)
    sizes: Any = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=41, max_position_embeddings=positions)
    found = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for each in found.parameters():
            each *= 4
    return found


def chat_tokenizer(template: str | None = TEMPLATE) -> Any:
    """Words and marks are tokens."""
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    found: Any = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[UNK]", additional_special_tokens=["<user>", "<end>", "<model>"]
    )
    found.chat_template = template
    return found
