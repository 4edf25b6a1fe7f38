"""What the file of a drafting method imports: the one module for whoever adds a method.

`docs/new-drafter.md` shows the interface, `examples/custom_drafter.py` a whole method. Importing this registers the
methods of the library, and lets `generate` accept drafters.
"""

from hf_specdec.decoding.exchange import Committed, DraftContext, NodeNotes, path_notes
from hf_specdec.decoding.generator import TreeCandidateGenerator
from hf_specdec.decoding.target import TargetModel
from hf_specdec.decoding.targets.modules import apply_head, num_tokens, table_rows
from hf_specdec.decoding.tree import DraftTree
from hf_specdec.drafting.config import FeatureFields, TargetFields
from hf_specdec.drafting.draft_logits import TargetVocabularyLogitsProcessor
from hf_specdec.drafting.drafter import BlockMarginals, Drafter, MarginalsGenerator
from hf_specdec.drafting.growth import best_tree, grow_levels
from hf_specdec.drafting.options import DrafterOptions, TreeOptions
from hf_specdec.drafting.reader import CommittedReader, LastStates, NewTokens
from hf_specdec.drafting.registry import MARGINAL_METHODS, Serving, register, register_marginal_method
from hf_specdec.drafting.shapes import check_shapes
from hf_specdec.hub.formats.base import Format, Headers, Reading, Unsupported
from hf_specdec.hub.formats.keys import OURS, TRANSFORMERS, Section
from hf_specdec.hub.loading import load_drafter
from hf_specdec.hub.pretrained import PretrainedDrafter
from hf_specdec.training.losses import LossName, position_losses
from hf_specdec.training.options import TrainOptions
from hf_specdec.training.recipe import Recipe, ShapeOptions, decoder_shape, register_recipe
from hf_specdec.training.source import Rows, RowSource
from hf_specdec.training.step import StepOutput, TrainingStep

__all__ = [  # noqa: RUF022
    "BlockMarginals", "Committed", "CommittedReader", "DraftContext", "DraftTree", "Drafter", "DrafterOptions",
    "FeatureFields", "Format", "Headers", "LastStates", "LossName", "MARGINAL_METHODS", "MarginalsGenerator",
    "NewTokens", "NodeNotes", "OURS", "PretrainedDrafter", "Reading", "Recipe", "RowSource", "Rows", "Section",
    "Serving", "ShapeOptions", "StepOutput", "TRANSFORMERS", "TargetFields", "TargetModel",
    "TargetVocabularyLogitsProcessor", "TrainOptions", "TrainingStep", "TreeCandidateGenerator", "TreeOptions",
    "Unsupported", "apply_head", "best_tree", "check_shapes", "decoder_shape", "grow_levels", "load_drafter",
    "num_tokens", "path_notes", "position_losses", "register", "register_marginal_method", "register_recipe",
    "table_rows",
]  # fmt: skip
