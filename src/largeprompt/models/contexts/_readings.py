"""Two readings of a context that need no weights on sentences: attention on them, and gradients of their embeddings."""

import numpy as np
import torch
from jaxtyping import Float

from ._prompt import ContextPrompt


def attention_weights(prompt: ContextPrompt) -> Float[np.ndarray, " g"]:
    """The attention that the places which predict the answer pay to each group, averaged over layers and heads."""
    model = prompt.model
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")  # the others do not return weights
    try:
        with torch.no_grad():
            found = model(prompt.ids[None, :-1], use_cache=False, output_attentions=True).attentions
    finally:
        model.set_attn_implementation(before)
    prompt.passes += 1
    by_token = torch.stack([each[0, :, -prompt.answer :].float().mean((0, 1)) for each in found]).mean(0)
    return _by_group(prompt, by_token)


def gradient_times_input(prompt: ContextPrompt) -> Float[np.ndarray, " g"]:
    """The sum over a group's tokens of the product of embedding and gradient of the answer's log-probability."""
    ids = prompt.ids[None, :-1]
    embedded = prompt.model.get_input_embeddings()(ids).detach().requires_grad_()
    logits = prompt.model(inputs_embeds=embedded, use_cache=False).logits[0, -prompt.answer :].float()
    total = logits.log_softmax(1).gather(1, prompt.ids[-prompt.answer :, None]).sum()
    (gradient,) = torch.autograd.grad(total, embedded)
    prompt.passes += 3
    return _by_group(prompt, (gradient * embedded.detach())[0].float().sum(1))


def _by_group(prompt: ContextPrompt, by_token: torch.Tensor) -> Float[np.ndarray, " g"]:
    """Sums over the tokens of each group."""
    group = prompt.group[:-1]
    found = torch.zeros(prompt.groups, device=by_token.device)
    return found.index_add(0, group[group >= 0], by_token[group >= 0]).double().cpu().numpy()
