r"""A context as a measure on its sentences: what a language model makes of an answer, by the weights of the sentences.

A sentence of weight $a$ has $\log a$ added to every attention score on its tokens, in every layer; at weight 0 it is
left out. The tokens of the question and of the answer have weight 1, and so has the first token that is there, whatever
it belongs to: many heads use it as a sink, which nobody means to weigh.
"""

import dataclasses
import inspect
from contextlib import nullcontext
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from largeprompt.models.sensitivity._weighted import weighted

Kind = Literal["masked", "taken out"]
KINDS: tuple[Kind, ...] = ("masked", "taken out")
Output = Literal["log-probability", "tokens", "log-odds"]
OUTPUTS: tuple[Output, ...] = ("log-probability", "tokens", "log-odds")


@dataclasses.dataclass
class ContextPrompt:
    r"""The log-probability that a causal language model gives to an answer, as a function of the weights of groups.

    `group` has for each token of the text the number of its group, or −1 for a token of weight 1; the last `answer`
    tokens are the answer. `kind` says what weight 0 is: "masked", no token reads the sentence and all others stay in
    their places; "taken out", the text is shortened and its positions close up. The two agree for all other weights.
    Outputs are the sum over the answer's tokens, or one number for each ("tokens"), or $\log p/(1-p)$ of the whole
    answer ("log-odds"). `passes` counts the forward passes run so far; whoever runs a backward pass adds two.
    """

    model: Any
    ids: Int[Tensor, " L"]
    group: Int[Tensor, " L"]
    answer: int
    kind: Kind = "masked"
    output: Output = "log-probability"
    passes: int = dataclasses.field(default=0, init=False)

    def __post_init__(self) -> None:
        for name, given, known in (("kind", self.kind, KINDS), ("output", self.output, OUTPUTS)):
            if given not in known:
                raise ValueError(f"{name} is {given!r}; it must be one of {', '.join(known)}")
        device = next(self.model.parameters()).device
        self.ids, self.group = (torch.as_tensor(x).long().to(device) for x in (self.ids, self.group))
        if not 0 < self.answer < len(self.ids):
            raise ValueError(f"answer is {self.answer}; it must be from 1 to {len(self.ids) - 1} tokens")
        missing = set(range(self.groups)) - set(self.group.tolist())
        if self.groups < 1 or missing:
            raise ValueError(f"group {min(missing, default=0)} has no tokens; groups must be 0, 1, … without a gap")
        if bool((self.group[-self.answer :] >= 0).any()):
            raise ValueError("a token of the answer has a group; the answer has weight 1")

    @property
    def groups(self) -> int:
        """How many groups there are."""
        return int(self.group.max()) + 1

    def __call__(self, log_weights: Float[Tensor, "b g"]) -> Float[Tensor, "b p"]:
        """Outputs for each row of log-weights; −∞ leaves a group out, and the gradient there is 0.

        Tokens that are left out are not run at all: no other token reads them, so only the positions of those that stay
        tell "masked" from "taken out".
        """
        if log_weights.ndim != 2 or log_weights.shape[1] != self.groups:
            raise ValueError(f"log-weights have shape {tuple(log_weights.shape)}; they must be (any, {self.groups})")
        log_weights = log_weights.to(self.ids.device)
        kept = _by_token(~torch.isneginf(log_weights.detach()), self.group, True)[:, :-1]  # the last is only predicted
        lengths = kept.sum(1)
        size = int(lengths.max())
        # right padding: a causal model never reads it, so no mask is needed
        order = torch.argsort(~kept, dim=1, stable=True)[:, :size]
        real = torch.arange(size, device=order.device) < lengths[:, None]
        positions = order if self.kind == "masked" else torch.arange(size, device=order.device).expand_as(order)
        positions = torch.where(real, positions, 0)
        weights = nullcontext()
        if log_weights.requires_grad or bool((log_weights != 0).logical_and(~torch.isneginf(log_weights)).any()):
            finite = torch.where(torch.isneginf(log_weights), 0.0, log_weights)
            by_token = _by_token(finite, self.group, 0.0)[:, :-1]
            first = torch.arange(size, device=order.device) == 0
            weights = weighted(torch.where(real & ~first, by_token.gather(1, order), 0.0))
        pad = size - int(lengths.min())
        with weights:
            logits = self._logits(self.ids[order], positions, self.answer + pad)
        at = lengths[:, None] - self.answer + torch.arange(self.answer, device=order.device) - (size - logits.shape[1])
        logits = logits.gather(1, at[..., None].expand(-1, -1, logits.shape[-1]))
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        chosen = self.ids[-self.answer :].expand(len(logits), -1)[..., None]
        found = logits.gather(2, chosen)[..., 0] - logits.logsumexp(2)
        self.passes += len(logits)
        return self._of(found)

    def _of(self, by_token: Float[Tensor, "b n"]) -> Float[Tensor, "b p"]:
        if self.output == "tokens":
            return by_token
        total = by_token.sum(1, keepdim=True)
        # log(1 - p) by expm1, which keeps its digits where p is near 1
        return total if self.output == "log-probability" else total - torch.log(-torch.expm1(total.clamp_max(-1e-7)))

    def _logits(self, ids: Tensor, positions: Tensor, last: int) -> Tensor:
        """The logits at the last places; only there, where the model can do so."""
        options: dict[str, Any] = {"logits_to_keep": last} if _keeps(self.model) else {}
        # a mask of ones: without any, transformers takes a gap between positions for the start of another text
        return self.model(
            ids, position_ids=positions, attention_mask=torch.ones_like(ids), use_cache=False, **options
        ).logits[:, -last:]

    def tokens(self, weights: Float[np.ndarray, "n g"]) -> Int[np.ndarray, " n"]:
        """How many tokens are run at each row of weights."""
        return _by_token(torch.as_tensor(weights) > 0, self.group.cpu(), True).sum(1).numpy()


def _by_token(values: Tensor, group: Tensor, outside: float) -> Tensor:
    """The value of each token's group, or `outside` for tokens of none."""
    padded = torch.cat([values, torch.full_like(values[:, :1], outside)], 1)
    return padded[:, group]  # −1 is the last column


def _keeps(model: Any) -> bool:
    return "logits_to_keep" in inspect.signature(model.forward).parameters
