#!/usr/bin/env python3
"""Writes torch_traces.h and schedule_traces.h: what PyTorch's optimizers and DeepSpeed's schedules do.

    make_traces.py --deepspeed CHECKOUT   # a source tree of DeepSpeed 0.19; nothing of it needs to be built

Needs torch. Neither building nor testing Sherd runs this file.
"""
import argparse
import importlib.util
import logging
import pathlib
import sys
import textwrap
import types

import torch

HERE = pathlib.Path(__file__).parent
STEPS, SIZE = 6, 5


def gradients():
    """Multiples of 1/64, exact in every floating type."""
    return [[(((37 * step + 11 * i + 5) % 41) - 20) / 64 for i in range(SIZE)] for step in range(STEPS)]


def trace(make):
    p = torch.nn.Parameter(torch.tensor([(3 * i - 7) / 8 for i in range(SIZE)], dtype=torch.float64))
    optimizer = make([p])
    rows = []
    for g in gradients():
        p.grad = torch.tensor(g, dtype=torch.float64)
        optimizer.step()
        rows.append(p.detach().tolist())
    return rows


OPTIMIZERS = {
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adam_l2": lambda p: torch.optim.Adam(p, lr=0.02, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.02, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd_decay": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.05),
    "sgd_momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.05),
    "sgd_nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.05, nesterov=True),
}

SCHEDULES = {  # name: (type, params)
    "range_test": ("LRRangeTest", dict(lr_range_test_min_lr=0.01, lr_range_test_step_size=3, lr_range_test_step_rate=2.0)),
    "range_stairs": ("LRRangeTest", dict(lr_range_test_min_lr=0.01, lr_range_test_step_size=3,
                                         lr_range_test_step_rate=2.0, lr_range_test_staircase=True)),
    "warmup_log": ("WarmupLR", dict(warmup_min_lr=0.001, warmup_max_lr=0.1, warmup_num_steps=6)),
    "warmup_linear": ("WarmupLR", dict(warmup_num_steps=6, warmup_type="linear")),
    "warmup_one": ("WarmupLR", dict(warmup_num_steps=1)),
    "decay": ("WarmupDecayLR", dict(total_num_steps=15, warmup_min_lr=0.001, warmup_num_steps=5)),
    "decay_short": ("WarmupDecayLR", dict(total_num_steps=4, warmup_num_steps=6, warmup_type="linear")),
    "cosine": ("WarmupCosineLR", dict(total_num_steps=16, warmup_num_steps=4, warmup_min_ratio=0.05, cos_min_ratio=0.1)),
    "cosine_short": ("WarmupCosineLR", dict(total_num_steps=3, warmup_num_steps=4, warmup_type="linear")),
    "cycle": ("OneCycle", dict(cycle_min_lr=0.01, cycle_max_lr=0.1, cycle_first_step_size=5)),
    "cycle_decay": ("OneCycle", dict(cycle_min_lr=0.01, cycle_max_lr=0.1, cycle_first_step_size=4,
                                     cycle_second_step_size=7, decay_lr_rate=0.5, decay_step_size=3,
                                     cycle_min_mom=0.6, cycle_max_mom=0.8, decay_mom_rate=0.02)),
    "cycle_stairs": ("OneCycle", dict(cycle_min_lr=0.01, cycle_max_lr=0.1, cycle_first_step_size=6,
                                      cycle_second_step_size=9, cycle_first_stair_count=3,
                                      cycle_second_stair_count=4)),
}


def load_schedules(checkout):
    """The schedule module alone, with a stand-in for the package around it."""
    utils = types.ModuleType("deepspeed.utils")
    utils.logger = logging.getLogger("deepspeed")
    utils.logger.setLevel(logging.ERROR)
    sys.modules["deepspeed"], sys.modules["deepspeed.utils"] = types.ModuleType("deepspeed"), utils
    path = pathlib.Path(checkout) / "deepspeed/runtime/lr_schedules.py"
    spec = importlib.util.spec_from_file_location("lr_schedules", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def schedule_trace(module, kind, params):
    p = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.Adam([p], lr=0.05)
    group = optimizer.param_groups[0]
    schedule = getattr(module, kind)(optimizer, **params)
    rows = [(group["lr"], group["betas"][0])]
    for _ in range(24):
        schedule.step()
        rows.append((group["lr"], group["betas"][0]))
    return rows


def cpp(x):
    return "{" + ", ".join(cpp(y) for y in x) + "}" if isinstance(x, (list, tuple)) else repr(float(x))


def save(name, lines):
    wrapped = [part for line in lines for part in textwrap.wrap(line, 110, subsequent_indent="    ") or [""]]
    (HERE / name).write_text("\n".join(wrapped) + "\n")


def write_traces(checkout):
    lines = ["#pragma once", "", f"// Made by make_traces.py with torch {torch.__version__}; {STEPS} steps in fp64 on {SIZE} elements.",
             "namespace sherd::optim::torch_traces {", "", f"inline constexpr double gradients[{STEPS}][{SIZE}] = {cpp(gradients())};"]
    for name, make in OPTIMIZERS.items():
        lines.append(f"inline constexpr double {name}[{STEPS}][{SIZE}] = {cpp(trace(make))};")
    save("torch_traces.h", lines + ["", "}  // namespace sherd::optim::torch_traces"])
    module = load_schedules(checkout)
    lines = ["#pragma once", "", "// Made by make_traces.py from DeepSpeed 0.19: {lr, beta1} of Adam with lr 0.05 at t = -1, 0, 1, …",
             "namespace sherd::optim::schedule_traces {", ""]
    for name, (kind, params) in SCHEDULES.items():
        lines.append(f"inline constexpr double {name}[25][2] = {cpp(schedule_trace(module, kind, params))};")
    save("schedule_traces.h", lines + ["", "}  // namespace sherd::optim::schedule_traces"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--deepspeed", required=True)
    write_traces(parser.parse_args().deepspeed)
