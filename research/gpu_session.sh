#!/usr/bin/env bash
# One session of the GPU machine (30 minutes), a call a stage; each carries what fits in 64 MiB. The
# machine is given back 30 s after a call's end: write everything first, send calls back to back.
#   (NVIDIA's multi-process service was tried: a process that is killed under it breaks all others.)
#   setup [STEPS [words]]        carry .paper/small.zip (or full.zip: all of tools/carry.sh's folder, to
#                                start the GPU tests in the background too), .paper/eurosat.npz,
#                                .paper/cifar10.npz, .paper/features.npz and more of its kind
#                                (`paper_runs.py teach`), .paper/lite.zip for a teacher, .paper/parts
#                                (`paper_runs.py adopt`) that `pretrain` goes on from; with STEPS
#                                compiles every cell in the background, so that later runs find it
#                                (--cifar /tmp/eurosat.npz does for CIFAR-10's: shapes are the same)
#   pretrain MINUTES [words]     carry .paper/tiny.npz: the network, and logistic regression on it
#   runs STEPS SECONDS AT_ONCE [words]   carry .paper/eurosat.npz, .paper/cifar10.npz: cells in the
#                                background until the time is up; 24 runs of 4,096 steps take 45 s
#                                to start if compiled before, 450 s, and a minute to measure
#   watch SECONDS                waits for them; lines come back as they are written: a call that is
#                                ended at its limit loses nothing that is done
#   fit                          carry .paper/small.zip, .paper/lites.zip (the weights of all three
#                                Lites), .paper/zoo (one set): seconds of fit and predict, how right
#   tests                        what the tests of the background said
set -uo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH=$PWD/src:/tmp/carry PYTHONUNBUFFERED=1 CALMATCH_CACHE=/tmp/cache
export PYTEST_DISABLE_PLUGIN_AUTOLOAD=1
stage=$1
shift
case $stage in
setup)
  for name in small lite full; do
    if [ -e .paper/$name.zip ]; then python3 -m zipfile -e .paper/$name.zip /tmp/carry; fi
  done
  cp .paper/*.npz /tmp/
  if [ -e .paper/parts ]; then cp -r .paper/parts /tmp/parts; fi
  if [ -e .paper/full.zip ]; then # four processes, each every fourth test
    cp -r . /tmp/tested && cd /tmp/tested
    PYTHONPATH=/tmp/tested/src:/tmp/carry python3 -m pytest -m gpu --collect-only -p no:cacheprovider tests/training/test_gpu.py tests/test_model.py 2>/dev/null | grep :: >/tmp/gpu_tests
    for k in 0 1 2 3; do
      awk "NR % 4 == $k" /tmp/gpu_tests >/tmp/gpu_tests.$k
      PYTHONPATH=/tmp/tested/src:/tmp/carry setsid nohup timeout 500 python3 -m pytest -q -m gpu -p no:cacheprovider --tb=short @/tmp/gpu_tests.$k >/tmp/tests.$k.log 2>&1 </dev/null &
    done
    cd -
    wc -l /tmp/gpu_tests
  fi
  nvidia-smi -L && nproc
  if [ $# = 0 ]; then exit; fi
  python3 - <<'PY'
import sys
from pathlib import Path

sys.path.insert(0, ".")
from calmatch import nets
from research import paper_runs

paper_runs.save_parts(nets.build("vit_small_patch2_32", 200).state_dict(), Path("/tmp/random"), {})
PY
  TORCHINDUCTOR_COMPILE_THREADS=3 setsid nohup taskset -c 5-15 python3 research/paper_runs.py runs /tmp/eurosat.npz /tmp/random /tmp/warm --steps "$@" \
    --budget-seconds 330 --at-once 30 --lines /tmp/warm.jsonl --done /tmp/warm.jsonl \
    >/tmp/warm.log 2>&1 </dev/null &
  setsid nohup bash -c 'for _ in $(seq 330); do sleep 1
    for log in /tmp/warm/*/metrics.jsonl; do
      [ -s "$log" ] && pkill -KILL -f "$(dirname "$log")" && rm -rf "$(dirname "$log")"
    done; done' >/dev/null 2>&1 </dev/null & # compiled is all it shall be
  sleep 5; cat /tmp/warm.log
  ;;
