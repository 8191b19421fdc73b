"""The quickstart in a fresh clone: time, memory, result, and on one core."""

import contextlib
import math
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from drafttrain.data.prompts import Task, read_prompts, spread
from drafttrain.evaluation.measure import (
    MeasurementLog,
    drafting,
    measure,
    transformers_generate,
)
from drafttrain.evaluation.metrics import (
    TRANSFORMERS,
    ratio,
    ratio_interval,
)
from drafttrain.evaluation.stock import load_stock
from drafttrain.utils.errors import UserError
from drafttrain.utils.files import read_json
from drafttrain.utils.provenance import content_hash
from drafttrain.utils.writing import write_json
from studies import ROOT
from studies.figures.columns import AVX2, in_process_of_its_own
from studies.figures.machine_setting import (
    MT_BENCH,
    NEW_TOKENS,
    in_dtype,
    load,
)
from studies.goals import Measured, Run, run_and_watch

ONE_CORE_MINUTES = 10


def fresh_quickstart(
    kept: Path,
    prefix: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    words: Sequence[str] = (),
) -> tuple[float, int]:
    """Run the quickstart script in a fresh clone with an empty cache, installation included.

    Args:
        kept: folder for its log, summary, evaluation and bundle.
        prefix: words before the command.
        environment: variables besides the present ones.
        words: arguments of the script.

    Returns:
        seconds, and the most bytes that its processes held.

    Raises:
        RuntimeError: it failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder) / "drafttrain"
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
        variables = {**os.environ, "DRAFTTRAIN_CACHE": f"{folder}/cache", **(environment or {})}
        for name in ("VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME"):
            variables.pop(name, None)
        command = [*prefix, "bash", "scripts/quickstart.sh", *words]
        status, seconds, peak = run_and_watch(command, clone, variables, kept / "log.txt")
        if status != 0:
            raise RuntimeError(f"scripts/quickstart.sh ended with {status}; see {kept / 'log.txt'}")
        output = clone / "runs/quickstart"
        for name in ("summary.json", "bundle", "evaluation"):
            if (output / name).is_dir():
                shutil.copytree(output / name, kept / name, dirs_exist_ok=True)
            else:
                shutil.copyfile(output / name, kept / name)
    return seconds, peak


def fresh_run(kept: Path, prefix: Sequence[str] = (), **options: Any) -> dict[str, float]:
    """Run `fresh_quickstart`, once for a resumed run."""
    record = kept / "run.json"
    if not record.exists():
        seconds, peak = fresh_quickstart(kept, prefix, **options)
        write_json(record, {"seconds": seconds, "peak_gb": peak / 1e9})
    return read_json(record)


def quickstart(run: Run, avx2: bool = False) -> Measured:
    """Run the quickstart in a fresh clone; return its time and memory, and what it came to.

    Raises:
        UserError: its speed cannot be measured, as on a busy machine; a resumed run goes on there.
    """
    suffix, environment = ("_avx2", AVX2) if avx2 else ("", {})
    kept = run.folder(f"machine_quickstart{suffix}")
    with memory_limit(6e9) as prefix:
        done = fresh_run(kept, prefix, environment=environment)
    speed = in_process_of_its_own("quickstart_speed", run, kept, environment)["quickstart_speed"]
    if "failed" in speed:
        raise UserError(speed["error"])
    facts = quickstart_facts(read_json(kept / "evaluation/summary.json"), speed)
    failed = unmet(facts, least_speedup=1.05 if avx2 else 1.15)
    judged = {**facts, "ok": not failed, "why": "; ".join(failed), "machine": speed.get("machine", {})}
    found = {f"quickstart_wall_s{suffix}": {"value": done["seconds"], **judged}}
    if not avx2:
        broken = [] if facts["lossless"] else ["not lossless"]
        limited = "a cgroup" if prefix else "nothing: no cgroup can be made here"
        notes = {"limited_by": limited, "ok": not broken, "why": "; ".join(broken)}
        found["six_gb"] = {"value": done["peak_gb"], **notes}
    return found


def quickstart_facts(summary: dict[str, Any], speed: dict[str, Any]) -> dict[str, Any]:
    """Return the result of the quickstart's own evaluation, with the speed against transformers in its best
    dtype."""
    row, lossless = summary["tasks"]["all"][summary["tree"]], summary["lossless"]
    return {
        "tree": summary["tree"],
        "lossless": bool(lossless) and lossless["mismatches"] == 0,
        "lossless_prompts": lossless["prompts"] if lossless else 0,
        "accept_len": row["accept_len"],
        "best_vs_ar": row["speedup"],
        "best_vs_transformers": speed["value"],
        "transformers_dtype": speed.get("transformers_dtype"),
        "flags": row.get("flags", []),
    }


def unmet(facts: dict[str, Any], least_speedup: float) -> list[str]:
    """List the conditions of the quickstart that do not hold."""
    checks = {
        "not lossless": facts["lossless"],
        "accept_len below 1.8": facts["accept_len"] >= 1.8,
        f"not more than {least_speedup} times plain decoding": facts["best_vs_ar"] > least_speedup,
        "not more than 1.15 times transformers": (facts["best_vs_transformers"] or 0) > 1.15,
    }
    return [problem for problem, holds in checks.items() if not holds]


def quickstart_speed(run: Run, folder: Path) -> Measured:
    """Time the quickstart's bundle with its tree against transformers in its best dtype, on some first
    turns."""
    run.check_quiet()
    loaded = load(folder / "bundle")
    target = loaded.target
    prompts = spread(read_prompts(MT_BENCH), run.prompts(quick=4, full=20))
    stock = load_stock(target, True, prompts[0].token_ids(target.tokenizer), folder)
    methods = {
        TRANSFORMERS: transformers_generate(target, model=stock.model),
        loaded.tree: drafting(target, loaded.proposer()),
    }
    log = MeasurementLog(folder / "measurements.jsonl", content_hash(folder / "bundle"))
    measured = measure(target, methods, Task("mt_bench", prompts), log, NEW_TOKENS)
    return {
        "quickstart_speed": {
            "value": ratio(measured, TRANSFORMERS, loaded.tree),
            "interval": ratio_interval(measured, TRANSFORMERS, loaded.tree),
            "transformers_dtype": stock.dtype,
            "transformers_tokens_per_second": stock.tokens_per_second,
            "machine": in_dtype(target),
        }
    }


def one_core(run: Run) -> Measured:
    """Run the quickstart on one core: 1 if its summary is there and nothing was lost."""
    if shutil.which("taskset") is None:
        return {"one_core": {"value": None, "skipped": "no taskset, which keeps a command on one core"}}
    kept = run.folder("machine_one_core")
    prefix = ["taskset", "-c", str(min(os.sched_getaffinity(0)))]
    try:
        done = fresh_run(kept, prefix, words=["--minutes", str(ONE_CORE_MINUTES)])
    except RuntimeError as error:  # it did not end well, which is the result
        return {"one_core": {"value": 0.0, "ok": False, "why": str(error), "minutes": ONE_CORE_MINUTES}}
    lossless = read_json(kept / "evaluation/summary.json")["lossless"]
    held = (kept / "summary.json").exists() and bool(lossless) and lossless["mismatches"] == 0
    return {"one_core": {"value": float(held), "wall_s": done["seconds"], "minutes": ONE_CORE_MINUTES}}


@contextlib.contextmanager
def memory_limit(size: float, root: Path = Path("/sys/fs/cgroup")):
    """Give the words before a command that limit its memory and that of its children; none where no group
    with a limit can be made, which takes cgroup v2 and a right that most users lack."""
    group = root / f"drafttrain-{os.getpid()}"
    try:
        group.mkdir()
    except OSError:
        yield []
        return
    try:
        (group / "memory.max").write_text(f"{math.floor(size)}")
        yield ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh"]
    except OSError:
        yield []
    finally:
        with contextlib.suppress(OSError):
            group.rmdir()
