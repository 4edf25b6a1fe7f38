"""Pictures of a traced call: the draft tree of a round, and the text with drafted tokens shaded.

As SVG and HTML without other files, and as coloured text for a terminal. They show a `Trace`:

    drafter.trace = Trace()
    model.generate(**inputs, assistant_model=drafter)
    Path("rounds.html").write_text(trace_page(drafter.trace, tokenizer))
"""

from hf_specdec.decoding.trace import Trace
from hf_specdec.visualize.page import trace_page
from hf_specdec.visualize.terminal import terminal_text, terminal_tree
from hf_specdec.visualize.text import shaded_text
from hf_specdec.visualize.tree import tree_svg

__all__ = ["Trace", "shaded_text", "terminal_text", "terminal_tree", "trace_page", "tree_svg"]
