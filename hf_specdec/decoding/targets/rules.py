"""Recurrences and short convolutions on all nodes of a draft tree in one call.

transformers' functions process a row of tokens; in a tree each node follows its parent. Each rule has the signature of
the transformers' function that it replaces, and returns for node i what that function would return at the end of the
path to i. The recurrences are linear in the state, so products with the ancestor mask replace steps. What a node adds
to the state is recorded on the layer's tape (`recurrent.py`).

`standins.py` installs the rules. Sources: Gated Delta Networks, arXiv 2412.06464; Kimi Linear, arXiv 2510.26692;
Mamba-2, arXiv 2405.21060; Mamba, arXiv 2312.00752. The forms for trees are our own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from hf_specdec.decoding.targets.nodes import NodesOfRound
from hf_specdec.decoding.targets.recurrent import RecurrentLayer


def convolution(
    nodes: NodesOfRound,
    layer: RecurrentLayer,
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **kwargs: Any,
) -> Tensor:
    """A depthwise causal convolution: each node reads the inputs along its own path, and the window before the root.

    Args:
        nodes: of the round.
        layer: that it belongs to.
        hidden_states: [batch, channels, window + nodes], from `RecurrentLayer.update_conv_state`.
        weight: [channels, kernel].
        bias: [channels].
        activation: by transformers' name.
        kwargs: other arguments of transformers; ignored.

    Returns:
        [batch, channels, new]; transformers reads the last columns, those of the new nodes.
    """
    rows, kernel = hidden_states.mT, weight.shape[-1]  # [batch, window + nodes, channels]
    columns = nodes.columns(kernel, rows.device)[:, nodes.first :]
    batch, new, _ = columns.shape
    window = rows.shape[1] - nodes.first - new
    if window < kernel - 1:  # the text is shorter than the window
        rows = nn.functional.pad(rows, (0, 0, kernel - 1 - window, 0))
        window = kernel - 1
    starts = window + rows.shape[1] * torch.arange(batch, device=rows.device)
    taken = rows.flatten(0, 1).index_select(0, (columns + starts.view(-1, 1, 1)).flatten())
    taken = taken.view(batch, new, kernel, -1).to(weight.dtype)
    if taken.dtype.itemsize < 4 or taken.device.type != "cpu":
        # transformers' own operator on the gathered columns, so that products are rounded in the same way.
        taken = taken.permute(0, 3, 1, 2).flatten(2)
        outputs = nn.functional.conv1d(taken, weight.unsqueeze(1), bias, stride=kernel, groups=len(weight))
    else:  # on a CPU, conv1d is slow for so few columns
        outputs = (taken * weight.mT).sum(2)
        outputs = (outputs if bias is None else outputs + bias).mT
    if activation is not None:
        outputs = ACT2FN[activation](outputs)
    return outputs.to(hidden_states.dtype)


def _decays(nodes: NodesOfRound, steps: Tensor) -> tuple[Tensor, Tensor]:
    """Sums of log-decays along the paths, and decays between nodes.

    Args:
        nodes: of the round.
        steps: [batch, nodes, heads, ...], the log-decay of each node.

    Returns:
        sums [batch, heads, new, ...] from the root to each new node, both included; and
        exp(sums of i - sums of j) [batch, heads, new, nodes, ...], 0 where j is not on the path to i.
    """
    sums = nodes.path_sums(steps.dtype, steps.device) @ steps.flatten(2)
    sums = sums.view_as(steps).transpose(1, 2)
    own = sums[:, :, nodes.first :]
    # Masked before the exponential, which may overflow between nodes of different branches.
    difference = own.unsqueeze(3) - sums.unsqueeze(2)
    hidden = nodes.not_on_path(steps.device)
    return own, difference.masked_fill_(hidden if difference.dim() == 4 else hidden.unsqueeze(-1), -torch.inf).exp_()


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of states: float32, as in transformers, or float64 for inputs in float64."""
    return torch.promote_types(dtype, torch.float32)


