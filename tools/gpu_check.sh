#!/usr/bin/env bash
# What only a GPU can show, meant to take under four minutes: the tests marked `gpu`, then time and memory of the step as table and JSON.
# Needs a CUDA device, a CUDA build of torch and a C compiler (for Triton); installs nothing. Not run on a GPU yet.
#
#     bash tools/gpu_check.sh [FOLDER]      FOLDER (default: gpu_check) gets pytest.txt and step.json
set -uo pipefail
cd "$(dirname "$0")/.."
folder="${1:-gpu_check}"

export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
if ! python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  echo "error: gpu_check.sh needs a CUDA device, and torch.cuda.is_available() is False" >&2
  exit 1
fi
mkdir -p "$folder"
nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
failed=0

# Compiling takes longest: beside the tests, the kernels of the step go into the caches that its measured processes read.
export TORCHINDUCTOR_CACHE_DIR="${TORCHINDUCTOR_CACHE_DIR:-$PWD/$folder/inductor}" OMP_NUM_THREADS=1
for shape in S M; do
  for dtype in bf16 fp32; do
    TORCHINDUCTOR_COMPILE_THREADS=2 timeout 100 python tools/bench_train_step.py --one ours:flex+compile \
      --shape "$shape" --dtype "$dtype" --loss-only >/dev/null 2>&1 &
  done
done
TORCHINDUCTOR_COMPILE_THREADS=2 timeout 130 python -m pytest -m gpu -n 6 --durations=10 tests 2>&1 | tee "$folder/pytest.txt" || failed=1
wait

timeout 120 python tools/bench_train_step.py --shapes S M --dtypes bf16 fp32 --backends flex tiled dense flex+compile \
  --rounds 1 --steps 10 --threads 4 --limit-s 85 --json "$folder/step.json" || failed=1
python -m json.tool --compact "$folder/step.json" || failed=1
exit "$failed"
