"""One vLLM engine in this process, loaded from a checkpoint: prints the tokens that it gives, as JSON.

``servers.fresh_generate`` runs it; everything is in the one argument, JSON too.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any


def main(request: dict[str, Any]) -> None:
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=request["checkpoint"], skip_tokenizer_init=True, enforce_eager=True, max_model_len=2048, max_num_seqs=4,
        kv_cache_memory_bytes=64 << 20, distributed_executor_backend="uni", generation_config="vllm",
        worker_extension_cls=request["extension"] or "", **request["options"],
    )  # fmt: skip
    sampling = SamplingParams(
        temperature=request["temperature"], seed=request["seed"], max_tokens=request["max_tokens"], ignore_eos=True,
        detokenize=False,
    )  # fmt: skip
    prompts = [{"prompt_token_ids": prompt} for prompt in request["prompts"]]
    outputs = engine.generate(prompts, sampling, use_tqdm=False)
    print(json.dumps([list(output.outputs[0].token_ids) for output in outputs]), flush=True)
    # The engine's threads have nothing left to do, and waiting for them costs seconds.
    os._exit(0)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
