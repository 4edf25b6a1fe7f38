"""Known processors that read the text, for all nodes of a tree at once: the tree gives each node's prefix.

On a device they need no step of the host per accepted token. transformers' own classes compute the scores. There are
two kinds: a repetition penalty depends on which tokens occur, so all nodes of a row can have ids of one length; a
minimum length changes scores only below it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation import (
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)

from hf_specdec.decoding.sequences import Sequences
from hf_specdec.decoding.tree import DraftTree, from_host
from hf_specdec.decoding.user_code import PREFIX_FREE


def works_at_nodes(processor: LogitsProcessor) -> bool:
    """Whether `process_nodes` can apply it."""
    kind = type(processor)
    if kind is RepetitionPenaltyLogitsProcessor:
        return not isinstance(processor.prompt_ignore_length, int)
    return kind in PREFIX_FREE or kind in (MinLengthLogitsProcessor, MinNewTokensLengthLogitsProcessor)


def process_nodes(processors: LogitsProcessorList, tree: DraftTree, logits: Tensor, sequences: Sequences) -> Tensor:
    """[batch, nodes, vocab] logits, each node's processed with its own prefix.

    Args:
        processors: that work at nodes.
        tree: of the remaining rows.
        logits: [batch, nodes, vocab].
        sequences: the rows up to and including the root.
    """
    flat, root_ids = logits.reshape(-1, logits.shape[-1]), tree.token_ids[:, :1]
    for processor in processors:
        if type(processor) in PREFIX_FREE:
            flat = processor(tree.token_ids.reshape(-1, 1), flat)
            continue
        lengths = sequences.of_remaining(sequences.lengths)
        known = from_host(lengths, logits.device).unsqueeze(1)
        if isinstance(processor, RepetitionPenaltyLogitsProcessor):
            text = sequences.remaining_ids[:, : max(lengths)]
            columns = torch.arange(text.shape[1], device=text.device)
            in_text, in_path, other = columns < known, tree.ancestor_mask, root_ids
            if processor.prompt_ignore_length is not None:  # padding: such a version takes one id more than there are
                ignored = processor.prompt_ignore_length.to(text.device)
                ignored = ignored[from_host(sequences.rows, text.device)].unsqueeze(1)
                in_text, other = in_text & (columns >= ignored), torch.full_like(root_ids, logits.shape[-1])
                in_path = in_path & (known + tree.depths > ignored).unsqueeze(1)
            text = text.where(in_text, other).unsqueeze(1).expand(-1, tree.num_nodes, -1)
            path = tree.token_ids.unsqueeze(1).where(in_path, other.unsqueeze(1))[..., 1:]  # the root is in the text
            penalty = RepetitionPenaltyLogitsProcessor(processor.penalty)
            flat = penalty(torch.cat([text, path], -1).flatten(0, 1), flat)
        else:
            least = getattr(processor, "min_length", None)
            if least is None:
                least = processor.prompt_length_to_skip + processor.min_new_tokens
            too_short = (known + tree.depths < least).reshape(-1, 1)
            flat = processor(root_ids[:, :0], flat).where(too_short, flat)
    return flat.view(logits.shape)
