#!/usr/bin/env bash
# Builds and tests tests/consumer as a crate outside the checkout, the way a dependent of faststep is built.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
outside=$(mktemp -d)
trap 'rm -rf "$outside"' EXIT

cp -r "$root/tests/consumer/." "$outside"
# the same versions and compiler: what is compiled already need not be compiled again
cp "$root/Cargo.lock" "$root/rust-toolchain.toml" "$outside"
sed -i.orig "s|\"\.\./\.\./|\"$root/|" "$outside/Cargo.toml"
cd "$outside"
CARGO_PROFILE_RELEASE_DEBUG=line-tables-only cargo test --release
