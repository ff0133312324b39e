"""Tables and networks of tests: one table with all that real ones have, and TabPFN's network, small and random."""

import numpy as np
import torch

from largeprompt.models.tables import TabPFN


def drawn_table(rows=60, tests=6):
    """Numbers with a heavy tail, ties, an outlier, a constant column, missing values; three classes; further rows."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows + tests, 7))
    y = (x[:, 0] + 0.5 * x[:, 1] ** 2 + 0.3 * rng.normal(size=rows + tests) > 0.4).astype(int) + (x[:, 2] > 1)
    x[:, 1] = np.exp(1.5 * x[:, 1])
    x[:, 2] = np.round(2 * x[:, 2])
    x[:, 3] = 5.0
    x[3, 4] = 12.0
    x[rng.random(rows + tests) < 0.2, 5] = np.nan
    x[:, 6] = 1e4 + 300 * x[:, 6]
    return x[:rows], y[:rows], x[rows:]


def small_network(seed=0):
    """The network with two layers of width 16, in float64."""
    torch.manual_seed(seed)
    network = TabPFN(width=16, heads=2, hidden=32, layers=2).double()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.mul_(1.5)  # so that attention is far from even
    return network.eval().requires_grad_(False)


def save(network, path, settings=None):
    """Write a network as the published file has it."""
    names = {
        "layers.": "transformer_encoder.layers.",
        "in_proj.": "self_attn.in_proj_",
        "out_proj": "self_attn.out_proj",
    }
    state = {}
    for name, value in network.state_dict().items():
        for ours, theirs in names.items():
            name = name.replace(ours, theirs)
        state[f"module.{name}"] = value.float()
    state["module.criterion.weight"] = torch.ones(10)
    torch.save((state, None, {"nhead": network.layers[0].heads} if settings is None else settings), path)
    return path
