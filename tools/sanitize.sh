#!/bin/sh
# Builds and runs the sanitizer targets of the Makefile. They need Clang and Linux on an x86-64 processor.
#
#   tools/sanitize.sh address   tests under ASan and UBSan  [COUNT=programs of the payload fuzzer]
#                               [TESTS=expression for -k] [ROWS=op rows] [N=processes]
#   tools/sanitize.sh thread    tests under TSan            [REPEAT=runs of the runtime's thread tests]
#                               [TESTS=expression for -k of these tests]
#   tools/sanitize.sh payload   fuzz payloads               [RUNS=mutations] [FUZZ_ARGS=options of libFuzzer]
#   tools/sanitize.sh pte       fuzz .pte files             [RUNS=mutations] [FUZZ_ARGS=options of libFuzzer]
#
# A finding of a sanitizer, or a test that fails, ends the script with an error.
set -eu
cd "$(dirname "$0")/.."
python=.venv/bin/python

die() { printf '%s\n' "[sanitize] $*" >&2; exit 1; }

find_clang() {
  for clang in "${CLANG:-}" clang++ clang++-22 clang++-21 clang++-20 clang++-19 clang++-18; do
    if [ -n "$clang" ] && command -v "$clang" >/dev/null; then return; fi
  done
  die "Clang not found: install it with its runtime libraries (on Debian: apt-get install clang-19 libclang-rt-19-dev)"
}

# build KIND [TARGET ...]: build/asan or build/tsan
build() {
  find_clang
  folder=build/asan fuzz=ON
  if [ "$1" = thread ]; then folder=build/tsan fuzz=OFF; fi
  launcher=$(command -v ccache || true)
  if [ ! -f "$folder/build.ninja" ]; then
    "$python" -m cmake -S . -B "$folder" -G Ninja -DCMAKE_MAKE_PROGRAM="$PWD/.venv/bin/ninja" \
      -DPython_EXECUTABLE="$PWD/$python" -DCMAKE_CXX_COMPILER="$clang" -DCMAKE_CXX_COMPILER_LAUNCHER="$launcher" \
      -DEXECUTORCH_MLX_SANITIZE="$1" -DEXECUTORCH_MLX_FUZZ=$fuzz >"/tmp/sanitize-$1.log" ||
      die "see /tmp/sanitize-$1.log"
  fi
  shift
  "$python" -m cmake --build "$folder" ${1:+--target "$@"}
  EXECUTORCH_MLX_BUILD=$PWD/$folder
  export EXECUTORCH_MLX_BUILD
}

# Python is not built with a sanitizer, so it loads the sanitizer's library first.
preload() { "$clang" -print-file-name="libclang_rt.$1-x86_64.so"; }

symbolizer=$(command -v llvm-symbolizer || ls /usr/bin/llvm-symbolizer-* 2>/dev/null | head -n 1 || true)

# checked COMMAND...: runs COMMAND and shows the reports of the sanitizer. A report, like a failure, ends the script.
# The sanitizer writes its reports to files, because pytest captures what a test prints.
checked() {
  rm -f "$EXECUTORCH_MLX_BUILD"/report.*
  status=0
  reports=log_path=$EXECUTORCH_MLX_BUILD/report
  env "$options_name=$options_value:$reports:external_symbolizer_path=$symbolizer" "$@" || status=$?
  for report in "$EXECUTORCH_MLX_BUILD"/report.*; do
    if [ -f "$report" ]; then cat "$report"; status=1; fi
  done
  [ $status = 0 ] || die "$1: exit code or findings: see above"
}

# Tests that need a build or a process without ASan: they link a program to the uninstrumented runner, expect that an
# allocation fails with an exception, limit the address space, measure memory, or check which library the dynamic linker
# binds.
without_asan="example or kernel_that_runs_out_of_memory or as_many_threads or leave_no_threads or blas_of_the_delegate"

address() {
  build address
  # Python and torch do not free all memory at the end. The fuzz targets look for leaks.
  options_name=ASAN_OPTIONS options_value=detect_leaks=0
  UBSAN_OPTIONS=print_stacktrace=1
  export UBSAN_OPTIONS
  asan=LD_PRELOAD=$(preload asan)
  checked "$asan" "$python" test/fuzz_payloads.py --count "${COUNT:-2000}" --jobs "${N:-2}"
  checked "$asan" "$python" -m pytest -q -p no:cacheprovider test/runtime test/engine \
    -k "(${TESTS:-test}) and not ($without_asan)"
  checked "$asan" "$python" test/run_all_tests.py ${ROWS:-} -j "${N:-2}"
}

thread() {
  build thread
  options_name=TSAN_OPTIONS options_value=suppressions=$PWD/tools/sanitizers/tsan.txt
  for _ in $(seq "${REPEAT:-3}"); do
    # Without address randomization: TSan reserves fixed ranges of memory.
    checked "LD_PRELOAD=$(preload tsan)" setarch -R "$python" -m pytest -q -p no:cacheprovider \
      -k "${TESTS:-thread or share or parallel}" \
      test/runtime/test_robust.py test/runtime/test_shared.py test/runtime/test_cpu_kernels.py
  done
  # In each of these tests, the threads of the caller, of the engine and of MLX work together.
  checked "LD_PRELOAD=$(preload tsan)" setarch -R "$python" -m pytest -q -p no:cacheprovider \
    test/engine/test_engine_overlap.py test/engine/test_engine_c_api.py
}

# fuzz TARGET LONGEST
fuzz() {
  build address "fuzz_$1"
  mkdir -p "build/fuzz/$1"
  # Short stacks of allocations and no fake stacks: several times as many mutations a second.
  ASAN_OPTIONS=malloc_context_size=3:quarantine_size_mb=16:detect_stack_use_after_return=0
  ASAN_OPTIONS=$ASAN_OPTIONS:external_symbolizer_path=$symbolizer
  OMP_NUM_THREADS=1
  export ASAN_OPTIONS OMP_NUM_THREADS
  # New inputs go to the first folder. An input that fails is written to build/fuzz.
  "build/asan/fuzz_$1" -runs="${RUNS:-1000000}" -max_len="$2" -timeout=30 -rss_limit_mb=4000 -print_final_stats=1 \
    -artifact_prefix=build/fuzz/ ${FUZZ_ARGS:-} "build/fuzz/$1" "test/libfuzzer/corpus/$1"
}

case "${1:-}" in
  address) address ;;
  thread) thread ;;
  payload) fuzz payload 4096 ;;
  pte) fuzz pte 8192 ;;
  *) die "got '${1:-}', expected address, thread, payload or pte" ;;
esac
