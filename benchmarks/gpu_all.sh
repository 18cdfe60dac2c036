#!/usr/bin/env bash
# Everything that is measured on an NVIDIA GPU, in one call: the suite compiled, poisoned and large pools, a memory checker,
# and kernel times beside the peers. Each part has its own limit and the next one runs whatever became of it.
#   SGLANG=folder DEEPGEMM=folder benchmarks/gpu_all.sh OUT
set -u
out=${1:?where to write the logs}
cd "$(dirname "$0")/.."
export XLA_PYTHON_CLIENT_PREALLOCATE=false PYTHONUNBUFFERED=1
part() { # name, seconds, command...
  local name=$1 limit=$2; shift 2
  timeout "$limit" "$@" >"$out/$name.log" 2>&1
  echo "== $name: exit $?, ${SECONDS} s so far"; tail -n "${LINES_SHOWN:-6}" "$out/$name.log"
}
python3 -c 'import jax; print(jax.devices()[0].device_kind, "jax", jax.__version__)'
LINES_SHOWN=45 part peers 150 python3 benchmarks/gpu_peers.py --json "$out/peers.json" \
  ${SGLANG:+--sglang "$SGLANG"} ${DEEPGEMM:+--deepgemm "$DEEPGEMM"}
LINES_SHOWN=12 part suite "${SUITE_S:-240}" python3 -m pytest -n 8 -q -p no:cacheprovider -p no:benchmark tests/test_pallas.py tests/test_score.py \
  tests/test_select.py tests/test_bad_input.py tests/test_jit.py tests/test_plane.py tests/test_fp4.py \
  tests/test_pallas_select.py tests/test_dlpack_gpu.py
LINES_SHOWN=20 part check 60 python3 benchmarks/gpu_check.py check
part selftest 60 python3 -m k2i_jax selftest --report "$out/selftest.json"
part memcheck 90 compute-sanitizer --tool memcheck --error-exitcode 9 python3 benchmarks/gpu_memcheck.py
LINES_SHOWN=40 part pools 60 python3 benchmarks/gpu_check.py pools
