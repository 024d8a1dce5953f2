#!/usr/bin/env bash
# Builds sdist and wheel, and runs the demo from each in environments of their own: with the newest versions of what
# milldam needs, and with the lowest that pyproject.toml allows. Needs uv (pip install uv) and a package registry.
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
uv build --quiet --out-dir "$work/dist" .
for made in "$work"/dist/*.whl "$work"/dist/*.tar.gz; do
  for resolution in highest lowest-direct; do
    rm -rf "$work/env"
    uv venv --quiet --python "${PYTHON:-3.11}" "$work/env"
    VIRTUAL_ENV="$work/env" uv pip install --quiet --resolution "$resolution" "$made"
    (cd "$work" && rm -rf .demo && env/bin/milldam demo > demo.txt) || { cat "$work/demo.txt"; exit 1; }
    echo "$(basename "$made"), $resolution: the demo runs; $(VIRTUAL_ENV="$work/env" uv pip list 2>/dev/null | grep -ciE '^[a-z]') packages"
  done
done
