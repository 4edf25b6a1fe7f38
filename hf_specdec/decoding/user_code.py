"""Which processors and criteria are known to be stateless: classes of transformers that look at each row by itself.

A known class computes each row of its result from the ids and scores of that row alone, and keeps nothing from call to
call. So it may be called in any order, for drafts that are refused, and in a batch whose other rows hold other texts.
Everything else is user code: it may keep a flag, a matcher or counts per row, or judge all rows together, so it must
see the calls of plain decoding and no others. That includes subclasses, functions, transformers' own classes with state
(SynthID watermarks, classifier-free guidance) and a `prefix_allowed_tokens_fn`, which is the caller's function. A class
whose author knows better says so by an attribute `keeps_no_state = True`.
"""

from __future__ import annotations

from transformers import LogitsProcessorList, StoppingCriteriaList, generation

# They depend on the logits only: one call can process all nodes of a tree.
PREFIX_FREE = frozenset(
    {
        generation.EpsilonLogitsWarper,
        generation.EtaLogitsWarper,
        generation.InfNanRemoveLogitsProcessor,
        generation.LogitNormalization,
        generation.MinPLogitsWarper,
        generation.SuppressTokensLogitsProcessor,
        generation.TemperatureLogitsWarper,
        generation.TopKLogitsWarper,
        generation.TopPLogitsWarper,
        generation.TypicalLogitsWarper,
    }
)

# They also read the row's ids or their number, or its place in the batch. What they store they compute once, from their
# arguments and the size of the vocabulary; the generator of a watermark is seeded from the row's ids in every call.
READS_PREFIX = frozenset(
    {
        generation.EncoderNoRepeatNGramLogitsProcessor,
        generation.EncoderRepetitionPenaltyLogitsProcessor,
        generation.ExponentialDecayLengthPenalty,
        generation.ForcedBOSTokenLogitsProcessor,
        generation.ForcedEOSTokenLogitsProcessor,
        generation.MinLengthLogitsProcessor,
        generation.MinNewTokensLengthLogitsProcessor,
        generation.NoBadWordsLogitsProcessor,
        generation.NoRepeatNGramLogitsProcessor,
        generation.RepetitionPenaltyLogitsProcessor,
        generation.SequenceBiasLogitsProcessor,
        generation.SuppressTokensAtBeginLogitsProcessor,
        generation.TopHLogitsWarper,
        generation.WatermarkLogitsProcessor,
    }
)

# The host evaluates them from a token, its position and the time.
ON_HOST = frozenset({generation.EosTokenCriteria, generation.MaxLengthCriteria, generation.MaxTimeCriteria})

# Stop strings are compared with the last tokens of each row.
CRITERIA = ON_HOST | {generation.StopStringCriteria}


def user_code(logits_processor: LogitsProcessorList, stopping_criteria: StoppingCriteriaList) -> list[str]:
    """The names of all processors and criteria that are not known to be stateless."""
    known = ((logits_processor, PREFIX_FREE | READS_PREFIX), (stopping_criteria, CRITERIA))
    return [
        _name(each)
        for objects, classes in known
        for each in objects
        if type(each) not in classes and getattr(each, "keeps_no_state", False) is not True
    ]


def late_criteria(stopping_criteria: StoppingCriteriaList) -> list[str]:
    """The names of all criteria whose result is not known from a token, its position and the time."""
    return [_name(each) for each in stopping_criteria if type(each) not in ON_HOST]


def _name(function: object) -> str:
    """Of a processor or criterion, which may be a plain function."""
    name: str = getattr(function, "__name__", type(function).__name__)
    return name