def delta_rule(
    nodes: NodesOfRound,
    layer: RecurrentLayer,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The gated delta rule: a node decays the state, removes the state's prediction for its key, and adds its value.

    With a decay per head (Gated DeltaNet) or per channel of the key (Kimi Delta Attention). What node i adds depends
    on what its ancestors have added; this is one triangular system for all nodes.

    Args:
        nodes: of the round.
        layer: that it belongs to.
        query: [batch, new, key heads, K].
        key: [batch, new, key heads, K].
        value: [batch, new, heads, V].
        g: log-decays, [batch, new, heads] or [batch, new, heads, K].
        beta: [batch, new, heads].
        chunk_size: of transformers' implementation; ignored.
        initial_state: [batch, heads, K, V], before the root.
        output_final_state: ignored; `initial_state` is returned unchanged.
        use_qk_l2norm_in_kernel: whether queries and keys are normalised here.
        kwargs: other arguments of transformers; ignored.

    Returns:
        [batch, new, heads, V], and `initial_state`.
    """
    assert initial_state is not None, "a round follows a prefill"
    dtype, first, wide, new = query.dtype, nodes.first, _wide(query.dtype), query.shape[1]
    # Keys and queries in one tensor, since the same operations apply to both.
    both = torch.cat([key, query], 1).to(wide)
    value, beta, g = (each.to(wide) for each in (value, beta, g))
    if use_qk_l2norm_in_kernel:
        both = both * ((both * both).sum(-1, keepdim=True) + 1e-6).rsqrt()
    repeats = value.shape[2] // key.shape[2]
    if repeats > 1:
        both = both.repeat_interleave(repeats, 2)
    key, both = both[:, :new], both.transpose(1, 2)
    old_keys, old_writes, old_steps = (part[:, :first] for part in layer.tape.parts) if first else (None,) * 3
    keys, steps = (own if old is None else torch.cat([old, own], 1) for old, own in ((old_keys, key), (old_steps, g)))
    sums, between = _decays(nodes, steps)
    base, keys, scale = initial_state.to(wide), keys.transpose(1, 2), key.shape[-1] ** -0.5
    if g.dim() == 3:
        decays = sums.unsqueeze(-1).exp()
        predicted, read = ((both @ keys.mT).unflatten(2, (2, new)) * between.unsqueeze(2)).unbind(2)
        from_base, read_base = ((both @ base).unflatten(2, (2, new)) * decays.unsqueeze(2)).unbind(2)
    else:
        both = both.unflatten(2, (2, new))
        predicted, read = torch.einsum("bhtic,bhjc,bhijc->tbhij", both, keys, between).unbind()
        from_base, read_base = ((both * sums.exp().unsqueeze(2)) @ base.unsqueeze(2)).unbind(2)
    beta = beta.transpose(1, 2).unsqueeze(-1)
    predicted = predicted * beta
    writes = beta * (value.transpose(1, 2) - from_base)
    if old_writes is not None:
        old_writes = old_writes.transpose(1, 2)
        writes = writes - predicted[..., :first] @ old_writes
    # Parents come before children, so that the matrix is lower triangular; its diagonal is not read.
    writes = torch.linalg.solve_triangular(predicted[..., first:], writes, upper=False, unitriangular=True)
    written = writes if old_writes is None else torch.cat([old_writes, writes], 2)
    outputs = (read_base + read @ written) * scale
    layer.tape.add(first, (key, writes.transpose(1, 2), g), advance_outer)
    return outputs.transpose(1, 2).to(dtype), initial_state


def state_space_scan(
    nodes: NodesOfRound,
    layer: RecurrentLayer,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,  # noqa: N803  (transformers' names)
    B: Tensor,  # noqa: N803
    C: Tensor,  # noqa: N803
    chunk_size: int = 0,
    D: Tensor | None = None,  # noqa: N803
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    **kwargs: Any,
) -> Any:
    """Mamba-2: a node decays the state by its own step size, and adds to it.

    Step sizes are not clamped to `dt_limit`: transformers clamps them for several tokens, but not for one token, and
    plain decoding runs one.

    Args:
        nodes: of the round.
        layer: that it belongs to.
        hidden_states: [batch, new, heads, P].
        dt: step sizes [batch, new, heads].
        A: [heads].
        B: [batch, new, groups, N].
        C: [batch, new, groups, N].
        chunk_size: of transformers' implementation; ignored.
        D: [heads].
        dt_bias: [heads].
        initial_states: [batch, heads, P, N], before the root.
        dt_softplus: whether softplus is applied to step sizes.
        dt_limit: ignored, see above.
        return_final_states: whether `initial_states` is returned too, unchanged.
        kwargs: other arguments of transformers; ignored.

    Returns:
        [batch, new, heads, P], and with `return_final_states` `initial_states`.
    """
    assert initial_states is not None, "a round follows a prefill"
    first, heads, wide = nodes.first, hidden_states.shape[2], _wide(hidden_states.dtype)
    if dt_bias is not None:
        dt = dt + dt_bias.to(dt.dtype)
    if dt_softplus:
        dt = nn.functional.softplus(dt)
    inputs, sizes = hidden_states.to(wide), dt.to(wide)
    keys, queries = (each.to(wide).repeat_interleave(heads // each.shape[2], 2) for each in (B, C))
    added = inputs * sizes.unsqueeze(-1)
    all_added, all_keys, steps = layer.tape.add(first, (added, keys, sizes * A.to(wide)), advance_outer)
    sums, between = _decays(nodes, steps)
    read = torch.einsum("bihn,bjhn->bhij", queries, all_keys) * between
    outputs = torch.einsum("bhij,bjhp->bihp", read, all_added)
    base = torch.einsum("bihn,bhpn->bihp", queries, initial_states.to(wide))
    outputs = outputs + base * sums.exp().transpose(1, 2).unsqueeze(-1)
    if D is not None:
        outputs = outputs + D.unsqueeze(-1) * inputs
    outputs = outputs.contiguous()  # callers call `view`
    return (outputs, initial_states) if return_final_states else outputs


def selective_scan(
    nodes: NodesOfRound,
    layer: RecurrentLayer,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,  # noqa: N803
    B: Tensor,  # noqa: N803
    C: Tensor,  # noqa: N803
    D: Tensor | None = None,  # noqa: N803
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    **kwargs: Any,
) -> Any:
    """Mamba: each element of the state has its own decay, so nodes are computed level by level.

    Args:
        nodes: of the round.
        layer: that it belongs to. Its state is read here, since transformers does not pass it.
        hidden_states: [batch, channels, new].
        dt: step sizes [batch, channels, new].
        A: [channels, N].
        B: [batch, N, new].
        C: [batch, N, new].
        D: [channels].
        z: gates, [batch, channels, new].
        delta_bias: [channels].
        delta_softplus: whether softplus is applied to step sizes.
        return_last_state: whether the layer's state is returned too, unchanged.
        kwargs: other arguments of transformers; ignored.

    Returns:
        [batch, channels, new], and with `return_last_state` the layer's state [batch, channels, N].
    """
    dtype, first, wide = hidden_states.dtype, nodes.first, _wide(hidden_states.dtype)
    if delta_bias is not None:
        dt = dt + delta_bias.to(dt.dtype).unsqueeze(-1)
    if delta_softplus:
        dt = nn.functional.softplus(dt)
    sizes, inputs = (each.transpose(1, 2).to(wide) for each in (dt, hidden_states))  # [batch, new, channels]
    keys, queries = (each.transpose(1, 2).to(wide) for each in (B, C))
    decays = (sizes.unsqueeze(-1) * A.to(wide)).exp()
    added = (sizes * inputs).unsqueeze(-1) * keys.unsqueeze(2)
    decays, added = layer.tape.add(first, (decays, added), advance_scan)
    base: Tensor = layer.recurrent_states[0]
    parents = (1 + nodes.parents(dt.device)).view(*decays.shape[:2], 1, 1).expand_as(decays)
    states = decays * base.to(wide).unsqueeze(1) + added
    for _ in range(nodes.tree.max_depth):  # each iteration completes one more level
        states = decays * torch.cat([base.to(wide).unsqueeze(1), states], 1).gather(1, parents) + added
    outputs = (states[:, first:] @ queries.unsqueeze(-1)).squeeze(-1)
    if D is not None:
        outputs = outputs + D.to(wide) * inputs
    outputs = outputs.transpose(1, 2)
    if z is not None:
        outputs = outputs * nn.functional.silu(z.to(wide))
    outputs = outputs.to(dtype)
    return (outputs, base) if return_last_state else outputs


def advance_outer(base: Tensor, parts: Sequence[Tensor], kept: Tensor) -> Tensor:
    """The state [batch, heads, X, Y] after a path whose nodes decay it and add outer products.

    Args:
        base: [batch, heads, X, Y], before the path.
        parts: vectors [batch, steps, heads, X] and [batch, steps, heads, Y], and log-decays, [batch, steps, heads] or
            [batch, steps, heads, X].
        kept: [batch, steps] bool, whether a node is part of the path.
    """
    left, right, steps = parts
    scalar = steps.dim() == 3
    if scalar:
        steps = steps.unsqueeze(-1)
    hidden = ~kept.view(*kept.shape, 1, 1)
    sums = steps.masked_fill(hidden, 0).cumsum(1)
    whole = sums[:, -1:]
    left = (left * (whole - sums).exp()).masked_fill(hidden, 0)
    right = right.masked_fill(hidden, 0)  # may be NaN at nodes that are not kept
    decay = whole.squeeze(1).exp().unsqueeze(-1)
    return decay * base.to(left.dtype) + torch.einsum("bshx,bshy->bhxy", left, right)


def advance_scan(base: Tensor, parts: Sequence[Tensor], kept: Tensor) -> Tensor:
    """The state [batch, ...] after a path whose nodes multiply it and add to it elementwise.

    Args:
        base: [batch, ...], before the path.
        parts: factors and summands, each [batch, steps, ...].
        kept: [batch, steps] bool, whether a node is part of the path.
    """
    state = base.to(parts[0].dtype)
    for step in range(kept.shape[1]):
        decay, added = (part[:, step] for part in parts)
        state = (decay * state + added).where(kept[:, step].view(-1, *[1] * (state.dim() - 1)), state)
    return state
