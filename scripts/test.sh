#!/usr/bin/env bash
# Checks the whole repository, on any machine with Python 3.11 or newer:
#
#   bash scripts/test.sh [tests/target_lm …]
#
# Further arguments go to pytest.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

# A browser for the tests of the report page, where it costs one command; without one they are skipped.
has_browser() {
  [ -n "${CHROMIUM:-}" ] || command -v chromium chromium-browser google-chrome >/dev/null
}
if ! has_browser && [ "$(id -u)" = 0 ] && grep -qs '^ID=debian' /etc/os-release; then
  echo "test: installing Chromium" >&2
  {
    timeout 120 apt-get -qq update
    DEBIAN_FRONTEND=noninteractive timeout 300 apt-get -qq install -y --no-install-recommends chromium
  } >/dev/null 2>&1 || echo "test: no Chromium to be had; tests that open pages are skipped" >&2
fi

# Two processes with one thread each: the tests' tensors are too small for a second thread to help.
export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE TOKENIZERS_PARALLELISM=false

status=0
ruff check . || status=$?
python -m pytest -n 2 --dist loadfile --durations=10 "$@" || status=$?
exit $status
