"""Ideas for a faster ViT-S/2 step, each beside the present captured step in the same run.

    python benchmarks/step_ideas.py            # on a CUDA device, at most 280 s

Every idea is a process that compiles at the same time as the others; only when all of a wave are
ready (or late, and ended) are they timed, one after another in turns, so timings never overlap.
Each must make the losses of the present step over 20 steps. `--list` names the ideas; `--check`
compares kernels and the joint pass with their references, on a CPU too (Triton's kernels there
with TRITON_INTERPRET=1). Prints a table last; JSON goes to $OUT or benchmarks/results/.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
STEPS = 256  # of one timing: a chunk, so that its augmentation is in it
CHECKED = 20  # steps whose losses are compared
# Relative differences of losses that pass: of the first step, and of the mean over 20 steps. The
# first tells a wrong forward; later ones follow gradients, through bfloat16's rounding.
FIRST, MEAN = 5e-3, 2e-2
GRADIENT = 0.1  # of AdamW's first moments after them; "present again" shows what is noise
OTHER_DRAWS = 0.15  # of the mean, where drop-path draws other numbers; gradients are checked apart

# ideas are sets of switches; a wave compiles together
WAVES: list[dict[str, list[str]]] = [
    {
        "present": [],
        "present again": [],
        "attention": ["attention"],
        "attention, joint": ["attention", "joint"],
        "attention, joint, last, pdl": ["attention", "joint", "last", "pdl"],
        "pdl": ["pdl"],
        "attention, joint, lt": ["attention", "joint", "lt"],
        "flash": ["flash"],
    },
    {
        "pointwise": ["pointwise"],
        "last": ["last"],
        "cublaslt": ["cublaslt"],
        "subblocks": ["subblocks"],
        "triton_mm": ["triton_mm"],
    },
]
EXTRA = {"efficient": ["efficient"], "multi_kernel": ["multi_kernel"], "descent": ["descent"]}
SWITCHES = {
    "attention": "Triton attention, class token apart, no copies around it",
    "joint": "weak views in the launches of the others' forward pass; backward of 16 pictures",
    "lt": "the joint pass's products by cuBLASLt's best of 32, bias sums in their epilogues",
    "last": "the last block's one query by fused sums instead of an attention kernel",
    "pdl": "inductor: programmatic dependent launch",
    "flash": "flash attention instead of cuDNN's",
    "efficient": "memory-efficient attention instead of cuDNN's",
    "pointwise": "inductor: more tiles tried for elementwise kernels and reductions",
    "cublaslt": "cuBLASLt for every product",
    "subblocks": "inductor: combined kernels keep block sizes of their own",
    "triton_mm": "inductor: Triton's products among the choices, with epilogues",
    "multi_kernel": "inductor: persistent and looped reductions, the faster one",
    "descent": "inductor: coordinate descent (slow)",
}


# ---- a worker: one process, one idea -------------------------------------------------------------


def switch(names: list[str]) -> None:
    """Set everything before the first trace."""
    import torch
    from torch._inductor import config as inductor

    inductor.fx_graph_cache = False  # its key does not know attention's backend
    if "pdl" in names:
        inductor.triton.enable_pdl = True
    if "pointwise" in names:
        inductor.max_autotune_pointwise = True
    if "subblocks" in names:
        inductor.combo_kernel_per_subkernel_blocks = True
    if "triton_mm" in names:
        inductor.max_autotune_gemm = True
        inductor.max_autotune_gemm_backends = "ATEN,TRITON"
        inductor.triton.enable_persistent_tma_matmul = True
    if "multi_kernel" in names:
        inductor.triton.multi_kernel = 1
    if "descent" in names:
        inductor.coordinate_descent_tuning = True
        inductor.coordinate_descent_search_radius = 1
    if "cublaslt" in names:
        torch.backends.cuda.preferred_blas_library("cublaslt")
    if "flash" in names or "efficient" in names:
        torch.backends.cuda.enable_cudnn_sdp(False)
        torch.backends.cuda.enable_flash_sdp("flash" in names)
        torch.backends.cuda.enable_math_sdp(False)
    if not {"attention", "joint", "last"} & set(names):
        return
    import step_kernels as kernels
    from timm.layers.attention import Attention

    from calmatch.methods import fixmatch
    from calmatch.nets import timm as ours

    if "attention" in names:
        Attention.forward = kernels.attention_forward  # type: ignore[method-assign]
    if "joint" in names:
        fixmatch.apart = kernels.joint_apart  # type: ignore[assignment]
    if "last" in names:
        ours.scaled_dot_product_attention = kernels.plain_query


def worker(names: list[str], choice: Path | None, moments: Path | None, device: str) -> None:
    """Compile, report the losses, then time and profile when asked through stdin."""
    said = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever else prints goes to the log

    def say(**facts: Any) -> None:
        said.write(json.dumps(facts) + "\n")

    try:
        started = time.perf_counter()
        os.nice(5)  # the process that tunes tiles goes first
        import numpy as np
        import torch
        from step import clock, vit_s, wait

        from calmatch.training.cuda_graph import CapturedStep
        from calmatch.training.setup import build_parts
        from calmatch.training.step import make_training

        switch(names)
        checked, products = {}, []
        if "lt" in names:
            import step_kernels as kernels

            kernels.LT = True
            if device == "cuda":
                products = kernels.tune_products(24 * 257, 16 * 257)
            say(products=products)
        checked = gradient_check(device) if "joint" in names else {}
        if checked and not checked["passed"]:
            say(error=f"gradients of the joint pass differ: {checked}")
            return
        if {"attention", "joint"} & set(names) and device == "cuda":
            import step_kernels as kernels

            kernels.CHOICE = choice  # compiling takes longer than tuning the tiles
        config = vit_s(device=device).replace(warmup=100)  # so that the compared steps learn
        if device == "cpu":  # a rehearsal: everything but the capture, small
            config = config.replace(
                net="vit_small_patch2_32(depth=2)", batch=2, chunk=2, eval_every=0,
                dataset="synthetic(classes=10, per_class=20, size=32)",
            )  # fmt: skip
        run = make_training(config, build_parts(config))
        say(built=time.perf_counter() - started)
        engine: Any = CapturedStep([run]) if device == "cuda" else Rehearsal(run)
        losses = []
        for _ in range(CHECKED):
            engine.advance()
            wait()
            if engine.failed:
                say(error="the step could not be captured (see the log)")
                return
            losses.append(run.sums.read()["loss"])
        np.save(str(moments), first_moments(run)) if moments else None
        clock(engine.advance, 2 * STEPS - CHECKED)  # to a chunk's beginning, the device warm
        memory = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else 0.0
        facts = {"losses": losses, "memory_gib": memory, "gradients": checked}
        say(ready=time.perf_counter() - started, **facts)
        for line in sys.stdin:
            if line.startswith("time"):
                say(ms=clock(engine.advance, STEPS))
            elif line.startswith("profile"):
                say(profile=profile(engine))
    except BaseException as error:
        traceback.print_exc()
        say(error=f"{type(error).__name__}: {str(error).strip().splitlines()[:1]}"[:300])


def first_moments(run: Any) -> Any:
    """AdamW's mean gradients of every 16th weight: the backward pass, compared directly."""
    import numpy as np

    names = sorted(k for k in run.tensors() if k.endswith("/exp_avg"))
    tensors = run.tensors()
    return np.concatenate([tensors[k].flatten()[::16].float().cpu().numpy() for k in names])


