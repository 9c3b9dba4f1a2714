#!/usr/bin/env python3
"""Predicted beside measured: step times of 14 configurations on this machine.

    scripts/plan_vs_here.py [--program build/sherd] [--machine FILE] [--steps 12] [--folder DIR]

Without --machine the machine is measured first (sherd bench machine). A run's time is the median of its steps. Let nothing
else run meanwhile. Ends with 1 where the median error is above 8 % or the worst above 15 %.
"""
import argparse
import json
import pathlib
import random
import statistics
import subprocess
import sys
import tempfile

SMALL = dict(type="gpt2", hidden_size=256, num_layers=6, num_heads=4, seq_length=256, dropout=0)
MIDDLE = dict(type="gpt2", hidden_size=512, num_layers=4, num_heads=8, seq_length=512, dropout=0)
LARGE = dict(type="llama", hidden_size=768, num_layers=3, num_heads=12, seq_length=512)

# name, model, bf16, ranks, micro-batch, micro-batches per step, further keys
CASES = [
    ("small, fp32", SMALL, False, 1, 4, 1, {}),
    ("small, bf16, 2 ranks, ZeRO 1", SMALL, True, 2, 4, 1, {"zero_optimization": {"stage": 1}}),
    ("middle, bf16", MIDDLE, True, 1, 2, 2, {}),
    ("middle, bf16, full recompute", MIDDLE, True, 1, 2, 2, {"training": {"recompute": "full"}}),
    ("middle, fp32, selective recompute", MIDDLE, False, 1, 2, 1, {"training": {"recompute": "selective"}}),
    ("middle, bf16, 2 ranks, ZeRO 3", MIDDLE, True, 2, 2, 2, {"zero_optimization": {"stage": 3}}),
    ("middle, bf16, tensor 2", MIDDLE, True, 2, 2, 2, {"parallel": {"tensor": 2}}),
    ("middle, bf16, pipeline 2", MIDDLE, True, 2, 1, 8, {"parallel": {"pipeline": 2}}),
    ("middle, bf16, context 2", MIDDLE, True, 2, 2, 2, {"parallel": {"context": 2}}),
    ("middle, bf16, 2 ranks, ZeRO 3, layered", MIDDLE, True, 2, 1, 4,
     {"zero_optimization": {"stage": 3}, "parallel": {"schedule": "layered"}, "training": {"recompute": "full"}}),
    ("large, bf16, optimizer on the host", LARGE, True, 1, 2, 1,
     {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}),
    ("large, bf16, optimizer on NVMe", LARGE, True, 1, 2, 1,
     {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": "FOLDER"}}}),
    ("large, fp32, 2 ranks, ZeRO 2", LARGE, False, 2, 1, 2, {"zero_optimization": {"stage": 2}}),
    ("large, bf16, tensor 2, recompute", LARGE, True, 2, 2, 1,
     {"parallel": {"tensor": 2}, "training": {"recompute": "full"}}),
]


def run(*command):
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))}\nended with {done.returncode}: {done.stderr[-2000:]}")
    return done.stdout


def configuration(case, folder):
    _, model, bf16, _, micro, accumulated, more = case
    keys = {"model": {**model, "vocab_size": 8192}, "train_micro_batch_size_per_gpu": micro,
            "gradient_accumulation_steps": accumulated, "steps_per_print": 0, "device": {"type": "cpu"},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "data": {"path": f"{folder}/corpus"}, "training": {"steps": 1}}
    if bf16:
        keys["bf16"] = {"enabled": True}
    for section, values in more.items():
        keys[section] = {**keys.get(section, {}), **values}
    return json.dumps(keys).replace("FOLDER", str(folder))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--program", default="build/sherd")
    parser.add_argument("--machine")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--folder", help="where data, files of states and the machine's file go")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        folder = pathlib.Path(name)
        words = random.Random(1)
        folder.joinpath("text").write_text("".join(chr(words.randrange(32, 127)) for _ in range(400_000)))
        run(given.program, "prepare", "--input", folder / "text", "--output", folder / "corpus")
        machine = given.machine or folder / "machine.json"
        if not given.machine:
            run(given.program, "bench", "machine", "--output", machine, "--path", folder)
        errors = []
        print(f"{'configuration':42} {'measured':>10} {'predicted':>10} {'error':>8}")
        for case in CASES:
            config, metrics = folder / "config.json", folder / "metrics.jsonl"
            config.write_text(configuration(case, folder))
            plan = json.loads(run(given.program, "plan", "--config", config, "--machine", machine, "--gpus", case[3],
                                  "--as-is", "--json"))["plans"][0]
            run(given.program, "train", "--config", config, "--ranks", case[3], "--steps", given.steps, "--metrics", metrics)
            steps = [json.loads(line) for line in metrics.read_text().splitlines()]
            seconds = statistics.median(step["step_ms"] for step in steps[2:] if "step_ms" in step) / 1e3
            errors.append(plan["step_s"] / seconds - 1)
            parts = ", ".join(f"{key} {1e3 * value:.0f}" for key, value in plan["parts_s"].items() if value > 5e-4)
            print(f"{case[0]:42} {1e3 * seconds:7.1f} ms {1e3 * plan['step_s']:7.1f} ms {100 * errors[-1]:+7.1f} %   {parts}")
        median, worst = statistics.median(map(abs, errors)), max(errors, key=abs)
        print(f"median error {100 * median:.1f} %, worst {100 * worst:+.1f} %")
        sys.exit(median > 0.08 or abs(worst) > 0.15)


if __name__ == "__main__":
    main()
