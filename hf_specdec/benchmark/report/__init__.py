"""Reports of a run, made from its records alone: a Markdown table and one self-contained HTML page."""

from hf_specdec.benchmark.report.markdown import markdown
from hf_specdec.benchmark.report.page import page

__all__ = ["markdown", "page"]