class Rehearsal:
    """The step with flat bfloat16 weights, compiled as the captured one is, without a graph."""

    failed = False

    def __init__(self, run: Any) -> None:
        import torch

        from calmatch.training.cuda_graph import FlatState

        settings = {"bf16": True, "momentum": run.parts.momentum, "clip": 0.0, "compiled": False}
        ema = run.parts.ema if run.parts.momentum else None
        self.run, self.flat = run, FlatState(run.parts.net, ema, run.optimizer, **settings)
        objective = run.parts.objective(self.flat.net)
        how: Any = {"fullgraph": True, "dynamic": False, "options": {"combo_kernels": True}}
        self.objective = torch.compile(objective, **how)

    def advance(self) -> None:
        run = self.run
        batch = run.parts.batches[run.step]
        run.seed_dropout()
        for group in run.optimizer.param_groups:
            group["lr"].fill_(group["peak"])
        run.learn(lambda: self.objective(batch), self.flat.advance)
        run.step += 1
        run.sums.steps += 1


def profile(engine: Any, steps: int = 8) -> dict[str, Any]:
    """Kernels of a step by name: microseconds and number, the longest first."""
    import torch

    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as seen:
        for _ in range(steps):
            engine.advance()
        torch.cuda.synchronize()
    rows = [
        (event.self_device_time_total / steps, event.count / steps, event.key[:110])
        for event in seen.key_averages()
        if event.self_device_time_total > 0
    ]
    rows.sort(reverse=True)
    total, count = sum(row[0] for row in rows), sum(row[1] for row in rows)
    return {"us": total, "kernels": count, "rows": rows[:60]}


