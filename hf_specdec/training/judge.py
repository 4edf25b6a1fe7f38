"""Training a judge: which of the tokens that the target did not choose lead to the same text all the same.

The paper asks people which drafted tokens are correct. Here the target's own agreement is the label. At some positions
of what the target writes, another one of its likely tokens is put in place of its choice, and the target continues. If
the end of that continuation occurs in the text that it wrote by itself, the token was another way to say the same: a
positive example. A linear head on the target's state at this token learns the label.
Source: Judge Decoding, arXiv 2501.19309, Section 4. The rule is `hf_specdec/decoding/relaxed.py`; it is not lossless.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel

from hf_specdec.decoding.relaxed import Judge
from hf_specdec.decoding.targets.taps import decoder_states


@dataclass(frozen=True)
class JudgedTokens:
    """Examples for a judge.

    Attributes:
        states: [examples, hidden] float32, the target's state at each token, after its final norm.
        agreed: [examples] bool, whether the target went on to the same text.
    """

    states: Tensor
    agreed: Tensor


def rejoins(own: Sequence[int], other: Sequence[int], least: int) -> bool:
    """Whether the last `least` tokens of a continuation occur in the target's own one.

    Examples:
        >>> rejoins([5, 6, 7, 8, 9], [1, 7, 8], 2), rejoins([5, 6, 7, 8, 9], [1, 2, 8], 2)
        (True, False)
    """
    end = list(other[-least:])
    return len(end) == least and any(list(own[at : at + least]) == end for at in range(len(own) - least + 1))


@torch.no_grad()
def judged_tokens(
    target: PreTrainedModel,
    prompts: Sequence[Tensor],
    *,
    new_tokens: int = 96,
    places: int = 8,
    ranks: int = 4,
    horizon: int = 24,
    least: int = 8,
    seed: int = 0,
) -> JudgedTokens:
    """Lets the target write, and continue after tokens that it did not choose.

    Args:
        target: the model.
        prompts: ids [1, seq] int64 each.
        new_tokens: of what the target writes after each prompt.
        places: positions of each text at which another token is tried.
        ranks: the other token is one of the `ranks` likeliest; the likeliest one is the target's own.
        horizon: tokens that the target continues with after it.
        least: tokens at the end of the continuation that must occur in the target's own text.
        seed: of positions and ranks.

    Raises:
        ValueError: the texts are too short, or a number is out of range.
    """
    if ranks < 2 or not 1 <= least <= horizon < new_tokens:
        raise ValueError(
            f"ranks={ranks}, least={least}, horizon={horizon} and new_tokens={new_tokens} must satisfy 2 <= ranks and "
            "1 <= least <= horizon < new_tokens."
        )
    generator = torch.Generator().manual_seed(seed)
    pad = target.generation_config.pad_token_id
    common = {"eos_token_id": target.generation_config.eos_token_id, "pad_token_id": 0 if pad is None else pad}
    whole, rest = (GenerationConfig(max_new_tokens=count, do_sample=False, **common) for count in (new_tokens, horizon))
    states, agreed = [], []
    for prompt in prompts:
        start = prompt.shape[1]
        text = target.generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=whole)
        last = text.shape[1] - horizon  # the continuation must have room in the target's own text
        if last <= start:
            continue
        likely = target(text).logits[0].topk(ranks, dim=-1).indices
        chosen = torch.randperm(last - start, generator=generator)[:places] + start
        for place in chosen.tolist():
            rank = int(torch.randint(1, ranks, (), generator=generator))
            token = likely[place - 1, rank].view(1, 1)
            tried = torch.cat([text[:, :place], token], dim=1)
            states.append(decoder_states(target, tried)[0, -1].float())
            other = target.generate(tried, attention_mask=torch.ones_like(tried), generation_config=rest)
            agreed.append(rejoins(text[0, place:].tolist(), other[0, place + 1 :].tolist(), least))
    if not states:
        raise ValueError(
            f"None of {len(prompts)} texts of the target is longer than horizon={horizon} tokens: give more prompts, "
            "or a smaller horizon."
        )
    return JudgedTokens(torch.stack(states), torch.tensor(agreed, device=states[0].device))


def train_judge(
    tokens: JudgedTokens,
    target: str = "",
    *,
    threshold: float = 0.5,
    weight_decay: float = 1e-3,
    refusal_weight: float = 1.0,
) -> Judge:
    """Fits the head by logistic regression, both classes with the same total weight.

    Args:
        tokens: of the target.
        target: its name, for messages.
        threshold: see `Judge`.
        weight_decay: of the weights, on states scaled to mean 0 and variance 1.
        refusal_weight: of tokens that must be refused, relative to the others; above 1 the judge accepts less.

    Raises:
        ValueError: all tokens have the same label.
    """
    agreed = tokens.agreed.float()
    positive, count = int(agreed.sum()), len(agreed)
    if positive in (0, count):
        raise ValueError(
            f"The target agreed with {positive} of {count} tokens: a judge needs both. Give more prompts, or another "
            "`least` of judged_tokens."
        )
    mean, deviation = tokens.states.mean(0), tokens.states.std(0).clamp(min=1e-6)
    inputs = (tokens.states - mean) / deviation
    weights = torch.where(tokens.agreed, count / positive, refusal_weight * count / (count - positive)) / 2
    parameters = torch.zeros(inputs.shape[1] + 1, device=inputs.device, requires_grad=True)
    optimizer = torch.optim.LBFGS([parameters], max_iter=200, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        logits = inputs @ parameters[:-1] + parameters[-1]
        value = nn.functional.binary_cross_entropy_with_logits(logits, agreed, weights)
        value = value + weight_decay * parameters[:-1].square().sum()
        value.backward()
        return value

    optimizer.step(loss)
    weight = parameters.detach()[:-1] / deviation
    return Judge(weight.cpu(), float(parameters.detach()[-1] - weight @ mean), threshold, target)
