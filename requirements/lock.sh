#!/bin/sh
# Write the lock files anew: every package of a kind of installation, exact, with the hashes of all its files.
# Needs `uv` on PATH; no index address reaches the files, so a mirror set in the environment works.
set -eu
cd "$(dirname "$0")/.."
uv=$(command -v uv) || { echo "kmq: uv is needed to write the locks; run pip install uv anywhere" >&2; exit 1; }

lock() {
    output=requirements/$1.txt
    shift
    "$uv" pip compile --quiet --universal --fork-strategy fewest --python-version 3.11 --generate-hashes --no-emit-index-url --no-emit-find-links \
        --custom-compile-command "make lock" --output-file "$output" "$@"
}

lock build requirements/build.in
lock base pyproject.toml --constraint requirements/build.txt
lock all pyproject.toml --extra spark --extra cli --extra ledger --extra worker --constraint requirements/build.txt
lock dev pyproject.toml --extra spark --extra cli --extra ledger --extra worker --extra opentelemetry --extra dramatiq --extra dev --group examples --constraint requirements/all.txt
lock sbom requirements/sbom.in --constraint requirements/dev.txt
