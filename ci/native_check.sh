#!/usr/bin/env bash
# The CPU kernels by themselves (ci/native_check.cpp): every variant that this processor can run, the same again under
# the address and undefined-behaviour sanitizers, and NEON where Debian's g++-aarch64-linux-gnu and qemu-user-static are.
#
#   ci/native_check.sh                 all of it
#   ci/native_check.sh avx2 sanitize   only these: baseline avx2 avx512 avx512vnni avx512bf16 sanitize neon
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
common=(-std=c++20 -fno-math-errno -ffp-contract=fast -Wall -Wextra -Wno-psabi -pthread ci/native_check.cpp)

declare -A flags=(
    [baseline]=""
    [avx2]="-march=x86-64-v3"
    [avx512]="-march=x86-64-v4"
    [avx512vnni]="-march=x86-64-v4 -mavx512vnni"
    [avx512bf16]="-march=x86-64-v4 -mavx512vnni -mavx512bf16"
)
declare -A needs=([baseline]="" [avx2]=avx2 [avx512]=avx512vl [avx512vnni]=avx512_vnni [avx512bf16]=avx512_bf16)

fits() { [[ -z ${needs[$1]} ]] || grep -qw "${needs[$1]}" /proc/cpuinfo; }

check() {  # name, compiler, runner or "", flags...
    local name=$1 compiler=$2 runner=$3
    shift 3
    "$compiler" "$@" "${common[@]}" -o "$work/$name"
    echo "== $name"
    $runner "$work/$name"
}

wanted=("$@")
[[ $# -gt 0 ]] || wanted=(baseline avx2 avx512 avx512vnni avx512bf16 sanitize neon)
best=baseline
for name in avx2 avx512 avx512vnni avx512bf16; do
    if [[ $(uname -m) == x86_64 ]] && fits "$name"; then best=$name; fi
done
for name in "${wanted[@]}"; do
    case $name in
    sanitize)
        # shellcheck disable=SC2086  # flags are words
        check "sanitize-$best" "${CXX:-g++}" "" ${flags[$best]} -O1 -g -fsanitize=address,undefined \
            -fno-sanitize-recover=all
        ;;
    neon)
        if [[ $(uname -m) == aarch64 ]]; then
            check neon "${CXX:-g++}" "" -O2
        elif command -v aarch64-linux-gnu-g++ >/dev/null && command -v qemu-aarch64-static >/dev/null; then
            check neon aarch64-linux-gnu-g++ "qemu-aarch64-static -L /usr/aarch64-linux-gnu" -O2
        else
            echo "== neon: not run, g++-aarch64-linux-gnu and qemu-user-static are not installed"
        fi
        ;;
    *)
        if [[ -z ${needs[$name]+known} ]]; then
            echo "$name is not a variant: baseline avx2 avx512 avx512vnni avx512bf16 sanitize neon" >&2
            exit 2
        elif [[ $(uname -m) != x86_64 && $name != baseline ]] || ! fits "$name"; then
            echo "== $name: not run, this processor lacks it"
        else
            # shellcheck disable=SC2086
            check "$name" "${CXX:-g++}" "" -O2 ${flags[$name]}
        fi
        ;;
    esac
done
