#!/usr/bin/env bash
# One session of the GPU machine (30 minutes), a call a stage; each carries what fits in 64 MiB.
# What takes long goes on between calls (setsid) and on the 16 cores beside the GPU. The machine is
# given back 30 s after a call's end: the next one must be ready before.
#   pretrain MINUTES [words]     carry .paper/small.zip .paper/tiny.npz
#   zoo                          carry .paper/nets.zip, then zoo-a.zip, then zoo-b.zip (halves of the
#                                zoo; nets: pip install --target of efficientnet_lite1 and lite2)
#   runs STEPS SECONDS AT_ONCE   carry .paper/eurosat.npz (and small.zip, parts of an earlier session)
#   tests                        carry .paper/full.zip (all of tools/carry.sh's folder)
#   look SECONDS                 what every log says, now and after so long; brings back lines
set -uo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH=$PWD/src:/tmp/carry PYTHONUNBUFFERED=1 CALMATCH_CACHE=/tmp/cache
export PYTEST_DISABLE_PLUGIN_AUTOLOAD=1
stage=$1
shift
case $stage in
pretrain)
  python3 -m zipfile -e .paper/small.zip /tmp/carry
  nvidia-smi -L && nproc
  cp .paper/tiny.npz /tmp/tiny.npz
  setsid nohup python3 research/paper_runs.py pretrain /tmp/tiny.npz /tmp/parts --minutes "$@" \
    >/tmp/pretrain.log 2>&1 </dev/null &
  for _ in $(seq 90); do grep -q -E "Ready|Error" /tmp/pretrain.log && break; sleep 1; done
  sleep 1; cat /tmp/pretrain.log
  ;;
runs) # STEPS SECONDS AT_ONCE
  if [ -e .paper/eurosat.npz ]; then cp .paper/eurosat.npz /tmp/eurosat.npz; fi
  if [ -e .paper/parts ]; then python3 -m zipfile -e .paper/small.zip /tmp/carry; cp -r .paper/parts /tmp/parts; echo carried >/tmp/pretrain.log; fi
  for _ in $(seq 560); do [ -e /tmp/parts/note.json ] && break; sleep 1; done
  cat /tmp/pretrain.log; cp -r /tmp/parts "$OUT/parts"
  touch /tmp/lines.jsonl
  cifar=(); if [ -e .paper/cifar10.npz ]; then cp .paper/cifar10.npz /tmp/; cifar=(--cifar /tmp/cifar10.npz); fi
  setsid nohup python3 research/paper_runs.py runs /tmp/eurosat.npz /tmp/parts /tmp/work --steps "$1" \
    --budget-seconds "$2" --at-once "$3" --lines /tmp/lines.jsonl --done /tmp/lines.jsonl "${cifar[@]}" \
    >/tmp/runs.log 2>&1 </dev/null &
  sleep 45; cat /tmp/runs.log; tail -n 5 /tmp/work/*/run.log
  ;;
tests)
  python3 -m zipfile -e .paper/full.zip /tmp/carry
  setsid nohup python3 -m pytest -q -m gpu -p no:cacheprovider tests/training/test_gpu.py tests/test_model.py "$@" \
    >/tmp/tests.log 2>&1 </dev/null &
  ;;
zoo)
  for file in nets zoo-a zoo-b; do
    if [ -e .paper/$file.zip ] && [ ! -e /tmp/$file.here ]; then
      if [ $file = nets ]; then python3 -m zipfile -e .paper/$file.zip /tmp/carry
      else python3 -m zipfile -e .paper/$file.zip /tmp/zoo; fi
      touch /tmp/$file.here
    fi
  done
  export CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1
  for set in /tmp/zoo/*/; do
    set=$(basename "$set")
    [ -e "/tmp/zoowork-$set" ] && continue
    mkdir -p "/tmp/zoowork-$set" && ln -s /tmp/zoo "/tmp/zoowork-$set/zoo"
    for net in efficientnet_lite2 efficientnet_lite1; do
      mkdir -p "/tmp/zoowork-$set/$net" && ln -s /tmp/zoo "/tmp/zoowork-$set/$net/zoo"
      CALMATCH_CACHE=/tmp/cache-$net setsid nohup nice -n 10 python3 research/zoo.py none "/tmp/zoowork-$set/$net" \
        --net $net --sets "$set" --minutes 30 --tta 5 >"/tmp/zoowork-$set/$net.log" 2>&1 </dev/null &
    done
  done
  sleep 2; ls /tmp/zoo
  ;;
look)
  nvidia-smi --query-gpu=utilization.gpu,memory.used --format=csv,noheader; uptime
  tail -n 12 /tmp/runs.log; tail -n 4 /tmp/tests.log; tail -q -n 1 /tmp/zoowork-*/*.log
  cp /tmp/lines.jsonl "$OUT/lines.jsonl"; cat /tmp/zoowork-*/*/lines.jsonl >"$OUT/zoo.jsonl"
  cp /tmp/tests.log /tmp/runs.log "$OUT/"; cp /tmp/work/*/run.log "$OUT/run.log" 2>/dev/null
  sleep "${1:-0}"
  cp /tmp/lines.jsonl "$OUT/lines.jsonl"; cat /tmp/zoowork-*/*/lines.jsonl >"$OUT/zoo.jsonl"; cp /tmp/tests.log /tmp/runs.log "$OUT/"
  tail -n 3 /tmp/runs.log
  ;;
esac
