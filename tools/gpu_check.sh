#!/usr/bin/env bash
# On the GPU machine, with what tools/carry.sh fetched: a fit of digits beside the GPU tests.
#   bash tools/gpu_check.sh SECONDS [pytest's words, for example -k captured]
set -uo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH=src:.carry PYTHONUNBUFFERED=1 PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 CALMATCH_CACHE=/tmp/calmatch-cache
seconds=$1
shift
python3 - <<'PY'
import csv
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

images, labels = load_digits(return_X_y=True)
home = Path("/tmp/digits")
(home / "photos").mkdir(parents=True, exist_ok=True)
order, few = np.random.default_rng(0).permutation(len(images)), {}
for row in order.tolist():
    few.setdefault(int(labels[row]), []).append(row)
    pixels = (images[row].reshape(8, 8) * 15.9).astype(np.uint8)
    Image.fromarray(pixels).resize((64, 64), Image.Resampling.BICUBIC).save(home / f"photos/{row:04d}.png")
for name, rows in (("few", [r for own in few.values() for r in own[:4]]), ("all", order.tolist())):
    with (home / f"{name}.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["file", "label"], *([f"{r:04d}.png", labels[r]] for r in rows)])
PY
began=$(date +%s)
(timeout "$seconds" python3 -m calmatch fit /tmp/digits/photos --labels /tmp/digits/few.csv --minutes 2 --out /tmp/digits/run \
  >/tmp/fit.log 2>&1; echo "fit: exit $? after $(($(date +%s) - began)) s" >>/tmp/fit.log
 timeout 60 python3 -m calmatch evaluate /tmp/digits/run /tmp/digits/photos --labels /tmp/digits/all.csv >>/tmp/fit.log 2>&1) &
timeout "$seconds" python3 -m pytest -q -m gpu -p no:cacheprovider tests/training/test_gpu.py tests/test_model.py "$@" 2>&1 | tail -n 40
wait
cat /tmp/fit.log
