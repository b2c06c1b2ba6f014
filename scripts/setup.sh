#!/bin/sh
# Everything Greenroom needs on a fresh Debian 12: Debian packages, then a virtual environment with the locked
# Python packages. May be repeated and interrupted at any time; what is there already is not done again.
#
#   scripts/setup.sh            the platform
#   scripts/setup.sh bench      and what draws the pictures of docs/performance.md
#   scripts/setup.sh dev        and what tests and lint need
set -eu
cd "$(dirname "$0")/.."
kind=${1:-runtime}
venv=${GREENROOM_VENV:-.venv}
say() { printf 'setup: %s\n' "$*"; }

missing=
while read -r package _; do
    case $package in '' | '#'*) continue ;; esac
    state=$(dpkg-query -W -f '${db:Status-Abbrev}' "$package" 2>/dev/null || true)
    case $state in ii*) ;; *) missing="$missing $package" ;; esac
done <scripts/debian-packages.txt
if [ -n "$missing" ]; then
    if [ "$(id -u)" -ne 0 ]; then
        say "these Debian packages are missing:$missing"
        say "install them as root: apt-get install --no-install-recommends$missing"
        exit 1
    fi
    say "1/3 installing Debian packages:$missing"
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -q
    # shellcheck disable=SC2086  # a list of words
    apt-get install -y -q --no-install-recommends $missing
else
    say "1/3 Debian packages are there"
    # The image build looks packages up, which needs lists; a machine may have been set up without any.
    if [ "$(id -u)" -eq 0 ] && ! apt-cache show linux-image-cloud-amd64 >/dev/null 2>&1; then
        apt-get update -q
    fi
fi

# The JavaScript SDK for tests/js, by the node that is among the locked Python packages (Debian 12's is too old for it).
# Without it one test is skipped, and nothing else is missing: so a registry that cannot be reached ends nothing here.
javascript() {
    [ "$kind" = dev ] || return 0
    modules=tests/js/node_modules
    wanted_js=$(sha256sum <tests/js/package-lock.json | cut -d' ' -f1)
    if [ "$(cat "$modules/.greenroom" 2>/dev/null || true)" = "$wanted_js" ]; then
        say "the JavaScript SDK is there"
        return 0
    fi
    say "installing the locked JavaScript SDK for tests/js"
    if "$venv/bin/npm" ci --prefix tests/js --loglevel error; then
        printf '%s\n' "$wanted_js" >"$modules/.greenroom"
    else
        say "it could not be installed; tests/platform/test_javascript.py will be skipped"
    fi
}

lock=requirements/$kind.lock
wanted=$(cat "$lock" pyproject.toml | sha256sum | cut -d' ' -f1)
stamp=$venv/.greenroom-$kind
if [ "$(cat "$stamp" 2>/dev/null || true)" = "$wanted" ]; then
    say "2/3 Python packages are there"
    say "3/3 greenroom is installed"
    javascript
    exit 0
fi
if [ ! -x "$venv/bin/python" ] || ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    say "2/3 making the virtual environment $venv"
    rm -rf "$venv"
    python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
        say "python3 is older than 3.11; Debian 12 has 3.11"
        exit 1
    }
    python3 -m venv "$venv"
fi
say "2/3 installing locked Python packages from $lock"
bar=on
[ -t 1 ] || bar=off
"$venv/bin/python" -m pip install -q --progress-bar "$bar" --disable-pip-version-check --require-hashes -r "$lock"
say "3/3 installing greenroom itself"
"$venv/bin/python" -m pip install -q --disable-pip-version-check --no-deps -e .
printf '%s\n' "$wanted" >"$stamp"
# Each set holds all of those before it.
case $kind in
    runtime) held= ;;
    bench) held=runtime ;;
    *) held='runtime bench' ;;
esac
for other in $held; do
    cat "requirements/$other.lock" pyproject.toml | sha256sum | cut -d' ' -f1 >"$venv/.greenroom-$other"
done
javascript
say "done"