def gradient_check(device: str) -> dict[str, Any]:
    """The joint pass against the present one without drop-path: gradients of a small ViT, eager.

    Of both the distance from float32's gradients; the joint one's may be a quarter larger.
    """
    import step_kernels as kernels
    import torch

    from calmatch.core import apart
    from calmatch.nets import Net
    from calmatch.nets.timm import ViT

    torch.manual_seed(0)
    with torch.random.fork_rng():
        body = ViT(10, size=32, patch=2, width=384, heads=6, depth=3, drop_path=0.0).to(device)
        with torch.no_grad():
            for layer in body.modules():  # the working copy's matrices are bfloat16
                if isinstance(layer, torch.nn.Linear | torch.nn.Conv2d):
                    for parameter in layer.parameters():
                        parameter.copy_(parameter.bfloat16())
        views = [torch.randn(n, 3, 32, 32, device=device) for n in (2, 2, 2)]

    def gradients(call: Any, bf16: bool) -> torch.Tensor:
        net = Net(body, {}, bf16).train()
        for layer in body.modules():
            if isinstance(layer, torch.nn.Linear | torch.nn.Conv2d):
                layer.to(torch.bfloat16 if bf16 else torch.float32)
        net.zero_grad()
        x, weak, strong = call(net, *views, grad=(True, False, True))
        target = weak.logits.softmax(-1)
        (x.logits.sin().sum() - (target * strong.logits.log_softmax(-1)).sum()).backward()
        return torch.cat([p.grad.float().flatten() for p in net.parameters()])

    attention = timm_attention(None)
    try:
        exact = gradients(apart, False)
        present = kernels.distance(gradients(apart, True), exact)
    finally:
        timm_attention(attention)
    joint = kernels.distance(gradients(kernels.joint_apart, True), exact)
    return {"present": present, "joint": joint, "passed": joint <= 1.25 * present + 1e-4}


ORIGINAL: list[Any] = []


def timm_attention(forward: Any) -> Any:
    """Set timm's attention to another, None: to its own; returns what was there."""
    from timm.layers.attention import Attention

    before = Attention.forward
    Attention.forward = ORIGINAL[0] if forward is None else forward  # type: ignore[method-assign]
    return before


