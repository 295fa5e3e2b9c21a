#!/bin/sh
# The last touch to a tree that becomes a layer: the same inputs give the same bytes, and any user can run it.
#   $1: the tree; $2: what will be / when it runs; SOURCE_DATE_EPOCH: the time that all its files get
set -eu
# Hashes instead of times, which a copy would change; unchecked, because nobody edits an image. Where the root is read-only
# nothing compiled could be kept, so every process would compile all that it imports. Left out: a file with which torch
# tests what newer Pythons can read.
find "$1" -type d -name site-packages -exec \
    python3 -m compileall -q --invalidation-mode unchecked-hash -s "$2" -p / -x '/py3[0-9]+_intrinsics[.]py' {} +
chmod -R u=rwX,go=rX "$1"
find "$1" -exec touch --no-dereference --date="@$SOURCE_DATE_EPOCH" {} +
