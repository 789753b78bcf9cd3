#!/bin/sh
# Make `.venv` and install one lock file into it: `setup.sh all` to run things, `setup.sh dev` to test them too.
# Every way this can fail on somebody's machine ends in one line that says what to do; the details are in a log file.
set -eu
cd "$(dirname "$0")/.."
lock=${1:?usage: setup.sh all|dev}
log=${TMPDIR:-/tmp}/kmq-setup-$(id -u).log

fail() {
    clear_line
    echo "kmq: $1" >&2
    exit 1
}

clear_line() { if [ -t 2 ]; then printf '\r\033[K' >&2; fi; }

# Run a command with its output in the log, and show that it lives.
quietly() {
    title=$1
    shift
    started=$(date +%s)
    [ -t 2 ] || echo "kmq: $title" >&2
    printf '\n## %s\n' "$title" >> "$log"
    "$@" >> "$log" 2>&1 &
    running=$!
    trap 'kill "$running" 2> /dev/null; clear_line; exit 130' INT TERM
    while kill -0 "$running" 2> /dev/null; do
        if [ -t 2 ]; then
            last=$(tail -n 1 "$log" | tr -d '\r' | cut -c1-60)
            printf '\r\033[Kkmq: %s, %ss  %s' "$title" "$(($(date +%s) - started))" "$last" >&2
        fi
        sleep 0.3
    done
    trap - INT TERM
    clear_line
    wait "$running"
}

usable_python() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' 2> /dev/null; }

find_python() {
    for python in ${PYTHON:-} python3 python3.13 python3.12 python3.11 python3.14; do
        if usable_python "$python"; then
            echo "$python"
            return
        fi
    done
    fail "Python 3.11 to 3.14 is needed: got $(python3 --version 2>&1 || true); install one, or name it: make setup PYTHON=/path/to/python3"
}

check_java() {
    java=${JAVA_HOME:+$JAVA_HOME/bin/}java
    version=$("$java" -version 2>&1 | sed -n 's/.*version "\(1\.\)\{0,1\}\([0-9]*\).*/\2/p' | head -n 1) || true
    [ -n "$version" ] || fail "Java 17 or newer is needed: got none ($java does not run); install OpenJDK 17 or set JAVA_HOME"
    [ "$version" -ge 17 ] || fail "Java 17 or newer is needed: got version $version ($java); install OpenJDK 17 or set JAVA_HOME"
}

# The likely causes of a failed installation, from what pip said last.
explain() {
    if tail -n 60 "$log" | grep -qi "no space left"; then
        fail "no space left on device while installing; free 2 GB (.venv, or \$TMPDIR: ${TMPDIR:-/tmp}), then run this again"
    elif tail -n 60 "$log" | grep -q "DO NOT MATCH THE HASHES"; then
        fail "a package is not the locked one (sha256 differs); the package index serves another file: see $log"
    elif tail -n 60 "$log" | grep -qiE "NewConnectionError|NameResolution|ConnectTimeout|Connection (refused|reset|broken)|timed out|unreachable|ProxyError|No matching distribution|SSLError"; then
        fail "cannot reach the package index; check the network or pip's own settings (pip config list), then run this again (log: $log)"
    fi
    fail "cannot install the packages; see the end of $log"
}

: > "$log" 2> /dev/null || log=$(mktemp)
check_java
if ! usable_python .venv/bin/python; then
    python=$(find_python) || exit 1
    "$python" -c 'import ensurepip, venv' 2> /dev/null || fail "$python lacks the venv module; install it (Debian, Ubuntu: apt install python3-venv)"
    quietly "making .venv" "$python" -m venv --clear .venv || explain
fi
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1
# The lock is complete, so nothing is resolved: an older pip wants the newest coverage[toml], whose hash no lock has.
pip() { quietly "$1" .venv/bin/python -m pip install --progress-bar off --require-hashes --no-deps --no-build-isolation -r "$2" || explain; }
pip "installing what builds packages (1 of 3)" requirements/build.txt
pip "installing the locked packages, Spark among them, a few minutes (2 of 3)" "requirements/$lock.txt"
quietly "installing kmq-spark (3 of 3)" .venv/bin/python -m pip install --no-deps --no-build-isolation -e . || explain
