#!/usr/bin/env python3
"""Writes torch_traces.h and schedule_traces.h, what PyTorch's optimizers and DeepSpeed's schedules do, or long_traces.h,
50 steps of torch.optim.Adagrad and of DeepSpeed's CPU Lion.

    make_traces.py --deepspeed CHECKOUT   # a source tree of DeepSpeed 0.19; nothing of it needs to be built
    make_traces.py --long                 # with DeepSpeed 0.19.8 or newer installed, which builds its CPU Lion

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

LONG_STEPS, LONG_SIZE, LONG_KEPT = 50, 20, [1, 2, 5, 10, 25, 50]  # 16 elements for DeepSpeed's vectors, 4 for its tail
ADAGRADS = {
    "adagrad": dict(),
    "adagrad_lr_decay": dict(lr=0.1, lr_decay=0.05),
    "adagrad_weight_decay": dict(lr=0.05, weight_decay=0.1),
    "adagrad_initial": dict(lr=0.1, initial_accumulator_value=0.3),
    "adagrad_eps": dict(lr=0.1, eps=0.05),
    "adagrad_all": dict(lr=0.2, lr_decay=0.02, weight_decay=0.05, initial_accumulator_value=0.1, eps=1e-3),
}
LIONS = {  # products of rate and decay that are powers of two: DeepSpeed rounds 1 - lr*decay, to 1.3e-6 after 50 steps
    "lion": dict(lr=1e-4, betas=(0.9, 0.99)),
    "lion_decay": dict(lr=2**-7, betas=(0.9, 0.99), weight_decay=2**-3),
    "lion_betas": dict(lr=2**-6, betas=(0.95, 0.8), weight_decay=2**-2),
}
PUBLISHED_LION = dict(lr=0.01, betas=(0.9, 0.99), weight_decay=0.1)


def long_gradient(step):
    """Odd multiples of 1/64: none is zero."""
    return [(2 * ((37 * step + 11 * i + 5 + (step * step * i) % 7) % 41) - 41) / 64 for i in range(LONG_SIZE)]


def long_trace(make, dtype):
    p = torch.nn.Parameter(torch.tensor([(3 * i - 7) / 8 for i in range(LONG_SIZE)], dtype=dtype))
    optimizer = make([p])
    rows = []
    for step in range(1, LONG_STEPS + 1):
        p.grad = torch.tensor(long_gradient(step), dtype=dtype)
        optimizer.step()
        if step in LONG_KEPT:
            rows.append(p.detach().tolist())
    return rows


class PublishedLion(torch.optim.Optimizer):
    """Chen et al. 2023, algorithm 2, word by word."""

    def __init__(self, params, lr, betas, weight_decay=0):
        super().__init__(params, dict(lr=lr, betas=betas, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            lr, (beta1, beta2), decay = group["lr"], group["betas"], group["weight_decay"]
            for p in group["params"]:
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                c = beta1 * m + (1 - beta1) * p.grad
                assert c.abs().min() > 1e-5, "a sign that rounding decides says nothing"
                p -= lr * (torch.sign(c) + decay * p)
                m.mul_(beta2).add_(p.grad, alpha=1 - beta2)


def write_long_traces():
    import deepspeed
    from deepspeed.ops.lion import DeepSpeedCPULion

    lines = ["#pragma once", "", f"// Made by make_traces.py with torch {torch.__version__} in fp64 and the CPU Lion of DeepSpeed "
             f"{deepspeed.__version__} in fp32:", "// the weights after the steps `kept`.",
             "namespace sherd::optim::long_traces {", "",
             f"inline constexpr int steps = {LONG_STEPS}, size = {LONG_SIZE}, kept[{len(LONG_KEPT)}] = "
             "{" + ", ".join(map(str, LONG_KEPT)) + "};"]
    shape = f"[{len(LONG_KEPT)}][{LONG_SIZE}]"
    for name, params in ADAGRADS.items():
        rows = long_trace(lambda p: torch.optim.Adagrad(p, **params), torch.float64)
        lines.append(f"inline constexpr double {name}{shape} = {cpp(rows)};")
    for name, params in LIONS.items():
        rows = long_trace(lambda p: DeepSpeedCPULion(p, **params), torch.float32)
        published = long_trace(lambda p: PublishedLion(p, **params), torch.float64)
        torch.testing.assert_close(torch.tensor(rows, dtype=torch.float64), torch.tensor(published, dtype=torch.float64),
                                   rtol=5e-7, atol=5e-7)
        lines.append(f"inline constexpr double {name}{shape} = {cpp(rows)};")
    rows = long_trace(lambda p: PublishedLion(p, **PUBLISHED_LION), torch.float64)
    lines.append(f"inline constexpr double lion_published{shape} = {cpp(rows)};")
    save("long_traces.h", lines + ["", "}  // namespace sherd::optim::long_traces"])


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
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--deepspeed", metavar="CHECKOUT")
    which.add_argument("--long", action="store_true")
    arguments = parser.parse_args()
    if arguments.long:
        write_long_traces()
    else:
        write_traces(arguments.deepspeed)
