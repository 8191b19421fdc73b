# Read by quickstart.sh, test.sh and studies/check_vllm.sh: goes to the repository's root, makes a virtual
# environment in .venv with drafttrain and its dependencies, fetches the quickstart target, and puts .venv first
# in PATH. Steps that are done already are skipped. PYTHON=… names another interpreter than python3.

cd "$(dirname "${BASH_SOURCE[0]}")/.."

stop() {
  echo "setup: $*" >&2
  exit 1
}

python=
candidates=(python3 python3.14 python3.13 python3.12 python3.11)
[ -z "${PYTHON:-}" ] || candidates=("$PYTHON")
for candidate in "${candidates[@]}"; do
  if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    python=$candidate
    break
  fi
done
[ -n "$python" ] || stop "no Python 3.11 or newer with its venv module; install python3.11 and python3.11-venv or newer ones"
command -v "${CXX:-c++}" g++ clang++ >/dev/null ||
  echo "setup: no C++ compiler: decoding takes a slower path, and DeepSpeed cannot build its operators; install g++ for both" >&2

version='import sys; print(sys.version_info[:2])'
found=$(.venv/bin/python -c "$version" 2>/dev/null) || found= # no .venv yet: the callers stop at errors
make_environment() {
  [ ! -e .venv ] || echo "setup: making .venv again: $1" >&2
  "$python" -m venv --clear .venv || stop "cannot make .venv with $python"
}
if [ -n "${PYTHON:-}" ] && [ -n "$found" ] && [ "$found" != "$("$python" -c "$version")" ]; then
  make_environment "PYTHON names another version"
fi
# The scripts of an environment name the folder that it was made in.
if [ -f .venv/bin/activate ]; then
  made_in=$(set +eu; unset VIRTUAL_ENV; . .venv/bin/activate >/dev/null 2>&1; echo "${VIRTUAL_ENV:-}")
  [ -z "$made_in" ] || [ "$made_in" -ef .venv ] || make_environment "it was made as $made_in"
fi
# The editable installation belongs to this folder and these dependencies.
wanted=$("$python" -c 'import hashlib, os; print(hashlib.sha256(open("pyproject.toml", "rb").read() + os.getcwdb()).hexdigest())')
if [ "$(cat .venv/installed 2>/dev/null)" != "$wanted" ] || ! .venv/bin/python -I -c 'import drafttrain' 2>/dev/null; then
  usable='import sys, pip; sys.exit(sys.version_info < (3, 11))'
  if ! .venv/bin/python -c "$usable" 2>/dev/null; then
    .venv/bin/python -m ensurepip >/dev/null 2>&1 || true # of an environment without pip, as uv makes them
    .venv/bin/python -c "$usable" 2>/dev/null || make_environment "it has no pip, or a Python below 3.11"
  fi
  echo "setup: installing into .venv; this takes some minutes the first time" >&2
  install=(.venv/bin/python -m pip install --quiet --disable-pip-version-check)
  "${install[@]}" 'pip>=23.1' || stop "pip cannot update itself; see its message above" # for --config-settings
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
