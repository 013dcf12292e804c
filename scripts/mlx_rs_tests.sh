#!/usr/bin/env bash
# Runs the library tests of mlx-rs itself on our mlx-sys. Arguments go to the test program. One test is left out: it wants
# floor_divide of complex64 to fail, and this MLX computes it.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
outside=$(mktemp -d)
trap 'rm -rf "$outside"' EXIT

source=$(cargo metadata --locked --format-version 1 --manifest-path "$root/Cargo.toml" | python3 -c '
import json, os, sys
packages = json.load(sys.stdin)["packages"]
print(*(os.path.dirname(p["manifest_path"]) for p in packages if p["name"] == "mlx-rs"))')
wheel=$("${PYO3_PYTHON:-python3}" -c 'import importlib.util as u; print(u.find_spec("mlx").submodule_search_locations[0])')
cp -r "$source/." "$root/rust-toolchain.toml" "$outside" # the registry's copy must stay as it is
cd "$outside"
export LD_LIBRARY_PATH="$wheel/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
cargo test --release --lib --no-default-features --config "patch.crates-io.mlx-sys.path='$root/rust/mlx-sys'" -- \
    --skip test_floor_divide_complex64 "$@"
