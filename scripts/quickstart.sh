#!/usr/bin/env bash
# Trains a drafter for SmolLM2-135M-Instruct for some minutes and measures what it is worth, on any machine with
# Python 3.11 or newer. After the installation it takes the minutes that it is given, 20 by default:
#
#   bash scripts/quickstart.sh [--minutes 20] [--training.lr 1e-4 …]
#
# All arguments go to `drafttrain quickstart`.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
exec drafttrain quickstart "$@"
