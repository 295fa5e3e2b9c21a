#!/bin/sh
# Writes the locks anew, after a change of pyproject.toml or constraints.txt: `make locks`. Every file of every version that
# may be installed has its hash there, for all platforms and for Python 3.11 and newer.
#   $1: the program `uv`
set -eu
cd "$(dirname "$0")/../.."
locks=deploy/docker/locks
lock() {
    out=$1; shift
    "$uv" pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header --no-annotate \
        --output-file "$locks/$out.txt" "$@"
}
uv=$1
images="--constraints constraints.txt --extra redis --extra hub --extra telemetry"
# shellcheck disable=SC2086  # several words
lock router pyproject.toml $images --excludes "$locks/router-excludes.txt"
# Torch's own needs are locked too; those that only its builds for GPUs have it pins itself.
# shellcheck disable=SC2086
lock worker pyproject.toml $images --excludes "$locks/worker-excludes.txt" "$locks/torch-needs.in"
for extra in ray nixl; do
    # shellcheck disable=SC2086
    lock "$extra" pyproject.toml $images --extra "$extra" --constraints "$locks/worker.txt" \
        --excludes "$locks/worker-excludes.txt" "$locks/torch-needs.in"
done
lock tools "$locks/tools.in"
