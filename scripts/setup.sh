# Read by quickstart.sh, test.sh and studies/check_vllm.sh: goes to the repository's root, makes a virtual
# environment in .venv with drafttrain and its dependencies, fetches the quickstart target, and puts .venv first
# in PATH. Steps that are done already are skipped. PYTHON=… names another interpreter than python3.

cd "$(dirname "${BASH_SOURCE[0]}")/.."

stop() {
  echo "setup: $*" >&2
  exit 1
}

python=
for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11 python3.10}; do
  if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
    python=$candidate
    break
  fi
done
[ -n "$python" ] || stop "no Python 3.10 or newer with its venv module; install python3 and python3-venv"
command -v "${CXX:-c++}" g++ clang++ >/dev/null ||
  echo "setup: no C++ compiler: decoding takes a slower path, and DeepSpeed cannot build its operators; install g++ for both" >&2

version='import sys; print(sys.version_info[:2])'
found=$(.venv/bin/python -c "$version" 2>/dev/null) || found= # no .venv yet: the callers stop at errors
if [ -n "${PYTHON:-}" ] && [ -n "$found" ] && [ "$found" != "$("$python" -c "$version")" ]; then
  "$python" -m venv --clear .venv || stop "cannot make .venv with $python"
fi
# The editable installation belongs to this folder and these dependencies.
wanted=$("$python" -c 'import hashlib, os; print(hashlib.sha256(open("pyproject.toml", "rb").read() + os.getcwdb()).hexdigest())')
if [ "$(cat .venv/installed 2>/dev/null)" != "$wanted" ]; then
  if ! .venv/bin/python -c 'import sys, pip; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
    "$python" -m venv --clear .venv || stop "cannot make .venv with $python"
  fi
  echo "setup: installing into .venv; this takes some minutes the first time" >&2
  install=(.venv/bin/python -m pip install --quiet --disable-pip-version-check)
  # torch alone and first: a machine whose pip knows a CPU build takes that, and nothing later replaces it.
  "${install[@]}" 'torch>=2.8,<2.14' || stop "pip cannot install torch; see its message above"
  # By path: else Python takes the clone itself for the package where a program is in the folder above it.
  "${install[@]}" --config-settings editable_mode=compat -e '.[test]' || stop "pip cannot install drafttrain's dependencies; see its message above"
  echo "$wanted" >.venv/installed
fi

export PATH="$PWD/.venv/bin:$PATH"
drafttrain fetch-target smollm2-135m-instruct
# Compiles the native kernels for this machine, once; without a compiler it prints so and goes on.
.venv/bin/python -c 'from drafttrain.kernels.build import library; library()'