def tune(choice: Path) -> None:
    """Check every variant of the attention kernels, time them in a graph, write the fastest."""
    import step_kernels as kernels
    import torch

    images, heads, layers = 16, 6, 12
    qkvs = [
        torch.randn(images, 257, 1152, device="cuda", dtype=torch.bfloat16) for _ in range(layers)
    ]
    grad = torch.randn(images, 257, 384, device="cuda", dtype=torch.bfloat16)
    rows: list[list[Any]] = []
    best: dict[str, Any] = {}

    def microseconds(act: Any) -> float:
        """Of one call, in a captured graph over the layers' own tensors."""
        for place in range(layers):
            act(place)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for place in range(layers):
                act(place)
        graph.replay()
        times = []
        for _ in range(7):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(5):
                graph.replay()
            end.record()
            torch.cuda.synchronize()
            times.append(1e3 * start.elapsed_time(end) / 5 / layers)
        return statistics.median(times)

    outs = [kernels.forward(qkv, heads) for qkv in qkvs]
    for side, variants in (("forward", kernels.FORWARDS), ("backward", kernels.BACKWARDS)):
        for how in variants:
            try:
                some = {f"{side}s": [how]}
                found = kernels.check("cuda", torch.bfloat16, images=3, **some)
                key = next(k for k in found if k.startswith(f"{side} ("))
                distance, theirs = found[key], found[f"torch {side}"]
                token = found.get("  class token" + key.removeprefix(side), 0.0)
                if side == "forward":
                    us = microseconds(lambda i, how=how: kernels.forward(qkvs[i], heads, how))
                else:
                    us = microseconds(
                        lambda i, how=how: kernels.backward(grad, qkvs[i], *outs[i], heads, how)
                    )
                right = max(distance, token) <= 2 * theirs + 1e-3
                rows.append([side, how, us, distance, theirs, right])
                if right and us < best.get(side, (1e9, None))[0]:
                    best[side] = (us, how)
            except Exception as error:
                rows.append([side, how, None, f"{type(error).__name__}: {error}"[:160], 0.0, False])
    result = {side: how for side, (_, how) in best.items()}
    if len(result) == 2:
        choice.with_suffix(".part").write_text(json.dumps(result))
        choice.with_suffix(".part").rename(choice)
        kernels.FORWARD, kernels.BACKWARD = result["forward"], result["backward"]
    for name, act in torch_attention(qkvs, grad, heads).items():
        try:
            rows.append(["torch", name, microseconds(act), 0.0, 0.0, True])
        except Exception as error:
            rows.append(["torch", name, None, f"{type(error).__name__}: {error}"[:160], 0.0, False])
    print(json.dumps({"rows": rows}), flush=True)


def torch_attention(qkvs: list[Any], grad: Any, heads: int) -> dict[str, Any]:
    """Forward with backward by torch's own, copies of the gradient included, as eager makes it."""
    import step_kernels as kernels
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def both(backend: Any) -> Any:
        def act(place: int) -> None:
            leaf = qkvs[place].detach().requires_grad_()
            with sdpa_kernel(backend):
                torch.autograd.grad(kernels.reference(leaf, heads), leaf, grad)

        return act

    return {
        "cudnn, both ways": both(SDPBackend.CUDNN_ATTENTION),
        "flash, both ways": both(SDPBackend.FLASH_ATTENTION),
        "ours, both ways": lambda place: kernels.backward(
            grad, qkvs[place], *kernels.forward(qkvs[place], heads), heads
        ),
    }


# ---- the coordinator -----------------------------------------------------------------------------