pretrain)
  cp .paper/*.npz /tmp/
  start=(); if [ -e /tmp/parts ]; then mv /tmp/parts /tmp/start && start=(--start /tmp/start); fi
  timeout 570 python3 research/paper_runs.py pretrain /tmp/tiny.npz /tmp/parts "${start[@]}" --minutes "$@" 2>&1 | tee "$OUT/pretrain.log"
  cp -r /tmp/parts "$OUT/parts"
  cp -r . /tmp/probed
  (cd /tmp/probed && PYTHONPATH=/tmp/probed/src:/tmp/carry setsid nohup timeout 90 python3 research/paper_runs.py probe /tmp/eurosat.npz /tmp/parts --tested 2700 >/tmp/probe.log 2>&1 </dev/null &)
  tail -n 3 /tmp/warm.log; ls /tmp/warm; tail -n 2 /tmp/tests.*.log; uptime
  ;;
runs)
  steps=$1 seconds=$2 at_once=$3
  shift 3
  cp .paper/*.npz /tmp/
  cifar=(); if [ -e /tmp/cifar10.npz ]; then cifar=(--cifar /tmp/cifar10.npz); fi
  touch /tmp/lines.jsonl
  # the tree of this call is replaced by the next one's
  cp -r . /tmp/runs && cd /tmp/runs && export PYTHONPATH=/tmp/runs/src:/tmp/carry
  TORCHINDUCTOR_COMPILE_THREADS=3 setsid nohup python3 research/paper_runs.py runs /tmp/eurosat.npz /tmp/parts /tmp/work --steps "$steps" \
    --budget-seconds "$seconds" --at-once "$at_once" --lines /tmp/lines.jsonl --done /tmp/lines.jsonl "${cifar[@]}" "$@" \
    >/tmp/runs.log 2>&1 </dev/null &
  sleep 5; cat /tmp/runs.log
  ;;
watch)
  for _ in $(seq $(($1 / 5))); do
    sleep 5
    cp /tmp/lines.jsonl "$OUT/"
    (date +%T; nvidia-smi --query-gpu=utilization.gpu,memory.used --format=csv,noheader; tail -q -n 1 /tmp/work/*/metrics.jsonl 2>/dev/null | cut -c1-40 | sort | uniq -c) >>"$OUT/gpu.log" 2>&1
    pgrep -f 'paper_runs.py runs' >/dev/null || break
  done
  cp /tmp/lines.jsonl /tmp/runs.log "$OUT/"; cp "$(ls -t /tmp/work/*/run.log | head -n 1)" "$OUT/run.log"
  cat /tmp/probe.log; tail -n 30 /tmp/runs.log; tail -n 12 "$OUT/gpu.log"; wc -l /tmp/lines.jsonl
  ;;
fit)
  for name in small lites; do python3 -m zipfile -e .paper/$name.zip /tmp/carry; done
  python3 research/gpu_zoo.py .paper/zoo /tmp/fits --at-once 1 --minutes 10
  mkdir /tmp/many
  for k in 1 2; do for file in .paper/zoo/*/*/*.jpg; do cp "$file" "/tmp/many/$k-$(basename "$file")"; done; done
  ls /tmp/many/*.jpg | tail -n +1501 | xargs rm -f
  for k in 1 2; do
    ls /tmp/many | wc -l
    time python3 -m calmatch predict /tmp/fits/*-4-0 /tmp/many -o "$OUT/many.csv" --quiet
  done
  ;;
tests)
  tail -n 30 /tmp/tests.*.log
  ;;
esac
