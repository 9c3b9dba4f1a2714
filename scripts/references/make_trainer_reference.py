#!/usr/bin/env python3
"""Writes what transformers' Trainer makes of DeepSpeed files with "auto", for tests/config/trainer_test.cpp and
tests/optim/lr_schedule_test.cpp:

    make_trainer_reference.py        # writes tests/config/trainer_reference.h and tests/optim/trainer_traces.h

Needs torch, transformers and accelerate; DeepSpeed itself is not needed. Neither building nor testing Sherd runs this
file.
"""
import copy
import json
import logging
import os
import pathlib
import textwrap
import types

os.environ["ACCELERATE_USE_CPU"] = "1"
import torch  # noqa: E402
import transformers  # noqa: E402
import transformers.integrations.deepspeed as hf  # noqa: E402
from accelerate.utils.deepspeed import HfDeepSpeedConfig  # noqa: E402

TESTS = pathlib.Path(__file__).resolve().parents[2] / "tests"
HEAD = "// Written by scripts/references/make_trainer_reference.py with transformers {} and accelerate {}.\n#pragma once\n\n"


class Config(hf.HfTrainerDeepSpeedConfig, HfDeepSpeedConfig):
    """Without the check that DeepSpeed is installed."""

    def __init__(self, file):
        HfDeepSpeedConfig.__init__(self, file)
        self._dtype = None
        self.mismatches = []


OPTIMIZER = {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}}
WARMUP = {"type": "WarmupLR", "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"}}
DECAY = {"type": "WarmupDecayLR", "params": {**WARMUP["params"], "total_num_steps": "auto"}}
BATCH = {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}
ZERO3 = {"stage": 3, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
         "stage3_param_persistence_threshold": "auto"}
PRECISION = {"fp16": {"enabled": "auto", "loss_scale": 0}, "bf16": {"enabled": "auto"}}
ALL = {**BATCH, **PRECISION, "optimizer": OPTIMIZER, "scheduler": DECAY, "zero_optimization": ZERO3,
       "gradient_clipping": "auto"}

# (file, arguments, steps, hidden size); where transformers finds contradictions, they are the case.
CASES = [
    (ALL, {}, 100, 64),
    (ALL, {"learning_rate": 3e-4, "weight_decay": 0.1, "adam_beta1": 0.8, "adam_beta2": 0.95, "adam_epsilon": 1e-6,
           "warmup_steps": 7, "max_grad_norm": 0.5, "per_device_train_batch_size": 2,
           "gradient_accumulation_steps": 3, "precision": "bf16"}, 50, 100),
    (ALL, {"warmup_steps": 0.13, "precision": "fp16"}, 77, 48),
    (ALL, {"adam_beta2": 0.95, "warmup_steps": 12.9}, 1000, 7),
    ({**BATCH, "optimizer": OPTIMIZER, "scheduler": WARMUP, "zero_optimization": {**ZERO3, "stage": 2}},
     {"learning_rate": 1e-3, "warmup_steps": 5}, 20, 33),
    ({**ALL, "train_micro_batch_size_per_gpu": 4}, {"per_device_train_batch_size": 4, "precision": "fp32"}, 9, 16),
    ({**ALL, "fp16": {"enabled": False}, "bf16": {"enabled": True}}, {"precision": "bf16"}, 9, 16),
    ({**ALL, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.999]}}},
     {"learning_rate": 2e-3}, 9, 16),
    ({**ALL, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.999], "weight_decay": 0}}},
     {"learning_rate": 1e-3, "adam_beta2": 0.95, "weight_decay": 0.1}, 9, 16),
    ({**ALL, "fp16": {"enabled": True}}, {"precision": "bf16"}, 9, 16),
    ({**ALL, "gradient_clipping": 1.0, "gradient_accumulation_steps": 2, "train_micro_batch_size_per_gpu": 4},
     {"max_grad_norm": 0.5, "gradient_accumulation_steps": 3, "per_device_train_batch_size": 8}, 9, 16),
    ({**ALL, "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-3, "warmup_num_steps": 10}}},
     {"learning_rate": 1e-4, "warmup_steps": 20}, 9, 16),
]


