"""vLLM's offline engine on some prompts; run by the engine's Python, which need not have this library.

    python offline.py request.json answer.json

The request has `engine`, arguments of `vllm.LLM`; `prompts`, token ids of each; and `max_tokens`. The answer has
`tokens` and `counts`, vLLM's counts of speculation by their names.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any


def main(request_file: str, answer_file: str) -> None:
    """Writes the answer to a request."""
    from vllm import LLM, SamplingParams

    request: dict[str, Any] = json.loads(Path(request_file).read_text())
    engine = LLM(**request["engine"], disable_log_stats=False)
    prompts = [{"prompt_token_ids": ids} for ids in request["prompts"]]
    start = time.perf_counter()
    outputs = engine.generate(prompts, SamplingParams(temperature=0, max_tokens=request["max_tokens"]))
    seconds = time.perf_counter() - start
    counts = {
        metric.name.removeprefix("vllm:spec_decode_"): getattr(metric, "value", None) or getattr(metric, "values", 0)
        for metric in engine.get_metrics()
        if metric.name.startswith("vllm:spec_decode_")
    }
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    Path(answer_file).write_text(json.dumps({"tokens": tokens, "counts": counts, "seconds": seconds}))


if __name__ == "__main__":  # vLLM starts processes that import this file
    main(*sys.argv[1:])
