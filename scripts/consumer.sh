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
# what has to be compiled once more is not optimized: it is about a build outside, not about its speed
unoptimized=()
for package in consumer mlx-faststep mlx-rs mlx-sys; do
    unoptimized+=(--config "profile.release.package.$package.opt-level=0")
done
CARGO_PROFILE_RELEASE_DEBUG=line-tables-only cargo test --release "${unoptimized[@]}"
