#!/usr/bin/env bash
# Trains a drafter for SmolLM2-135M-Instruct for some minutes and measures what it is worth, on any machine with
# Python 3.10 or newer:
#
#   bash scripts/quickstart.sh [--training.max_minutes 2 …]
#
# Further arguments go to `drafttrain run recipes/quickstart.yaml`.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
exec drafttrain run recipes/quickstart.yaml "$@"
