#!/usr/bin/env bash
# Runs what is marked gpu and the benchmark, and writes gpu-report.md.
#
# usage: report.sh BIN [cpu]
#   BIN   the folder that has python and keras-towers
#   cpu   to try the tests themselves, on logical CPUs
#
# The exit code is 0 if the tests and the benchmark have passed.
set -o pipefail
bin=$1
export KERAS_TOWERS_TESTS_ON=${2:-gpu}
export TF_CPP_MIN_LOG_LEVEL=${TF_CPP_MIN_LOG_LEVEL:-2}
# Wide enough for every table of the benchmark.
export COLUMNS=110

number=2 strategies=default
[ "$KERAS_TOWERS_TESTS_ON" = cpu ] || number=$(nvidia-smi --list-gpus | wc -l)
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

{
  echo "# keras_towers on GPUs"
  section Machine "$bin/keras-towers" doctor
  section GPUs nvidia-smi --format=csv \
    --query-gpu=index,name,memory.total,compute_cap,driver_version
  section "How they are connected" nvidia-smi topo -m
  section "TensorFlow is built with" "$bin/python" -c \
    "import tensorflow as tf; print(tf.sysconfig.get_build_info())"
  # TensorFlow loads CUDA, cuDNN and NCCL from packages.
  section Packages "$bin/python" -m pip list
  code=0
  # In a process of pytest-xdist's, so that a crash costs one test.
  section Tests "$bin/python" -m pytest tests/gpu -m gpu -n 1 --dist load \
    -rs --tb=short || code=1
  section Benchmark "$bin/keras-towers" bench \
    --device "$KERAS_TOWERS_TESTS_ON" --towers "$number" --models large,cnn \
    --repeats 3 --strategies "$strategies" || code=1
  exit $code
} | tee gpu-report.md
code=$?
echo "Written to gpu-report.md. Please paste it into an issue."
exit $code
