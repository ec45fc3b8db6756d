#!/usr/bin/env bash
# Runs what is marked gpu and the benchmark, and writes gpu-report.md.
#
# usage: report.sh [BIN [cpu]]
#   BIN   the folder that has python; "" (the default): .venv-gpu/bin if it is
#         there, else the python3 on the PATH, with what it can import
#   cpu   to try the tests themselves, on logical CPUs
#
# The exit code is 0 if the tests and the benchmark have passed.
set -o pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
bin=${1:-$root/.venv-gpu/bin}
python=$bin/python
if [ -z "$1" ] && [ ! -x "$python" ]; then python=$(command -v python3); fi
# The package need not be installed.
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
export KERAS_TOWERS_TESTS_ON=${2:-gpu}
export TF_CPP_MIN_LOG_LEVEL=${TF_CPP_MIN_LOG_LEVEL:-2}
# Wide enough for every table of the benchmark.
export COLUMNS=110

number=2 strategies=stock-default,stock-one-device,stock-hierarchical
strategies+=,tower,parameter-server,async
[ "$KERAS_TOWERS_TESTS_ON" = cpu ] || number=$(nvidia-smi --list-gpus | wc -l)

# In processes of pytest-xdist's, so that a crash costs one test; as many as
# there are cores, and memory of GPUs (tests/kit/gpus.py).
processes=()
if "$python" -c "import xdist" 2>/dev/null; then
  most=2
  if [ "$KERAS_TOWERS_TESTS_ON" = gpu ]; then
    free=$(nvidia-smi --query-gpu=memory.free --format=csv,noheader,nounits)
    most=$(($(sort -n <<< "$free" | head -1) / 6144))
  fi
  cores=$(nproc)
  most=$((most < cores ? most : cores))
  processes=(-n $((most < 1 ? 1 : most < 10 ? most : 10)) --dist load)
fi
# One tower reduces nothing.
if [ "$number" -gt 1 ]; then
  for mode in nccl collective hierarchical gpu cpu; do
    strategies+=,tower:mode=$mode
  done
fi

# A section: its title, and what a command says. Output may have fences itself.
section() {
  printf '\n## %s\n\n~~~~~~~~text\n' "$1"
  "${@:2}" 2>&1
  local code=$?
  [ $code = 0 ] || echo "exit code $code"
  printf '~~~~~~~~\n'
  return $code
}

# Two and four ranks, which share one GPU if there is no other.
nccl() {
  "$python" -c "from keras_towers.cli.installed import nccl_state; print(nccl_state())"
  "$python" -m pytest "$root/tests/gpu/test_nccl.py" -n 0 -rA --tb=short
}

{
  echo "# keras_towers on GPUs"
  section Machine "$python" -m keras_towers doctor
  section GPUs nvidia-smi --format=csv \
    --query-gpu=index,name,memory.total,compute_cap,driver_version
  section "How they are connected" nvidia-smi topo -m
  section "TensorFlow is built with" "$python" -c \
    "import tensorflow as tf; print(tf.sysconfig.get_build_info())"
  # TensorFlow loads CUDA, cuDNN and NCCL from packages.
  section Packages "$python" -m pip list
  code=0
  section NCCL nccl || code=1
  section Tests "$python" -m pytest "$root/tests/gpu" "${processes[@]}" \
    --ignore "$root/tests/gpu/test_nccl.py" -rs --tb=short || code=1
  section Benchmark "$python" -m benchmarks.field \
    --device "$KERAS_TOWERS_TESTS_ON" --towers "$number" --repeats 3 \
    --models large,benchmarks.field:cnn --strategies "$strategies" || code=1
  exit $code
} | tee gpu-report.md
code=$?
echo "Written to gpu-report.md. Please paste it into an issue."
exit $code
