"""A host of an engine on JAX's CPU, as a process: JAX joins other hosts once per process, and before anything else.

Rank 0 reads prompts and prints what it made, as JSON lines; the others follow.
"""

from __future__ import annotations

import json
import os
import sys

from octavo import LLM, SamplingParams


def serve(options: dict) -> None:
    """Rank 0: for each line of prompts on stdin one line of outputs on stdout."""
    with LLM(**options) as llm:
        print(json.dumps({"ready": os.getpid()}), flush=True)
        for line in sys.stdin:
            request = json.loads(line)
            params = SamplingParams(temperature=0.0, max_tokens=request["tokens"], ignore_eos=True, detokenize=False)
            try:
                outputs = llm.generate(request["prompts"], params, use_tqdm=False)
            except Exception as error:
                print(json.dumps({"error": f"{type(error).__name__}: {error}"}), flush=True)
                raise SystemExit(3) from error
            stats = llm.stats()
            answer = {
                "tokens": [list(o.outputs[0].token_ids) for o in outputs],
                "preemptions": stats.preemptions,
                "prefix_hits": stats.prefix_hits,
            }
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    if given.get("host_rank"):
        from octavo.core.config import EngineConfig
        from octavo.server.follow import follow

        sys.exit(follow(EngineConfig(**given)))
    serve(given)