def fill(file, arguments, steps, hidden):
    """The file as the Trainer hands it to DeepSpeed, and the keys that contradict an argument."""
    config = Config(copy.deepcopy(file))
    given = dict(arguments)
    precision = given.pop("precision", "fp32")
    args = transformers.TrainingArguments(output_dir="/tmp/unused", report_to=[], use_cpu=True, **given)
    view = types.SimpleNamespace(**{k: getattr(args, k) for k in (
        "per_device_train_batch_size", "gradient_accumulation_steps", "max_grad_norm", "learning_rate", "adam_beta1",
        "adam_beta2", "adam_epsilon", "weight_decay", "save_on_each_node", "get_warmup_steps")})
    view.world_size = 1
    view.fp16, view.bf16 = precision == "fp16", precision == "bf16"
    view.fp16_full_eval = view.bf16_full_eval = False
    config.trainer_config_process(view)
    try:
        config.trainer_config_finalize(view, types.SimpleNamespace(config=types.SimpleNamespace(hidden_size=hidden)),
                                       steps)
    except ValueError:
        pass
    found = [line.split("ds ")[1].split("=")[0] for line in config.mismatches]
    names = [line.split(" vs hf ")[1].split("=")[0] for line in config.mismatches]
    # Sherd has the batch of all ranks from the other two, and no argument for it.
    pairs = [(k, n) for k, n in zip(found, names) if not n.startswith("train_batch_size")]
    return config.config, pairs


def literal(value):
    return 'R"json(' + textwrap.fill(json.dumps(value), 100, break_long_words=False) + ')json"'


def rates(name, warmup, total):
    """Of 25 steps, from a rate of 0.05."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.05)
    schedule = transformers.get_scheduler(name, optimizer, num_warmup_steps=warmup, num_training_steps=total)
    out = []
    for _ in range(25):
        out.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    return out


def main():
    logging.disable(logging.WARNING)
    import accelerate
    head = HEAD.format(transformers.__version__, accelerate.__version__)
    text = head + """/// A file, the arguments of section training, and the file as Trainer fills it; or, in pairs of DeepSpeed's key and
/// Trainer's argument, what it finds contradictory.
namespace sherd::config::trainer_reference {

struct Case {
  const char *file, *training;
  int hidden_size;
  const char *filled, *contradictions;
};

inline const Case cases[] = {
"""
    for file, arguments, steps, hidden in CASES:
        filled, pairs = fill(file, arguments, steps, hidden)
        training = {"steps": steps, **arguments}
        text += f"    {{{literal(file)},\n     {literal(training)},\n     {hidden},\n     "
        text += f"{literal({} if pairs else filled)},\n"
        text += f"     \"{' '.join(f'{k} {n}' for k, n in pairs)}\"}},\n"
    text += "};\n\n}  // namespace sherd::config::trainer_reference\n"
    (TESTS / "config" / "trainer_reference.h").write_text(text)
    text = head + "/// Rates of 25 steps, from 0.05.\nnamespace sherd::optim::trainer_traces {\n\n"
    for name, type_, warmup, total in (("linear", "linear", 4, 20), ("linear_short", "linear", 30, 20),
                                       ("linear_plain", "linear", 0, 23), ("cosine", "cosine", 5, 25),
                                       ("constant", "constant_with_warmup", 6, 25)):
        values = ",\n    ".join(repr(rate) for rate in rates(type_, warmup, total))
        text += f"inline const double {name}[25] = {{\n    {values}}};\n"
    text += "\n}  // namespace sherd::optim::trainer_traces\n"
    (TESTS / "optim" / "trainer_traces.h").write_text(text)


if __name__ == "__main__":
    main()
