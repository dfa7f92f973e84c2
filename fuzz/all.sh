#!/bin/sh
# Fuzz every parser for SECONDS each, two at a time:  fuzz/all.sh SECONDS [PYTHON]
# The decoder in C++ by fuzz/run.sh, the parsers in Python by fuzz_python.py. Exits non-zero if any finds a fault; its
# whole output is shown then, and the input that caused it lies in build/fuzz/.
set -eu
seconds=${1:?usage: fuzz/all.sh SECONDS [PYTHON]}
python=${2:-python3}
cd "$(dirname "$0")/.."
mkdir -p build/fuzz
targets=$("$python" -c 'from fuzz.targets import TARGETS; print(*TARGETS)')
export seconds python
# shellcheck disable=SC2086,SC2016
printf '%s\n' native $targets | xargs -P 2 -n 1 sh -c '
  log="build/fuzz/$1.log"
  if [ "$1" = native ]; then set -- native fuzz/run.sh "$seconds"; else set -- "$1" "$python" -m fuzz.fuzz_python "$1" "$seconds"; fi
  name=$1; shift
  if "$@" > "$log" 2>&1; then
    echo "fuzz $name: no fault; $(tail -n 1 "$log")"
  else
    echo "fuzz $name: FAULT"; cat "$log"; exit 1
  fi' fuzz
