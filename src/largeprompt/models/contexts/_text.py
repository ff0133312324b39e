"""Context, question and answer as the tokens that a model reads, each with the part of the context it belongs to."""

import dataclasses
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from jaxtyping import Int

from largeprompt.models._load import _special, quiet

from ._units import Unit, parts_of

_MARKS = ("[[the context]]", "[[the question]]")  # stand in for texts while a template is filled


@dataclasses.dataclass(frozen=True)
class ContextText:
    """The tokens of a whole prompt: `group` is the part of the context that a token belongs to, or −1.

    The last `answer` tokens are the answer, which `joint` joins to the text before it; `parts` joined are the context.
    """

    ids: Int[np.ndarray, " L"]
    group: Int[np.ndarray, " L"]
    answer: int
    parts: list[str]
    joint: str = ""

    def answered(self, ids: Sequence[int]) -> "ContextText":
        """The same prompt with an answer after it."""
        if not len(ids):
            raise ValueError("the answer has no tokens; give one with a letter in it")
        joined = np.concatenate([self.ids, np.asarray(ids, self.ids.dtype)])
        group = np.concatenate([self.group, np.full(len(ids), -1)])
        return dataclasses.replace(self, ids=joined, group=group, answer=len(ids))


def read(
    tokenizer: Any, context: str | Sequence[str], question: str | None, unit: Unit = "sentences", plain: bool = False
) -> ContextText:
    """A context, cut into parts, and a question, in the template of the tokenizer unless `plain`; no answer yet.

    Several texts are cut one by one, so that no part belongs to two of them; "documents" takes each as one part.
    Without a question the answer is what goes on from the context.
    """
    found = parts_of(context, unit)
    if question is not None and not question.strip():
        raise ValueError("the question is empty; give one, such as “Who is it about?”")
    before, after, special = _frame(tokenizer, question, plain)
    pieces = [(before, -1), *((part, i) for i, part in enumerate(found)), (after, -1)]
    ids, group = _encoded(tokenizer, pieces)
    first = _special(tokenizer)[0] if special else []
    ids, group = np.concatenate([np.asarray(first, int), ids]), np.concatenate([np.full(len(first), -1), group])
    # a part without a token of its own (a letter that shares one with its neighbour) goes to the part before it
    seen, number = np.unique(group[group >= 0], return_inverse=True)
    group[group >= 0] = number
    edges = [0, *seen[1:].tolist(), len(found)]
    joined = ["".join(found[start:end]) for start, end in pairwise(edges)]
    return ContextText(ids, group, 0, joined, " " if after and special else "")


def answer_ids(tokenizer: Any, answer: str, joint: str = "") -> list[int]:
    """The tokens of an answer, after a space where the text before it ends without one."""
    joint = joint if answer.strip() and not answer[0].isspace() else ""
    return list(tokenizer(joint + answer, add_special_tokens=False)["input_ids"])


def generated(model: Any, tokenizer: Any, text: ContextText, tokens: int) -> list[int]:
    """The answer of at most so many tokens that the model gives, taking the likeliest token each time."""
    ids = torch.as_tensor(text.ids)[None].to(model.device)
    ends = model.generation_config.eos_token_id
    ends = [ends] if isinstance(ends, int) else list(ends or [])
    with torch.no_grad(), quiet():
        found = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=tokens,
            pad_token_id=ends[0] if ends else 0,
        )[0, ids.shape[1] :].tolist()
    stop = next((i for i, token in enumerate(found) if token in ends), len(found))
    if not stop:
        raise ValueError(
            f"the model gives no answer: its first token is {tokenizer.decode(found[:1])!r}; give --answer"
        )
    return found[:stop]


def _frame(tokenizer: Any, question: str | None, plain: bool) -> tuple[str, str, bool]:
    """What stands before the context and after it, and whether special tokens are still to be added."""
    if question is None:
        return "", "", True
    if plain or getattr(tokenizer, "chat_template", None) is None:
        return "", f"\n\nQuestion: {question}\nAnswer:", True
    message = {"role": "user", "content": f"Context: {_MARKS[0]}\n\nQuestion: {_MARKS[1]}"}
    whole = tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
    before, mark, after = whole.partition(_MARKS[0])
    if not mark or _MARKS[1] not in after:
        raise ValueError("the tokenizer's template changes what a user says; read the context without it (plain)")
    return before, after.replace(_MARKS[1], question), False


def _encoded(tokenizer: Any, pieces: list[tuple[str, int]]) -> tuple[np.ndarray, np.ndarray]:
    """The tokens of the pieces joined, each with the number of the piece that has its last letter."""
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(f"{type(tokenizer).__name__} does not say where tokens begin; give a fast tokenizer")
    with quiet():
        found = tokenizer("".join(piece for piece, _ in pieces), add_special_tokens=False, return_offsets_mapping=True)
    owners = np.repeat([number for _, number in pieces], [len(piece) for piece, _ in pieces])
    last = [max(start, end - 1) for start, end in found["offset_mapping"]]
    return np.array(found["input_ids"], int), owners[last]
