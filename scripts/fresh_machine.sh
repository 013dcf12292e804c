#!/usr/bin/env bash
# Tries the checkout on a fresh machine: makes a minimal Debian or Ubuntu with python3, make, git and nothing else, copies what git knows of
# the checkout into it, and runs there what a newcomer types.
#
# Usage: fresh_machine.sh SUITE [TARGET]   (as root; SUITE: bookworm, trixie, jammy, noble ...; TARGET: run, test, or failures)
#
#   run       make run: everything is installed, built and trained (the default)
#   test      make test
#   failures  what must end at once or be repaired: no root, no venv, a half-made .venv, an old Rust, a wheel without Rust
#
# MIRROR names the mirror of the distribution, ROOTS the directory of the roots (/var/tmp/fresh-machines). A root is made once
# and copied for each try.
set -euo pipefail
checkout=$(cd "$(dirname "$0")/.." && pwd)
suite=${1:?"the name of a suite: bookworm, trixie, jammy, noble"}
target=${2:-run}
roots=${ROOTS:-/var/tmp/fresh-machines}
pristine=$roots/$suite
try=$roots/$suite-$target
home=/home/somebody/mlx-faststep

# A root with the three programs, made as a whole or not at all.
make_root() {
    if [ ! -d "$pristine" ]; then
        command -v debootstrap > /dev/null || { echo "debootstrap is missing: apt-get install debootstrap" >&2 && exit 1; }
        rm -rf "$pristine.part"
        local from=(${MIRROR:+"$MIRROR"}) known=/usr/share/debootstrap/scripts/$suite
        # Ubuntu's releases, and those younger than this machine's debootstrap, are all made as one of its first
        if [ ! -e "$known" ] || [ "$(basename "$(readlink -f "$known")")" = gutsy ]; then
            from=("${MIRROR:-http://archive.ubuntu.com/ubuntu}" gutsy)
        fi
        debootstrap --variant=minbase --include=ca-certificates,python3,make,git "$suite" "$pristine.part" "${from[@]}"
        add_updates
        mv "$pristine.part" "$pristine"
    fi
}

# Debian's and Ubuntu's updates, which every installed system has: debootstrap writes the first release only.
add_updates() {
    local list=$pristine.part/etc/apt/sources.list mirror id
    mirror=$(awk '{ print $2; exit }' "$list")
    id=$(. "$pristine.part/etc/os-release" && echo "$ID")
    if [ "$id" = debian ]; then
        printf 'deb %s %s main\n' "$mirror" "$suite-updates" "${mirror%/debian*}/debian-security" "$suite-security" >> "$list"
    else
        printf 'deb %s %s main universe\n' "$mirror" "$suite" "$mirror" "$suite-updates" > "$list"
    fi
}

# A copy of the root with the checkout, and what a chroot needs of this machine to reach the network.
make_try() {
    leave
    rm -rf --one-file-system "$try"
    cp -a "$pristine" "$try"
    mkdir -p "$try$home"
    (cd "$checkout" && git ls-files -z --cached --others --exclude-standard | tar --create --null --files-from=- --ignore-failed-read) |
        tar --extract --directory "$try$home"
    cp /etc/resolv.conf /etc/hosts "$try/etc/"
    [ ! -d /usr/local/share/ca-certificates ] || cp -r /usr/local/share/ca-certificates "$try/usr/local/share/"
    cp /etc/ssl/certs/ca-certificates.crt "$try/etc/ssl/certs/"
    mount -t proc proc "$try/proc"
    mount --rbind --make-rslave /dev "$try/dev"
    trap leave EXIT
}

leave() {
    ! mountpoint -q "$try/dev" || umount --recursive --lazy "$try/dev"
    ! mountpoint -q "$try/proc" || umount "$try/proc"
}

# inside COMMAND: runs it in the checkout of the try, as root, with the environment of a login.
inside() {
    chroot "$try" env -i HOME=/root PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin TERM=dumb LANG=C.UTF-8 \
        bash -c "cd $home && $1"
}

# fails SECONDS TEXT COMMAND: the command must fail that soon, and say that.
fails() {
    local said started=$SECONDS
    if said=$(inside "$3" 2>&1); then echo "$said" && echo "did not fail: $3" >&2 && exit 1; fi
    echo "$said" | sed 's/^/    /'
    grep -qF -- "$2" <<< "$said" || { echo "expected '$2' from: $3" >&2 && exit 1; }
    ((SECONDS - started <= $1)) || { echo "took $((SECONDS - started)) s: $3" >&2 && exit 1; }
}

as_somebody() { echo "su somebody -s /bin/bash -c '$1'"; }

failures() {
    inside "useradd somebody && chown -R somebody /home/somebody" > /dev/null
    echo "== no root: the commands, at once"
    fails 2 "apt-get install" "$(as_somebody "make run")"
    fails 2 "apt-get install" "$(as_somebody "YES=1 make test")"
    inside "test ! -e .venv" || { echo "a .venv was left behind" >&2 && exit 1; }

    echo "== all but venv: no half .venv"
    inside "apt-get update -qq && apt-get install -qq -y --no-install-recommends g++ python3-dev > /dev/null 2>&1"
    fails 2 "-venv" "$(as_somebody "make run")"
    inside "test ! -e .venv" || { echo "a .venv was left behind" >&2 && exit 1; }

    echo "== an old Rust: which one is installed"
    inside "apt-get install -qq -y --no-install-recommends python3-venv rustc cargo > /dev/null 2>&1"
    fails 2 "or newer (found: rustc" "$(as_somebody "make run")"

    echo "== a half-made .venv is made anew"
    inside "$(as_somebody "mkdir -p .venv/bin && ln -s /usr/bin/python3 .venv/bin/python")"
    inside "YES=1 python3 scripts/prepare.py build && .venv/bin/python -m pip --version"

    echo "== a wheel that fits, without Rust and compiler"
    inside "for name in rustc cargo rustc-web cargo-web rustup g++; do apt-get purge -qq -y \$name > /dev/null 2>&1 || true; done; rm -rf .venv"
    if ls "$checkout"/dist/*-"$(inside 'python3 -c "import sys; print(\"cp%d%d\" % sys.version_info[:2])"')"-*.whl > /dev/null 2>&1; then
        mkdir -p "$try$home/dist"
        cp "$checkout"/dist/*.whl "$try$home/dist"
        inside "chown -R somebody /home/somebody && $(as_somebody "make run")"
    else
        echo "   left out: no wheel for this Python in dist (make wheels)"
    fi
}

make_root
make_try
started=$SECONDS
case $target in
    run | test) inside "YES=1 make $target" ;;
    failures) failures ;;
    *) echo "TARGET: run, test or failures, not $target" >&2 && exit 2 ;;
esac
echo "$suite, $target: works, $((SECONDS - started)) s"
