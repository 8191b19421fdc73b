"""Serve exported drafters with vLLM and count what it accepts, run by the Python of an environment that has
vLLM (`studies/check_vllm.sh` makes one).

Reads {"target", "dtype", "prompts" (token ids), "max_new_tokens", "stop", "drafters": [{"name", "method",
"model", "tokens"}]} from standard input; a drafter whose method is null decodes plainly. Writes {name:
{"outputs" (token ids), "drafts", "accepted", "seconds"}} to the file that the command line names: `drafts` is
the number of steps that had drafts, `accepted` in how many of them the draft token at each position was
accepted. Greedy. Knows nothing of drafttrain, which is not installed there.
"""

import gc
import json
import os
import sys
import time

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# nothing is timed, and on a busy machine bound threads wait for each other
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", str(min(os.sched_getaffinity(0))))
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # counters are in this process

DRAFTS, ACCEPTED = "vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens_per_pos"


def counters(model) -> tuple[int, list[int]]:
    """Return the steps with drafts so far, and in how many of them the draft token at each position was
    accepted."""
    found = {metric.name: metric for metric in model.get_metrics()}
    if DRAFTS not in found:
        return 0, []
    return found[DRAFTS].value, list(found[ACCEPTED].values)


def serve(job: dict, drafter: dict) -> dict:
    """Serve one drafter; return its outputs and counters."""
    from vllm import LLM, SamplingParams

    speculation = None
    if drafter["method"] is not None:
        speculation = {
            "method": drafter["method"],
            "model": drafter["model"],
            "num_speculative_tokens": drafter["tokens"],
        }
    model = LLM(
        job["target"],
        dtype=job["dtype"],
        max_model_len=2048,
        max_num_seqs=8,
        speculative_config=speculation,
        enable_prefix_caching=False,
        enforce_eager=True,  # nothing is timed, and compiling takes longer than these prompts
        disable_log_stats=False,  # or there are no counters
    )
    # no seed: vLLM's CPU build refuses it
    sampling = SamplingParams(temperature=0.0, max_tokens=job["max_new_tokens"], stop_token_ids=job["stop"])

    drafts, accepted = counters(model)  # the registry is the process's: an earlier model's counts stay in it
    started, outputs = time.perf_counter(), []
    prompts = [{"prompt_token_ids": ids} for ids in job["prompts"]]
    for answer in model.generate(prompts, sampling, use_tqdm=False):
        outputs.append(list(answer.outputs[0].token_ids))
    seconds = time.perf_counter() - started
    drafts_now, accepted_now = counters(model)
    model.llm_engine.engine_core.shutdown()
    del model
    gc.collect()
    return {
        "outputs": outputs,
        "drafts": drafts_now - drafts,
        "accepted": [b - a for a, b in zip(accepted or [0] * len(accepted_now), accepted_now)],
        "seconds": seconds,
    }


def main() -> None:
    job = json.load(sys.stdin)
    found = {drafter["name"]: serve(job, drafter) for drafter in job["drafters"]}
    with open(sys.argv[1], "w", encoding="utf-8") as file:
        json.dump(found, file)


if __name__ == "__main__":
    main()
