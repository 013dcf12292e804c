#!/usr/bin/env bash
# Builds and tests a copy of the checkout against another MLX, and prints what broke: which step, which tests, and which
# assumptions of docs/mlx_assumptions.md they stand for. The checkout stays as it is.
#
#   scripts/next_mlx.sh VERSION           the tests that the assumptions name
#   ALL=1 scripts/next_mlx.sh VERSION     all tests of Python and Rust
#   KEEP=DIR scripts/next_mlx.sh VERSION  in that directory, which stays
set -uo pipefail
version=${1:?usage: scripts/next_mlx.sh VERSION}
root=$(cd "$(dirname "$0")/.." && pwd)
copy=${KEEP:-$(mktemp -d)}
[ -n "${KEEP:-}" ] || trap 'rm -rf "$copy"' EXIT
broken=()

mkdir -p "$copy"
cd "$root"
git ls-files -co --exclude-standard -z -- . ':!benches/samples' | xargs -0 cp --parents -t "$copy"
cd "$copy"
pinned=$(sed -n 's/^const MLX_VERSION: &str = "\(.*\)";/\1/p' rust/mlx-sys/build.rs)
# the pins, and the tests that read them
grep -rlF "$pinned" pyproject.toml rust/mlx-sys/build.rs tests --include=test_environment.py --include=pyproject.toml \
    --include=build.rs | xargs sed -i "s/${pinned//./\\.}/$version/g"
echo "MLX $pinned -> $version, in $copy"

unset CARGO_TARGET_DIR VIRTUAL_ENV PYO3_PYTHON
try() { # try NAME COMMAND...: the log is NAME.log
    local name=$1 started=$SECONDS
    shift
    if "$@" > "$name.log" 2>&1; then
        echo "$name: passed ($((SECONDS - started)) s)"
    else
        echo "$name: FAILED ($((SECONDS - started)) s)"
        broken+=("$name")
        return 1
    fi
}

assumptions() { # assumptions NAME...: the rows that name one of these files, or tests
    local name
    for name; do
        grep -hE "^\|.*(::$name\b|\`$name(\.py|\.rs)?\`)" docs/mlx_assumptions.md
    done | sort -u | cut -d'|' -f2,3 | sed 's/^/assumption: /'
}

if ! try build make build; then
    # the first crate that fails ends the build: the engine's C++ is read all the same
    headers=$(echo .venv/lib/python3*/site-packages/mlx/include)
    [ ! -d "$headers" ] || find rust/faststep/native -name '*.cpp' -printf '#include "%p"\n' | sort |
        "${CXX:-c++}" -std=c++20 -fsyntax-only -w -I . -I rust/faststep/native -isystem "$headers" -x c++ - >> build.log 2>&1
    errors=$(grep -oE '[^ :=]+:[0-9]+:[0-9]+: (fatal )?error: .*|^error(\[E[0-9]+\])?: .{1,160}|No matching distribution.*' build.log |
        sed -E 's|^[^ :]*/native/|native/|' | sort -u | head -40)
    printf '%s\n' "$errors"
    assumptions $(printf '%s\n' "$errors" | sed -nE 's|^[^ :]*/([a-z_]+\.[a-z]+):.*|\1|p' | sort -u)
    exit 1
fi

try rust make --keep-going test-rust
tests=(tests)
if [ -z "${ALL:-}" ]; then
    mapfile -t tests < <(grep -oE 'test_[a-z_]+\.py(::test_[a-z_0-9]+)?' docs/mlx_assumptions.md | sort -u |
        while IFS= read -r name; do printf '%s%s\n' "$(find tests -name "${name%%::*}")" "${name#"${name%%::*}"}"; done)
fi
try python .venv/bin/python -m pytest -q -n 2 --dist loadfile -o timeout=600 --ignore tests/package/test_install.py "${tests[@]}"

failed=$(cat rust.log python.log | grep -oE '^(FAILED|ERROR) [^ ]+|^ +(FAIL|SIG[A-Z]+) .*|^test .* FAILED' | sort -u)
[ -z "$failed" ] || printf '%s\n' "$failed"
assumptions $(printf '%s\n' "$failed" | grep -oE '[a-z_0-9]{5,}' | sort -u)
for name in "${broken[@]}"; do # what no test that failed explains: an import, a crash, a compiler
    grep -qE '^(FAILED|ERROR) |^ +(FAIL|SIG[A-Z]+) |^test .* FAILED' "$name.log" || tail -n 20 "$name.log"
done
[ ${#broken[@]} -eq 0 ] && echo "nothing broke"
[ ${#broken[@]} -eq 0 ]
