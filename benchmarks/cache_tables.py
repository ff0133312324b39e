"""Tables of benchmarks/cache.py: means over texts with their errors, and the ratio of ours to the best press."""

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable

import numpy as np
from presses import OURS as OUR_PRESS

OURS, FULL = "CompressedCache", "full"
QUICK = "CompressedCache, not fitted"  # tokens as they are, chosen by few queries
AGAIN = ("KVzip", "KVzip, normalized")  # presses that read the prompt more than once
CLAIMS = {0.5: 0.4, 0.75: 0.5, 0.9: 0.6}
RESAMPLES = 4000
_FEWEST = 8  # texts that settle a claim


def mean(values: Iterable[float]) -> tuple[float, float]:
    """The mean and its standard error."""
    x = np.asarray(list(values), dtype=float)
    return float(x.mean()), float(x.std(ddof=1) / np.sqrt(len(x))) if len(x) > 1 else float("nan")


def median(values: Iterable[float]) -> tuple[float]:
    """The median: first calls of a method are slow."""
    return (float(np.median(list(values))),)


def ratio(ours: np.ndarray, other: np.ndarray) -> tuple[float, float, float]:
    """The ratio of means over the same texts, and an interval of 90 % from texts drawn again."""
    rng = np.random.default_rng(0)
    at = rng.integers(len(ours), size=(RESAMPLES, len(ours)))
    theirs = other[at].mean(axis=1)
    if theirs.min() <= 0:  # then a ratio says nothing
        return float(ours.mean() / other.mean()), -np.inf, np.inf
    low, high = np.quantile(ours[at].mean(axis=1) / theirs, [0.05, 0.95])
    return float(ours.mean() / other.mean()), float(low), float(high)


def tables(rows: list[dict]) -> str:
    """All that was measured, as markdown."""
    losses = [row for row in rows if row["kind"] == "loss"]
    parts = []
    for L in sorted({row["L"] for row in losses}):
        own = [row for row in losses if row["L"] == L]
        full, error = mean(row["loss"] for row in rows if row["kind"] == "full" and row["L"] == L)
        count = len({row["text"] for row in own})
        parts.append(f"## {L} tokens, {count} texts, loss with the full cache {full:.3f} ± {error:.3f}")
        parts.append(_grid("change of loss", own, lambda row: row["change"], lambda m, e: f"{m:.4f} ± {e:.4f}"))
        parts.append(_ratios(own, "change"))
        parts.append(_grid("divergence", own, lambda row: row["divergence"], lambda m, e: f"{m:.4f} ± {e:.4f}"))
        parts.append(_ratios(own, "divergence"))
        parts.append(_grid("memory, of the full cache", own, lambda row: row["memory"], lambda m, e: f"{m:.4f}"))
        parts.append(
            _grid(
                "seconds to compress over those to read, median",
                own,
                lambda row: row["seconds"],
                lambda m: f"{m:.2f}",
                median,
            )
        )
    found = [row for row in rows if row["kind"] == "facts"]
    for L in sorted({row["L"] for row in found}):
        own = [row for row in found if row["L"] == L]
        asked = sum(row["asked"] for row in own if row["method"] == FULL)
        parts.append(f"## {L} tokens, {asked} facts")
        parts.append(
            _grid("found again", own, lambda row: row["found"] / row["asked"], lambda m, e: f"{m:.2f} ± {e:.2f}")
        )
    parts.append(_generation([row for row in rows if row["kind"] == "generation"]))
    notes = {f"{row.get('method', 'note')}: {row['why']}" for row in rows if row["kind"] in ("failed", "note")}
    parts += [f"- {note}" for note in sorted(notes)]
    return "\n\n".join(part for part in parts if part)


def _grid(title: str, rows: list[dict], value: Callable, shown: Callable, of: Callable = mean) -> str:
    """Methods down, shares removed across."""
    cells = defaultdict(list)
    for row in rows:
        cells[row["method"], row["removed"]].append(value(row))
    shares = sorted({share for _, share in cells})
    names = sorted({name for name, _ in cells}, key=lambda name: (name not in (OURS, FULL), name))
    lines = [f"| {title} | " + " | ".join(f"{100 * share:g} % removed" for share in shares) + " |"]
    lines.append("|---" * (len(shares) + 1) + "|")
    for name in names:
        found = [shown(*of(cells[name, share])) if cells[name, share] else "" for share in shares]
        lines.append(f"| {name} | " + " | ".join(found) + " |")
    return "\n".join(lines)


def _ratios(rows: list[dict], what: str) -> str:
    """Ours over the press with the least mean, of those that read once and of all; each share on its own.

    Presses without all texts do not compete.
    """
    lines = [f"| removed | best press | ours over it, {what} | 90 % interval | claimed |", "|---" * 5 + "|"]
    for share, again in itertools.product(sorted({row["removed"] for row in rows}), (False, True)):
        values: dict[str, dict[str, float]] = defaultdict(dict)
        for row in rows:
            if row["removed"] == share:
                values[row["method"]][row["text"]] = row[what]
        own = values.get(OURS, {})
        apart = {OURS, QUICK, OUR_PRESS} | (set() if again else set(AGAIN))
        rivals = {rival: x for rival, x in values.items() if rival not in apart and x.keys() >= own.keys()}
        whole = {rival: np.array([x[text] for text in own]) for rival, x in rivals.items()}
        if not own or not whole:
            continue
        best = min(whole, key=lambda rival: whole[rival].mean())
        if again and best not in AGAIN:
            continue
        found, low, high = ratio(np.array(list(own.values())), whole[best])
        claim = f"at most {CLAIMS[share]}" if what == "change" and share in CLAIMS else ""
        if claim:
            claim += f": {_verdict(CLAIMS[share], low, high, len(own))}"
        lines.append(f"| {100 * share:g} % | {best} | {found:.3f} | {low:.3f} to {high:.3f} | {claim} |")
    return "\n".join(lines) if len(lines) > 2 else ""


def _verdict(claim: float, low: float, high: float, count: int) -> str:
    if count < _FEWEST or low <= claim < high:
        return "not settled"
    return "holds" if high <= claim else "fails"


def _generation(rows: list[dict]) -> str:
    if not rows:
        return ""
    lines = ["| tokens | removed | ms a token, plain cache of as many | ours | numbers held, plain | ours |"]
    lines.append("|---" * 6 + "|")
    for row in rows:
        ours, held = row.get("ours"), row.get("ours holds")
        shown = (f"{1000 * ours:.2f}", f"{held:,}") if ours is not None else ("", "")
        lines.append(
            f"| {row['L']} | {100 * row['removed']:g} % | {1000 * row['plain']:.2f} | {shown[0]} "
            f"| {row['plain holds']:,} | {shown[1]} |"
        )
    return "\n".join(lines)
