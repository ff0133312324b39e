"""A table as a prompt whose rows have weights."""

from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from largeprompt.models.sensitivity import weighted

from ._columns import Columns, arranged
from ._members import Member
from ._network import TabPFN

Output = Literal["logits", "log-odds"]
TEMPERATURE = 0.8  # as published


class TablePrompt:
    r"""Outputs of TabPFN for some rows of a table as a function of the log-weights of its labelled rows.

    A `WeightedPrompt`: with weights 1 it is the table itself, a row of weight 2 is there twice. Outputs are, for each
    row and class $c$, the logit $l_c$ (the mean over members) or the log-odds $\log p_c/(1 - p_c)$; `chosen` takes some
    of them, as pairs of a row and a class. The classes stay the same where all rows of one have weight 0.
    """

    def __init__(
        self,
        network: TabPFN,
        table: np.ndarray,
        labels: np.ndarray,
        rows: np.ndarray,
        members: Sequence[Member],
        *,
        classes: int | None = None,
        of: Output = "logits",
        chosen: np.ndarray | None = None,
    ):
        if of not in get_args(Output):
            raise ValueError(f"of is {of!r}; it must be one of {', '.join(get_args(Output))}")
        device = network.encoder.weight.device
        # through float32, as published, to float64 for averages
        both = np.concatenate([table, rows]).astype(np.float32)
        self._table = torch.as_tensor(both, dtype=torch.float64, device=device)[None]
        self._labels = torch.as_tensor(labels, device=device)[None]
        self._network, self._members, self._of = network, list(members), of
        self.classes = int(labels.max()) + 1 if classes is None else classes
        self._chosen = None if chosen is None else torch.as_tensor(chosen, device=device)

    @property
    def groups(self) -> int:
        """How many labelled rows there are."""
        return self._labels.shape[1]

    @property
    def tokens(self) -> int:
        """How many rows there are, labelled or not."""
        return self._table.shape[1]

    def __call__(self, log_weights: Tensor) -> Tensor:
        """Outputs (b, p) for log-weights (b, groups)."""
        logits = self.logits(log_weights)
        if self._of == "log-odds":
            logits = log_odds(logits)
        if self._chosen is None:
            return logits.flatten(1)
        return logits[:, self._chosen[:, 0], self._chosen[:, 1]]

    def logits(self, log_weights: Tensor) -> Tensor:
        """The mean over members of the logits (b, t, classes)."""
        if log_weights.ndim != 2 or log_weights.shape[1] != self.groups:
            raise ValueError(f"log-weights have shape {tuple(log_weights.shape)}; they must be (any, {self.groups})")
        log_weights = log_weights.to(self._table.device)
        return logits_of(self._network, self._table, self._labels, log_weights, self._members, self.classes)


def logits_of(
    network: TabPFN, tables: Tensor, labels: Tensor, log_weights: Tensor, members: Sequence[Member], classes: int
) -> Tensor:
    """The mean over members of the logits (b, t, classes), for tables (b or 1, n + t, f) with labels (b or 1, n)."""
    tables, labels, log_weights = _without_absent(tables, labels, log_weights)
    columns = Columns(tables, log_weights.double().exp())
    dtype = network.encoder.weight.dtype
    seen = {power: columns.member(power).to(dtype) for power in {member.power for member in members}}
    batch, count = len(log_weights), len(members)
    arranged_tables = [
        arranged(seen[member.power], columns.varied, member.column_shift, network.features) for member in members
    ]
    shifts = torch.tensor([member.class_shift for member in members], device=labels.device)
    shifted = (labels[:, None] + shifts[:, None]) % classes
    with weighted(log_weights.to(dtype).repeat_interleave(count, dim=0)):
        found = network(torch.stack(arranged_tables, dim=1).flatten(0, 1), shifted.expand(batch, -1, -1).flatten(0, 1))
    found = found.unflatten(0, (batch, count))[..., :classes] / TEMPERATURE
    return torch.stack([found[:, i].roll(-member.class_shift, -1) for i, member in enumerate(members)]).mean(dim=0)


def _without_absent(tables: Tensor, labels: Tensor, log_weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same without labelled rows that have weight 0 in their prompt, as far as prompts of a batch allow: faster.

    Where derivatives are asked for nothing is left out.
    """
    absent = log_weights == -torch.inf
    most, n = int((~absent).sum(dim=1).max()), log_weights.shape[1]
    if most == 0:
        raise ValueError("all labelled rows have weight 0; some must be there")
    if most == n or log_weights.requires_grad:
        return tables, labels, log_weights
    batch = len(log_weights)
    order = torch.argsort(absent.to(torch.uint8), dim=1, stable=True)[:, :most]
    known = torch.gather(tables[:, :n].expand(batch, -1, -1), 1, order[..., None].expand(-1, -1, tables.shape[2]))
    rows = torch.cat([known, tables[:, n:].expand(batch, -1, -1)], dim=1)
    return rows, torch.gather(labels.expand(batch, -1), 1, order), torch.gather(log_weights, 1, order)


def log_odds(logits: Tensor) -> Tensor:
    r"""$\log p_c/(1 - p_c) = l_c - \log \sum_{k \ne c} e^{l_k}$, without the cancellation of $1 - p_c$."""
    classes = logits.shape[-1]
    own = torch.eye(classes, dtype=torch.bool, device=logits.device)
    others = logits[..., None, :].masked_fill(own, -torch.inf)
    return logits - others.logsumexp(dim=-1)
