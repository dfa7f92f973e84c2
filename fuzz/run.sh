#!/bin/sh
# Fuzz the decoder with AddressSanitizer and UndefinedBehaviorSanitizer:  fuzz/run.sh SECONDS
# With clang (or CXX=clang++) by libFuzzer, else with GCC and driver.cpp. Exits non-zero on the first fault; the input that
# caused it lies in build/fuzz/.
set -eu
seconds=${1:?usage: fuzz/run.sh SECONDS}
root=$(cd "$(dirname "$0")/.." && pwd)
kernel="$root/src/deltarefit/_kernel"
out="$root/build/fuzz"
mkdir -p "$out"

works() {  # a clang++ without its run-time library cannot link a fuzz target
  echo 'extern "C" int LLVMFuzzerTestOneInput(const char*, unsigned long) { return 0; }' > "$out/probe.cpp"
  clang++ -fsanitize=fuzzer,address,undefined "$out/probe.cpp" -o "$out/probe" 2>/dev/null
}
compiler=${CXX:-$(works && echo clang++ || echo g++)}
case "$compiler" in
  *clang*) kind=clang; watch="-fsanitize=fuzzer-no-link,address,undefined" ;;
  *) kind=gcc; watch="-fsanitize=address,undefined -fsanitize-coverage=trace-pc" ;;
esac
common="-std=c++17 -g1 -I$kernel -fno-sanitize-recover=all"

levels="portable"
case "$(uname -m)" in
  x86_64|amd64) levels="portable avx2 avx512" ;;
  aarch64|arm64) levels="portable neon" ;;
esac
flags_avx2="-mavx2 -mbmi -mbmi2 -mlzcnt -mpopcnt"
flags_avx512="$flags_avx2 -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512vbmi -mavx512vbmi2"

objects=""
compile() {  # SOURCE OBJECT FLAGS...
  source=$1; object="$out/$2.$kind.o"; shift 2
  objects="$objects $object"
  # Every object depends on every header: few files, so nothing finer is needed.
  if [ -f "$object" ] && [ -z "$(find "$kernel" "$root/fuzz" -name '*.?pp' -newer "$object" -o -name '*.inl' -newer "$object")" ]; then
    return
  fi
  # shellcheck disable=SC2086
  "$compiler" $common "$@" -c "$source" -o "$object"
}
for level in $levels; do
  eval "flags=\${flags_$level:-}"
  # shellcheck disable=SC2086
  compile "$kernel/level_$level.cpp" "level_$level" -O1 $watch $flags
done
for source in record view memory dispatch; do compile "$kernel/$source.cpp" "$source" -O1 $watch; done
compile "$root/fuzz/fuzz_decoder.cpp" fuzz_decoder -O1 $watch

if [ $kind = clang ]; then
  # shellcheck disable=SC2086
  "$compiler" $common -fsanitize=fuzzer,address,undefined $objects -o "$out/fuzz_decoder"
  mkdir -p "$out/corpus"
  exec "$out/fuzz_decoder" -max_total_time="$seconds" -max_len=4096 -artifact_prefix="$out/" "$out/corpus" "$root/fuzz/seeds"
fi
compile "$root/fuzz/driver.cpp" driver -O1
# shellcheck disable=SC2086
"$compiler" $common -fsanitize=address,undefined $objects -o "$out/fuzz_decoder"
exec "$out/fuzz_decoder" "$seconds" "$out/crash.bin" "$root"/fuzz/seeds/*.bin
