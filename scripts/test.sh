#!/usr/bin/env bash
# Checks the whole repository, on any machine with Python 3.10 or newer and a C compiler:
#
#   bash scripts/test.sh [tests/target …]
#
# Further arguments go to pytest.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

# Two processes with one thread each: the tests' tensors are too small for a second thread to help.
export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE TOKENIZERS_PARALLELISM=false

status=0
ruff check . || status=$?
python -m pytest -n 2 --dist loadfile --durations=10 "$@" || status=$?
exit $status