class Idea:
    """A worker process, and what it said."""

    def __init__(self, name: str, names: list[str], room: Path, device: str) -> None:
        self.name, self.names = name, names
        self.times: list[float] = []
        self.facts: dict[str, Any] = {}
        self.error = ""
        self.log = room / f"{name.replace(', ', '-').replace(' ', '_')}.log"
        env = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(room / self.log.stem)}
        env |= {"TRITON_CACHE_DIR": str(room / "triton"), "OMP_NUM_THREADS": "2"}
        env.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "6")
        self.moments = room / f"{self.log.stem}.npy"
        command = [sys.executable, __file__, "--worker", "+".join(names), "--device", device]
        command += ["--moments", str(self.moments)]
        self.process = subprocess.Popen(
            [*command, "--choice", str(room / "choice.json")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log.open("w"),
            text=True,
            env=env,
        )
        self.lines: queue.Queue[dict[str, Any]] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            try:
                self.lines.put(json.loads(line))
            except ValueError:
                continue
        self.lines.put({"error": f"ended with code {self.process.wait()}"})

    @property
    def alive(self) -> bool:
        return not self.error

    def hear(self, key: str, seconds: float) -> Any:
        """What it says under a key; None, and an end to it, where that does not come."""
        until = time.monotonic() + seconds
        while self.alive:
            try:
                facts = self.lines.get(timeout=max(0.01, until - time.monotonic()))
            except queue.Empty:
                self.end(f"no {key} in time")
                return None
            self.facts |= facts
            if "error" in facts:
                self.end(facts["error"])
            elif key in facts:
                return facts[key]
        return None

    def ask(self, word: str, key: str, seconds: float) -> Any:
        if not self.alive:
            return None
        try:
            assert self.process.stdin is not None
            self.process.stdin.write(word + "\n")
            self.process.stdin.flush()
        except OSError as error:
            self.end(str(error))
            return None
        return self.hear(key, seconds)

    def end(self, why: str) -> None:
        self.error = self.error or why
        self.process.kill()


def agreement(idea: Idea, present: Idea) -> tuple[bool, str]:
    """Whether 20 losses and the gradients' mean are the present step's, and how far they are."""
    import numpy as np

    own, theirs = idea.facts.get("losses"), present.facts.get("losses")
    if not own or not theirs:
        return False, "no losses"
    first = abs(own[0] - theirs[0]) / abs(theirs[0])
    mean = abs(sum(own) - sum(theirs)) / abs(sum(theirs))
    one, two = np.load(idea.moments), np.load(present.moments)
    far = float(np.linalg.norm(one - two) / np.linalg.norm(two))
    if "joint" in idea.names:  # other draws of drop-path
        passed = mean <= OTHER_DRAWS and idea.facts.get("gradients", {}).get("passed", False)
    else:
        passed = first <= FIRST and mean <= MEAN and far <= GRADIENT
    return bool(passed and all(x == x for x in own)), f"{first:.0e} {mean:.0e} {far:.0e}"


def measure_wave(ideas: list[Idea], present: Idea, ready_by: float, rounds: int, say: Any) -> None:
    """Wait until all are ready or late, then time the present step and each idea in turns."""
    for idea in ideas:
        later = 40 if idea is present else 0  # nothing can be compared without it
        if idea.hear("ready", max(1.0, ready_by + later - time.monotonic())) is None:
            say(f"{idea.name}: {idea.error}")
        else:
            say(f"{idea.name}: ready after {idea.facts['ready']:.0f} s")
    turns = [present] + [idea for idea in ideas if idea is not present]
    for number in range(rounds):
        for idea in turns if number % 2 == 0 else reversed(turns):
            ms = idea.ask("time", "ms", 30)
            if ms is not None:
                idea.times.append(ms)


def ratio(idea: Idea, base: list[float]) -> float:
    """Median time over the present step's in the same wave."""
    if not idea.times or not base:
        return float("nan")
    return statistics.median(idea.times) / statistics.median(base)


def coordinate(options: argparse.Namespace) -> None:
    start = time.monotonic()
    finish = start + options.seconds
    room = Path(tempfile.mkdtemp(prefix="step-ideas-"))
    rows: list[dict[str, Any]] = []

    def say(text: str) -> None:
        print(f"[{time.monotonic() - start:5.0f} s] {text}", flush=True)

    waves = [dict(wave) for wave in WAVES]
    if options.only:
        known = {name: names for wave in [*WAVES, EXTRA] for name, names in wave.items()}
        waves = [
            {"present": []} | {name: known.get(name, name.split("+")) for name in options.only}
        ]
    tuner = subprocess.Popen(
        [sys.executable, __file__, "--tune", "--choice", str(room / "choice.json")],
        stdout=(room / "tune.json").open("w"),
        stderr=(room / "tune.log").open("w"),
    )
    present: Idea | None = None
    everyone: list[Idea] = []
    profiles: dict[str, Any] = {}
    try:
        for number, wave in enumerate(waves):
            left = finish - time.monotonic()
            if number and left < 105:
                say(f"{left:.0f} s left: not measured: {', '.join(wave)}")
                break
            if number:
                wave = winners(rows) | wave
                for idea in everyone:
                    if idea is not present:
                        idea.end("done")
            say(f"compiling side by side: {', '.join(wave)}")
            ideas = [Idea(name, names, room, options.device) for name, names in wave.items()]
            everyone += ideas
            if present is None:
                present = ideas[0]
            timing = options.rounds * (len(ideas) + 1) * 1.6 + 12  # seconds; a profile, the table
            ready_by = min(time.monotonic() + options.compile, finish - timing)
            before = len(present.times)
            measure_wave(ideas, present, ready_by, options.rounds, say)
            base = present.times[before:]
            for idea in ideas:
                try:
                    same, apart = agreement(idea, present)
                except Exception as error:
                    same, apart = False, repr(error)[:80]
                facts = {k: v for k, v in idea.facts.items() if k not in ("ms", "profile")}
                row = {"idea": idea.name, "switches": idea.names, "ms": idea.times, "same": same}
                row |= {"ratio": ratio(idea, base), "differences": apart, "error": idea.error}
                rows.append(row | facts)
                say(f"{idea.name}: {row['ratio']:.3f} {idea.error}")
            save(options, rows, profiles, room, base)
            fastest = min((i for i in ideas if i.times), key=lambda i: ratio(i, base), default=None)
            for idea in [present, fastest]:
                if (
                    idea
                    and idea.alive
                    and idea.name not in profiles
                    and finish - time.monotonic() > 12
                ):
                    profiles[idea.name] = idea.ask("profile", "profile", 20)
    finally:
        for idea in everyone:
            idea.end("done")
        tuner.kill()
        path = save(options, rows, profiles, room, present.times if present else [])
        table(rows, profiles, room)
        say(f"written: {path}")


def winners(rows: list[dict[str, Any]]) -> dict[str, list[str]]:
    """All that gained in the first wave together, unless it was measured so already."""
    gained = [r for r in rows if r["same"] and r["ratio"] < 0.995 and r["switches"]]
    together = sorted({name for row in gained for name in row["switches"]})
    if len(together) < 2 or any(sorted(row["switches"]) == together for row in rows):
        return {}
    return {"together: " + " ".join(together): together}


def save(options: Any, rows: Any, profiles: Any, room: Path, base: list[float]) -> Path:
    """Everything as JSON, with the ends of the logs of what failed."""
    record: dict[str, Any] = {"rows": rows, "present_ms": base, "profiles": profiles}
    record["tolerance"] = {"first": FIRST, "mean": MEAN, "mean, other draws": OTHER_DRAWS}
    record["tolerance"]["gradients"] = GRADIENT
    for name in ("tune.json", "choice.json"):
        if (room / name).exists() and (room / name).stat().st_size:
            record[name] = json.loads((room / name).read_text())
    record["logs"] = {log.stem: log.read_text()[-3000:] for log in room.glob("*.log")}
    folder = Path(options.out or os.environ.get("OUT") or HERE / "results")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "step-ideas.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    return path


def table(rows: list[dict[str, Any]], profiles: dict[str, Any], room: Path) -> None:
    for name, seen in profiles.items():
        if not seen:
            continue
        print(f"\nKernels of a step, {name}: {seen['us']:.0f} us in {seen['kernels']:.0f}")
        for us, count, key in seen["rows"][:14]:
            print(f"  {us:7.1f} us  {count:5.1f}  {key[:90]}")
    products = next((row["products"] for row in rows if row.get("products")), [])
    if products:
        print(
            "\nProducts, us: torch's (with its bias sum), cuBLASLt's first, its best, of how many"
        )
        for form, shape, theirs, first, best, count in products:
            print(f"  {form:<9}{shape!s:<20}{theirs:7.1f}{first:7.1f}{best:7.1f}{count:5}")
    tuned = room / "tune.json"
    if tuned.exists() and tuned.stat().st_size:
        print("\nAttention alone, 16 pictures, one layer (distance from float64; torch's own)")
        for side, how, us, far, theirs, right in json.loads(tuned.read_text())["rows"]:
            how = tuple(how.values()) if isinstance(how, dict) else how
            if us is None:
                print(f"  {side:<9}{how!s:<28} failed: {far}")
            else:
                note = f"{far:.1e} {theirs:.1e} {'right' if right else 'WRONG'}" if far else ""
                print(f"  {side:<9}{how!s:<28}{us:7.1f} us  {note}")
    elif (room / "tune.log").exists():
        print("\nAttention alone, no result: " + (room / "tune.log").read_text()[-600:])
    head = f"{'idea':<44}{'ms a step':>10}{'ratio':>8}{'ready s':>9}"
    print(f"\n{head}  far: first loss, mean, gradients")
    for row in rows:
        if not row["ms"]:
            print(f"{row['idea'][:43]:<44}{'-':>10}  {row['error'][:70]}")
            continue
        ms, verdict = statistics.median(row["ms"]), "same" if row["same"] else "DIFFER"
        print(
            f"{row['idea'][:43]:<44}{ms:>10.3f}{row['ratio']:>8.3f}{row['ready']:>9.0f}"
            f"  {row['differences']} {verdict}"
        )
    sys.stdout.flush()


def check(device: str) -> None:
    """Kernels and the joint pass against their references."""
    import step_kernels as kernels
    import torch

    if device == "cuda" or os.environ.get("TRITON_INTERPRET") == "1":
        # the interpreter has no product of bfloat16
        kinds = [torch.float32, torch.bfloat16 if device == "cuda" else torch.float16]
        for kind in kinds:
            some = (kernels.FORWARDS[:2], [kernels.BACKWARDS[0], kernels.BACKWARDS[-1]])
            for name, far in kernels.check(device, kind, 1, 256, 2, 64, *some).items():
                print(f"{kind} {name}: {far:.1e}", flush=True)
    print("joint pass, distance of gradients from float32's:", gradient_check(device), flush=True)


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    options.add_argument("--seconds", type=float, default=270, help="end, with a table, by then")
    options.add_argument("--compile", type=float, default=140, help="seconds to be ready in a wave")
    options.add_argument("--rounds", type=int, default=3, help="timings of each idea")
    options.add_argument("--only", nargs="*", help="these ideas, or switches joined by +")
    options.add_argument("--out", help="folder for the JSON; by default $OUT")
    options.add_argument("--device", default="cuda")
    options.add_argument("--list", action="store_true")
    options.add_argument("--check", action="store_true")
    options.add_argument("--worker", help=argparse.SUPPRESS)
    options.add_argument("--tune", action="store_true", help=argparse.SUPPRESS)
    options.add_argument("--moments", type=Path, help=argparse.SUPPRESS)
    options.add_argument("--choice", type=Path, help=argparse.SUPPRESS)
    chosen = options.parse_args()
    if chosen.device == "cpu":  # rehearsed
        global STEPS, CHECKED
        STEPS, CHECKED = 2, 3
    if chosen.list:
        for name, what in SWITCHES.items():
            print(f"{name:<14}{what}")
        return
    if chosen.tune:
        tune(chosen.choice)
        return
    if chosen.worker is None and not chosen.check:
        coordinate(chosen)
        return
    from timm.layers.attention import Attention

    ORIGINAL.append(Attention.forward)
    if chosen.check:
        check(chosen.device)
    else:
        names = [name for name in chosen.worker.split("+") if name]
        worker(names, chosen.choice, chosen.moments, chosen.device)


if __name__ == "__main__":
    main()
