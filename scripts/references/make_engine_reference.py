#!/usr/bin/env python3
"""Makes tests/engine/reference/{runs,groups,long}.{txt,safetensors}: what plain PyTorch says that the engine has to do.

runs.txt has a line per run: its name, the number of ranks, what is special about the model and the data, and the
configuration; `#` begins a note. For each run the safetensors file holds `NAME.trace`, fp64 [steps, 5]: loss, global
gradient norm (NaN where the step was skipped), learning rate, loss scale, whether the step was applied; and
`NAME.moved`, fp32: all weights after the last step minus those before the first, parameters in the order of their
names. Common to all runs are `init.PARAMETER`, and `tokens`, `labels` and `noise` by step and micro-batch of the
world, m = accumulated * ranks + rank.

The replay knows nothing of ranks: a step takes the mean of the gradients of all micro-batches, torch's clipping and
torch's optimizer. Schedules and loss scale follow DeepSpeed 0.19 (lr_schedules.py, loss_scaler.py). Everything is
computed in double, so that a comparison shows the engine's rounding alone; in bf16 and fp16 from weights rounded to that
dtype, of which the optimizer updates fp32 masters. The runs cover every triple of values of the factors that act on each other (CORE), every pair of
values of all.

groups.txt has the runs with parameter groups, likewise, and beside their traces `NAME.rates`, fp64 [steps, groups];
long.txt those of 50 steps, which see the data again and again.

Needs torch and numpy, and DeepSpeed 0.19.8 for its CPU Lion (made with torch 2.15 on a CPU); nothing that builds, tests or runs Sherd needs this
file. Usage: make_engine_reference.py [OUTPUT_FOLDER]
"""
import fnmatch
import itertools
import json
import math
import pathlib
import random
import sys

import numpy as np
import torch
import torch.nn.functional as F

from make_reference import save

BLOCKS = ("fixed", "left", "right", "extra", "up", "down")
VOCAB, HIDDEN, FFN, ROWS, SEQ, STEPS, MOST = 11, 6, 7, 8, 4, 8, 12
LOUD = 2.0**24  # what multiplies the loss of a micro-batch whose fp16 gradients must overflow

# ---- the model: Replayed in tests/engine/oracle/oracle_test.cpp ----


def shapes(run):
    out = {"embed.weight": (VOCAB, HIDDEN), "head.bias": (VOCAB,), "norm.weight": (HIDDEN,), "norm.bias": (HIDDEN,),
           "up.weight": (FFN, HIDDEN), "up.bias": (FFN,), "down.weight": (HIDDEN, FFN), "down.bias": (HIDDEN,)}
    layers = ["fixed", "left", "right"] + (["extra"] if run["unused"] != "none" else [])
    for name in layers:
        out[name + ".weight"], out[name + ".bias"] = (HIDDEN, HIDDEN), (HIDDEN,)
    if run["tied"]:
        del out["right.weight"]
    else:
        out["head.weight"] = (VOCAB, HIDDEN)
    return out


def initial_weights():
    """Multiples of 1/128, exact in every floating type."""
    every = shapes(dict(unused="never", tied=False))
    draw = lambda shape: torch.randint(-63, 64, shape).double() / 128
    return {name: draw(shape) + (0.5 if name == "norm.weight" else 0) for name, shape in every.items()}


def is_deep(step, accumulated):
    """Whether a micro-batch runs through `extra` where the model uses it at times."""
    return (step + accumulated) % 3 == 0


def loss_of(run, w, batch, loud, poisoned, deep):
    layer = lambda x, name, weight=None: F.linear(x, w[(weight or name) + ".weight"], w[name + ".bias"])
    x = w["embed.weight"][batch["tokens"]] + batch["noise"]
    if poisoned:
        x.register_hook(lambda grad: torch.full_like(grad, math.inf))
    x = x + torch.tanh(layer(x, "fixed"))
    y = F.layer_norm(x, (HIDDEN,), w["norm.weight"], w["norm.bias"], 1e-5)
    x = x + layer(F.gelu(layer(y, "up"), approximate="tanh"), "down")
    x = torch.tanh(layer(x, "left"))
    x = x + torch.tanh(layer(x, "right", "left" if run["tied"] else None))
    if run["unused"] == "sometimes" and deep:
        x = x + torch.tanh(layer(x, "extra"))
    logits = layer(x, "head", "embed" if run["tied"] else None)
    loss = F.cross_entropy(logits.view(-1, VOCAB), batch["labels"].view(-1), ignore_index=-100)
    return loss * LOUD if loud else loss


# ---- DeepSpeed's schedules, by the count of steps applied; t is its last_batch_iteration ----


def warmup_gamma(t, n, kind):
    return t / n if kind == "linear" else math.log(t + 1) / math.log(n)


def warmup_lr(p, t, base_lr):
    n, total = max(2, p["warmup_num_steps"]), p.get("total_num_steps")
    if t < 0:
        gamma = 0.0
    elif t < n:
        gamma = warmup_gamma(t, n, p["warmup_type"])
    else:
        gamma = 1.0 if total is None else max(0.0, (total - t) / max(1.0, total - n))
    return p["warmup_min_lr"] + (p["warmup_max_lr"] - p["warmup_min_lr"]) * gamma


def warmup_cosine_lr(p, t, base_lr):
    n, total = max(2, p["warmup_num_steps"]), p["total_num_steps"]
    if t < 0:
        return 0.0
    if t < n:
        return base_lr * (p["warmup_min_ratio"] + (1 - p["warmup_min_ratio"]) * warmup_gamma(t, n, p["warmup_type"]))
    progress = min(1.0, (t - n + 1) / max(1, total - n))
    return base_lr * max(0.0, p["cos_min_ratio"] + (1 - p["cos_min_ratio"]) * (1 + math.cos(math.pi * progress)) / 2)


def range_test_lr(p, t, base_lr):
    x = (t + 1) / p["lr_range_test_step_size"]
    if p["lr_range_test_staircase"]:
        x = math.floor(x)
    return p["lr_range_test_min_lr"] * (1 + p["lr_range_test_step_rate"] * x)


def one_cycle(p, t):
    """Learning rate and beta1."""
    low, high, calm, swift = (p[k] for k in ("cycle_min_lr", "cycle_max_lr", "cycle_min_mom", "cycle_max_mom"))
    first, second = p["cycle_first_step_size"], p["cycle_second_step_size"]
    total = first + second
    if t < 0:
        return low, calm
    if t >= total:
        d = (t - total + 1) / p["decay_step_size"]
        return low / (1 + p["decay_lr_rate"] * d), swift * (1 + p["decay_mom_rate"] * d)
    at = (t + 1) % total
    height = at / first if at <= first else (total - at) / second
    stairs = p.get("cycle_first_stair_count", 0)
    if stairs:
        height = math.floor(height * stairs) / stairs
    return low + (high - low) * height, swift - (swift - calm) * height


def schedule_of(config, base_lr):
    """t -> (learning rate, betas or None)"""
    if "scheduler" not in config:
        return lambda t: (base_lr, None)
    kind, p = config["scheduler"]["type"], config["scheduler"]["params"]
    if kind == "OneCycle":
        return lambda t: (one_cycle(p, t)[0], (one_cycle(p, t)[1], 0.99))
    rule = {"WarmupLR": warmup_lr, "WarmupDecayLR": warmup_lr, "WarmupCosineLR": warmup_cosine_lr,
            "LRRangeTest": range_test_lr}[kind]
    return lambda t: (rule(p, t, base_lr), None)


class LossScaler:
    """DeepSpeed's DynamicLossScaler; static where `loss_scale` is given."""

    def __init__(self, p):
        self.p, self.dynamic = p, not p.get("loss_scale")
        self.scale = 2.0 ** p["initial_scale_power"] if self.dynamic else float(p["loss_scale"])
        self.hysteresis, self.iteration, self.last_overflow = p.get("hysteresis", 2), 0, -1

    def update(self, overflow):
        if self.dynamic and overflow:
            if self.p["hysteresis"] == 1 or self.hysteresis == 1:
                assert self.scale > self.p["min_loss_scale"], "the run would end here"
                self.scale = max(self.scale / 2, float(self.p["min_loss_scale"]))
            else:
                self.hysteresis -= 1
            self.last_overflow = self.iteration
        elif self.dynamic:
            if self.p["consecutive_hysteresis"]:
                self.hysteresis = self.p["hysteresis"]
            clean = self.iteration - self.last_overflow - 1
            if clean > 0 and clean % self.p["loss_scale_window"] == 0:
                self.hysteresis = self.p["hysteresis"]
                self.scale *= 2
        self.iteration += 1


# ---- a run ----


def rules_of(section):
    """The section's rule, and that of each of its groups: type, params."""
    base = section["type"], dict(section["params"])
    out = [base]
    for group in section.get("groups", []):
        own = {k: v for k, v in group.items() if k not in ("match", "type")}
        kind = group.get("type", base[0])
        inherited = base[1] if kind == base[0] else {k: base[1][k] for k in ("lr", "weight_decay") if k in base[1]}
        out.append((kind, inherited | own))
    return out


def group_of(section, name):
    """0, or the number from 1 of the first group of which a pattern matches."""
    for i, group in enumerate(section.get("groups", [])):
        patterns = group["match"] if isinstance(group["match"], list) else [group["match"]]
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
            return i + 1
    return 0


def with_adamw_beside_muon(section):
    """The section with groups of AdamW for what Muon leaves: all but the weights of the blocks, behind those of others."""
    rules, groups = rules_of(section), [dict(group) for group in section.get("groups", [])]
    names = shapes(dict(unused="never", tied=False))
    left = [[] for _ in rules]
    for name in names:
        if rules[group_of(section, name)][0] == "Muon" and (name.split(".")[0] not in BLOCKS or name.endswith("bias")):
            left[group_of(section, name)].append(name)
    def beside(number):
        params = rules[number][1]
        group = {"match": left[number], "type": "AdamW", "lr": params.get("adam_lr", params["lr"]),
                 "weight_decay": params.get("weight_decay", 0.1)}
        return group | {key: params[key] for key in ("betas", "eps") if key in params}
    out = []
    for number, group in enumerate(groups, 1):
        out += [beside(number)] * (rules[number][0] == "Muon" and bool(left[number])) + [group]
    return section | {"groups": out + [beside(0)] * (rules[0][0] == "Muon" and bool(left[0]))}


def lion(groups, lr):
    from deepspeed.ops.lion import DeepSpeedCPULion
    return DeepSpeedCPULion(groups, lr=lr)


def adagrad(groups, lr):
    optimizer = torch.optim.Adagrad(groups, lr=lr)
    for group in optimizer.param_groups:  # torch begins all groups alike
        for p in group["params"]:
            optimizer.state[p]["sum"].fill_(group["initial_accumulator_value"])
    return optimizer


class Rule(torch.optim.Optimizer):
    """The formula of a paper, in torch's arithmetic. `everything`: the trained weights of all optimizers."""
    everything = ()

    def __init__(self, groups, lr):
        super().__init__(groups, dict(lr=lr))

    def mean_of(self, p, name):
        return self.state[p].setdefault(name, torch.zeros_like(p))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for p in group["params"]:
                self.update(p, group)


class Lamb(Rule):
    """You et al. 2020, algorithm 2, with DeepSpeed's limits of the trust ratio."""

    def direction(self, p, group, g):
        beta1, beta2 = group["betas"]
        m, v, t = self.mean_of(p, "m"), self.mean_of(p, "v"), group["step"]
        m.mul_(beta1).add_(g, alpha=1 - beta1)
        v.mul_(beta2).add_(g * g, alpha=1 - beta2)
        c1, c2 = (1 - beta1**t, 1 - beta2**t) if group.get("bias_correction", True) else (1, 1)
        return (m / c1) / ((v / c2).sqrt() + group["eps"]) + group["weight_decay"] * p

    def limited(self, ratio, group):
        return min(max(ratio, group.get("min_coeff", 0.01)), group.get("max_coeff", 10.0))

    def update(self, p, group):
        u = self.direction(p, group, p.grad)
        weight, step = p.norm().item(), u.norm().item()
        p -= group["lr"] * (self.limited(weight / step, group) if weight > 0 and step > 0 else 1) * u


class NVLamb(Lamb):
    """Gradients over their global norm where that exceeds a limit, and no limits of the ratio."""

    def direction(self, p, group, g):
        norm = math.sqrt(sum((w.grad.double()**2).sum().item() for w in self.everything))
        return super().direction(p, group, g / norm if norm > group.get("normalize_above", 0) else g)

    def limited(self, ratio, group):
        return ratio


class Lars(Rule):
    """You, Gitman and Ginsburg 2017; clipped: LARC."""

    def update(self, p, group):
        weight, gradient, decay = p.norm().item(), p.grad.norm().item(), group["weight_decay"]
        rate = group["lr"]
        if p.dim() > 1 and weight > 0 and gradient > 0:
            own = group.get("trust_coefficient", 1e-3) * weight / (gradient + decay * weight + group["eps"])
            rate = min(own, rate) if group.get("clip") else own * rate
        b = self.mean_of(p, "b")
        b.mul_(group["momentum"]).add_(p.grad + decay * p, alpha=rate)
        p -= b


class Muon(Rule):
    """torch.optim.Muon, which iterates in bf16, in the dtype of the weights."""

    def update(self, p, group):
        import torch.optim._muon as muon
        b = self.mean_of(p, "b")
        mu = group.get("momentum", 0.95)
        b.lerp_(p.grad, 1 - mu)
        x = p.grad.lerp(b, mu) if group.get("nesterov", True) else b.clone()
        x = x.T if x.shape[0] > x.shape[1] else x
        x = x / x.norm().clamp(min=group.get("ns_eps", 1e-7))
        a, b, c = group.get("ns_coefficients", (3.4445, -4.7750, 2.0315))
        for _ in range(group.get("ns_steps", 5)):
            gram = x @ x.T
            x = a * x + (b * gram + c * gram @ gram) @ x
        x = x.T if p.shape[0] > p.shape[1] else x
        p *= 1 - group["lr"] * group["weight_decay"]
        p -= muon._adjust_lr(group["lr"], group.get("adjust_lr_fn"), p.shape) * x


RULES = {"SGD": torch.optim.SGD, "AdamW": torch.optim.AdamW, "Adam": torch.optim.Adam, "Lion": lion, "Adagrad": adagrad,
         "Lamb": Lamb, "NVLamb": NVLamb, "LARS": Lars, "Muon": Muon}


def check_signs(optimizers):
    """Lion's step has the size of lr whatever its sign is taken from: nothing that rounding decides."""
    for optimizer in optimizers:
        for group in optimizer.param_groups if type(optimizer).__name__ == "DeepSpeedCPULion" else []:
            for p in group["params"]:
                mean = optimizer.state[p].get("exp_avg", torch.zeros_like(p))
                sign = group["betas"][0] * mean + (1 - group["betas"][0]) * p.grad
                assert ((sign == 0) | (sign.abs() > 1e-8)).all(), sign.abs()[sign != 0].min()


def optimizers_of(config, masters):
    """An optimizer of torch's for each type, whose param_groups hold `share`, the multiple of the schedule's rate."""
    section, by_type = with_adamw_beside_muon(config["optimizer"]), {}
    rules = rules_of(section)
    for number, (kind, params) in enumerate(rules):
        p = dict(params)
        decay = p.pop("weight_decay", 0.0)
        if kind == "Adam" and p.pop("adam_w_mode", True):
            kind = "AdamW"
        share = 1.0 if p["lr"] == rules[0][1]["lr"] else p["lr"] / rules[0][1]["lr"]
        mine = [w for name, w in masters.items() if group_of(section, name) == number]
        for weights, own_decay in (([w for w in mine if w.dim() > 1], decay), ([w for w in mine if w.dim() == 1], 0.0)):
            by_type.setdefault(kind, []).append(
                {"params": weights, "weight_decay": own_decay, "share": share, "number": number} | p)
    return [RULES[kind](groups, lr=1.0) for kind, groups in by_type.items()]


def gradients_of(run, weights, batch, flags):
    """The loss, and its gradient by trained parameter; zero where the loss does not depend on one."""
    w = {name: value.detach().to(run["dtype"]).double().requires_grad_(not is_frozen(run, name))
         for name, value in weights.items()}
    loss = loss_of(run, w, batch, *flags)
    loss.backward()
    return loss.item(), {name: torch.zeros_like(p) if p.grad is None else p.grad
                         for name, p in w.items() if p.requires_grad}


def is_frozen(run, name):
    return run["frozen"] and name.startswith("fixed")


def overflows(run, flags, grads, scale):
    """Whether scaled gradients overflow. May not depend on where an engine divides: an undivided sum over micro-batches
    fits fp16, or a 64th of one gradient does not."""
    largest = scale * max(g.abs().max().item() for g in grads.values())
    if run["dtype"] == torch.float16 and not flags[1]:
        assert largest > 64 * 65504 if flags[0] else largest < 65504 / 16, (run["name"], largest)
    return any(flags[:2])


def replay(run, init, data):
    config = run["config"]
    wide = torch.float64 if run["dtype"] == torch.float64 and not run.get("fp32_masters") else torch.float32
    masters = {name: init[name].to(wide).clone().requires_grad_() for name in shapes(run)}
    trained = {name: w for name, w in masters.items() if not is_frozen(run, name)}
    optimizers = optimizers_of(config, trained)
    for optimizer in optimizers:
        optimizer.everything = list(trained.values())
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    schedule = schedule_of(config, config["optimizer"]["params"]["lr"])
    scaler = LossScaler(config["fp16"]) if "fp16" in config else None
    accumulation, clipping = config["gradient_accumulation_steps"], config["gradient_clipping"]
    count, applied, trace, rates = run["ranks"] * accumulation, 0, [], []
    for step in range(run.get("steps", STEPS)):
        scale = scaler.scale if scaler else 1.0
        mean = {name: torch.zeros(w.shape, dtype=torch.float64) for name, w in trained.items()}
        losses, overflow = [], False
        for m in range(count):
            flags = ((step, m) in run["loud"], (step, m) in run["poison"], is_deep(step, m // run["ranks"]))
            loss, grads = gradients_of(run, masters, {name: t[step % STEPS, m] for name, t in data.items()}, flags)
            overflow = overflows(run, flags, grads, scale) or overflow
            losses.append(loss)
            for name, g in grads.items():
                mean[name] += g / count
        for name, w in trained.items():
            w.grad = mean[name].to(wide)
        norm = math.sqrt(sum((g**2).sum().item() for g in mean.values()))
        if scaler:
            scaler.update(overflow)
        lr, betas = schedule(applied - 1)
        trace.append([sum(losses) / count, math.nan if overflow else norm, lr, scale, not overflow])
        shares = {group["number"]: group["share"] for group in groups}
        rates.append([lr * shares[number] for number in sorted(shares)])
        if overflow:
            continue
        for group in groups:
            group["lr"] = lr * group["share"]
            if betas and "betas" in group:
                group["betas"] = betas
        if clipping > 0:
            torch.nn.utils.clip_grad_norm_(trained.values(), clipping)
        check_signs(optimizers)
        for optimizer in optimizers:
            optimizer.step()
        applied += 1
    moved = torch.cat([(masters[n].detach().double() - init[n]).flatten() for n in sorted(masters)])
    return np.array(trace, dtype=np.float64), moved.float().numpy(), np.array(rates, dtype=np.float64)


# ---- the runs ----

FACTORS = {
    "ranks": [1, 2, 3, 4],
    "accumulation": [1, 2, 3],
    "clipping": ["off", "rarely", "always"],
    "schedule": ["none", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle", "LRRangeTest"],
    "precision": ["fp32", "bf16", "fp16"],
    "optimizer": ["SGD", "momentum", "nesterov", "Adam", "AdamW"],
    "tied": [False, True],
    "frozen": [False, True],
    "unused": ["none", "never", "sometimes"],
    "decay": [0.0, 0.1],
    "grad_accum": ["own", "fp32"],
    "communication": ["own", "fp32"],
    "flavour": [0, 1],
    "scaling": list(range(6)),
}
def triples_of(choice):
    return set(itertools.combinations(choice.items(), 3))


def covering_choices(rng):
    """Greedily: the candidate of many that has the most triples not seen yet."""
    missing = set()
    for names in itertools.combinations(FACTORS, 3):
        missing |= {tuple(zip(names, values)) for values in itertools.product(*(FACTORS[n] for n in names))}
    out = []
    while missing:
        wanted = dict(min(missing, key=repr))
        candidates = [{k: wanted.get(k, rng.choice(v)) for k, v in FACTORS.items()} for _ in range(60)]
        best = max(candidates, key=lambda c: len(triples_of(c) & missing))
        missing -= triples_of(best)
        out.append(best)
    return out


# Settings of the loss scale, and the steps that overflow.
SCALINGS = [
    (dict(initial_scale_power=5, loss_scale_window=1, hysteresis=1), []),
    (dict(initial_scale_power=11, loss_scale_window=1000, hysteresis=2), [0, 1, 2, 4]),
    (dict(initial_scale_power=10, loss_scale_window=2, hysteresis=2, consecutive_hysteresis=True), [1, 3, 4]),
    (dict(initial_scale_power=10, loss_scale_window=2, hysteresis=2, consecutive_hysteresis=False), [0, 4, 5]),
    (dict(initial_scale_power=10, loss_scale_window=2, hysteresis=1, min_loss_scale=300), [1, 2]),
    (dict(loss_scale=192), [3]),
]


def precision_of(choice, rng, run, config):
    count = choice["ranks"] * choice["accumulation"]
    at = lambda steps: {(step, rng.randrange(count)) for step in steps}
    if choice["precision"] == "bf16":
        check = choice["flavour"] == 0
        config["bf16"] = {"enabled": True, "check_grad_overflow": check}
        run["poison"] = at([2, 5]) if check and choice["scaling"] % 2 == 0 else set()
    if choice["precision"] == "fp16":
        keys, overflows = SCALINGS[choice["scaling"]]
        dynamic = dict(min_loss_scale=1, consecutive_hysteresis=False) if "loss_scale" not in keys else {}
        config["fp16"] = {"enabled": True, **dynamic, **keys}
        run["loud" if choice["flavour"] == 0 else "poison"] = at(overflows)
    if choice["precision"] != "fp32" and choice["grad_accum"] == "fp32":
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    if choice["precision"] != "fp32" and choice["communication"] == "fp32":
        config["communication_data_type"] = "fp32"


def optimizer_config(choice):
    kind, other = choice["optimizer"], choice["flavour"] == 1
    pace = 0.25 if choice["precision"] == "bf16" else 1.0  # what bf16 rounds would grow from step to step
    if kind in ("SGD", "momentum", "nesterov"):
        params = dict(lr=pace * (0.4 if kind == "SGD" else 0.12))
        if kind != "SGD":
            params.update(momentum=0.8 if other else 0.9)
        if kind == "nesterov":
            params.update(nesterov=True)
        return {"type": "SGD", "params": params | dict(weight_decay=choice["decay"])}
    params = dict(lr=pace * 0.03, betas=[0.8, 0.95] if other else [0.9, 0.999],
                  eps=1e-2 if choice["precision"] == "bf16" else 1e-4 if other else 1e-3,
                  weight_decay=choice["decay"])
    if kind == "Adam":
        params.update(adam_w_mode=False)
    return {"type": "Adam" if kind == "Adam" or other else "AdamW", "params": params}


def schedule_config(choice, lr):
    kind, other = choice["schedule"], choice["flavour"] == 1
    warmup = dict(warmup_num_steps=3 if other else 4, warmup_type="linear" if other else "log")
    rates = dict(warmup_min_lr=lr / 10, warmup_max_lr=2 * lr)
    if kind == "WarmupLR":
        return {"type": kind, "params": warmup | rates}
    if kind == "WarmupDecayLR":
        return {"type": kind, "params": dict(total_num_steps=6) | warmup | rates}
    if kind == "WarmupCosineLR":
        return {"type": kind, "params": dict(total_num_steps=7, warmup_min_ratio=0.2, cos_min_ratio=0.1) | warmup}
    if kind == "LRRangeTest":
        return {"type": kind, "params": dict(lr_range_test_min_lr=lr / 4, lr_range_test_step_size=2,
                                             lr_range_test_step_rate=1.5, lr_range_test_staircase=other)}
    return {"type": kind, "params": dict(
        cycle_min_lr=lr / 4, cycle_max_lr=2 * lr, cycle_first_step_size=3, cycle_second_step_size=2, decay_lr_rate=0.5,
        decay_step_size=1, cycle_min_mom=0.7, cycle_max_mom=0.85, decay_mom_rate=0.03) |
        (dict(cycle_first_stair_count=2, cycle_second_stair_count=2) if other else {})}


def run_of(index, choice, rng):
    run = dict(ranks=choice["ranks"], tied=choice["tied"], frozen=choice["frozen"], unused=choice["unused"],
               loud=set(), poison=set(), name=f"{index:03}_{choice['precision']}_{choice['optimizer']}_{choice['schedule']}",
               dtype={"fp32": torch.float64, "bf16": torch.bfloat16, "fp16": torch.float16}[choice["precision"]])
    config = {"train_micro_batch_size_per_gpu": ROWS, "gradient_accumulation_steps": choice["accumulation"],
              "gradient_clipping": {"off": 0.0, "rarely": 0.8, "always": 0.2}[choice["clipping"]],
              "optimizer": optimizer_config(choice)}
    if choice["schedule"] != "none":
        config["scheduler"] = schedule_config(choice, config["optimizer"]["params"]["lr"])
    precision_of(choice, rng, run, config)
    run["config"] = config
    return run


# Runs with groups: rates and decays alone; two rules, of which the first group to match counts; a section of SGD.
GROUPED = {
    "rates": {"type": "AdamW", "params": dict(lr=0.03, betas=[0.9, 0.98], eps=1e-3, weight_decay=0.1), "groups": [
        {"match": ["*.bias", "norm.*"], "lr": 0.12, "weight_decay": 0.5},
        {"match": "embed*", "weight_decay": 0.0, "betas": [0.7, 0.9]},
        {"match": ["up.*", "down.*"], "lr": 0.01, "weight_decay": 0.4, "eps": 1e-2}]},
    "rules": {"type": "AdamW", "params": dict(lr=0.03, betas=[0.9, 0.98], eps=1e-3, weight_decay=0.1), "groups": [
        {"match": "*.weight", "type": "SGD", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.05},
        {"match": ["up.*", "head.?ias"], "lr": 0.06}]},
    "three": {"type": "SGD", "params": dict(lr=0.08, momentum=0.8, nesterov=True, weight_decay=0.1), "groups": [
        {"match": "[l-r]*.weight", "type": "AdamW", "lr": 0.02, "eps": 1e-3},
        {"match": "*.bias", "momentum": 0.0, "nesterov": False, "lr": 0.2},
        {"match": "embed.weight", "type": "Adam", "adam_w_mode": False, "eps": 1e-2, "betas": [0.8, 0.95]}]},
}


# Runs of 50 steps; DeepSpeed's Lion wants fp32.
LONG = {
    "adagrad": {"type": "Adagrad", "params": dict(lr=0.02, weight_decay=0.01, lr_decay=0.01, eps=1e-6,
                                                  initial_accumulator_value=0.1), "groups": [
        {"match": ["*.bias", "norm.*"], "lr": 0.05, "initial_accumulator_value": 0.5, "eps": 1e-4},
        {"match": "up.*", "lr_decay": 0.1, "weight_decay": 0.1}]},
    "lion": {"type": "Lion", "params": dict(lr=0.001, betas=[0.9, 0.99], weight_decay=0.1), "groups": [
        {"match": ["*.bias", "norm.*"], "lr": 0.002, "betas": [0.95, 0.98]},
        {"match": "down.*", "weight_decay": 1.0},
        {"match": "embed*", "type": "Adagrad", "lr": 0.02, "weight_decay": 0.05, "initial_accumulator_value": 0.25},
        {"match": "left.*", "type": "SGD", "lr": 0.05, "momentum": 0.5}]},
    "lamb": {"type": "Lamb", "params": dict(lr=0.01, betas=[0.9, 0.99], eps=1e-6, weight_decay=0.1), "groups": [
        {"match": ["*.bias", "norm.*"], "lr": 0.02, "max_coeff": 0.5, "min_coeff": 0.1},
        {"match": "down.*", "bias_correction": False, "lr": 0.005},
        {"match": "embed*", "type": "Adagrad", "lr": 0.02, "initial_accumulator_value": 0.25},
        {"match": "left.*", "type": "LARS", "lr": 0.5, "momentum": 0.5, "trust_coefficient": 0.02, "eps": 1e-6}]},
    "nvlamb": {"type": "NVLamb", "params": dict(lr=0.01, betas=[0.8, 0.95], eps=1e-6, weight_decay=0.05), "groups": [
        {"match": ["*.bias", "norm.*"], "normalize_above": 0.5},
        {"match": "down.*", "type": "LARS", "lr": 0.02, "momentum": 0.9, "trust_coefficient": 0.05, "eps": 1e-8,
         "clip": True, "weight_decay": 0.1}]},
    "muon": {"type": "Muon", "params": dict(lr=5e-4, adam_lr=0.01, weight_decay=0.2, betas=[0.9, 0.99], eps=1e-6), "groups": [
        {"match": "up.*", "momentum": 0.8, "nesterov": False, "adjust_lr_fn": "match_rms_adamw"},
        {"match": ["down.weight", "norm.*"], "lr": 1e-3, "ns_steps": 3, "ns_coefficients": [2.0, -1.5, 0.5],
         "adjust_lr_fn": "spectral_unclamped"},
        {"match": "right.weight", "ns_coefficients": [1.5, -0.5, 0.0], "ns_steps": 7},
        {"match": "head.weight", "type": "SGD", "lr": 0.05, "momentum": 0.5}]},
}


def long_runs():
    out = []
    for (name, section), ranks in itertools.product(LONG.items(), (1, 2)):
        config = {"train_micro_batch_size_per_gpu": ROWS, "gradient_accumulation_steps": 3 - ranks,
                  "gradient_clipping": [0.0, 1.0][ranks - 1], "optimizer": section}
        if ranks == 2:
            config["scheduler"] = {"type": "WarmupLR", "params": dict(
                warmup_num_steps=20, warmup_type="linear", warmup_min_lr=0.0, warmup_max_lr=section["params"]["lr"])}
        out.append(dict(ranks=ranks, tied=False, frozen=False, unused="none", loud=set(), poison=set(), steps=50,
                        name=f"{name}{ranks}_fp32_long", dtype=torch.float64, fp32_masters=name == "lion", config=config))
    return out


def grouped_runs():
    """Every set of groups on one rank and on two, each with another schedule, accumulation, clipping and precision."""
    out, schedules = [], ["none", "WarmupLR", "OneCycle", "WarmupCosineLR", "WarmupDecayLR", "LRRangeTest"]
    for (name, section), ranks in itertools.product(GROUPED.items(), (1, 2)):
        i = len(out)
        kind = schedules[i % len(schedules)]
        config = {"train_micro_batch_size_per_gpu": ROWS, "gradient_accumulation_steps": 1 + i % 2,
                  "gradient_clipping": [0.2, 0.0, 0.8][i % 3], "optimizer": section}
        if kind != "none":
            config["scheduler"] = schedule_config(dict(schedule=kind, flavour=i % 2), section["params"]["lr"])
        out.append(dict(ranks=ranks, tied=i % 2 == 1, frozen=i % 3 == 2, unused=["none", "sometimes"][i % 2], loud=set(),
                        poison=set(), name=f"{name}{ranks}_fp32_{kind}", dtype=torch.float64, config=config))
    return out


def line_of(run):
    places = lambda faults: ",".join(f"{step}:{m}" for step, m in sorted(faults)) or "-"
    return " ".join([run["name"], str(run["ranks"]), str(int(run["tied"])), str(int(run["frozen"])), run["unused"],
                     places(run["loud"]), places(run["poison"]), json.dumps(run["config"], separators=(",", ":"))])


def make_data():
    tokens = torch.randint(0, VOCAB, (STEPS, MOST, ROWS, SEQ))
    labels = (3 * tokens + 1) % VOCAB
    labels[torch.rand(tokens.shape) < 0.15] = -100
    labels[..., 0, 0] = tokens[..., 0, 0]  # never all of them
    return dict(tokens=tokens, labels=labels, noise=torch.randint(-8, 9, (*tokens.shape, HIDDEN)).double() / 32)


def write(folder, stem, runs, init, data, with_rates=False):
    tensors = {f"init.{name}": w.float().numpy() for name, w in init.items()}
    tensors |= {"tokens": data["tokens"].int().numpy(), "labels": data["labels"].int().numpy(),
                "noise": data["noise"].float().numpy()}
    for run in runs:
        tensors[run["name"] + ".trace"], tensors[run["name"] + ".moved"], rates = replay(run, init, data)
        if with_rates:
            tensors[run["name"] + ".rates"] = rates
    folder.mkdir(parents=True, exist_ok=True)
    note = "# scripts/references/make_engine_reference.py: name ranks tied frozen unused loud poison configuration\n"
    (folder / (stem + ".txt")).write_text(note + "".join(line_of(run) + "\n" for run in runs))
    save(folder / (stem + ".safetensors"), tensors)


def main():
    default = pathlib.Path(__file__).resolve().parents[2] / "tests/engine/reference"
    folder = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else default
    torch.manual_seed(11)
    torch.set_num_threads(1)
    rng = random.Random(11)
    init, data = initial_weights(), make_data()
    write(folder, "groups", grouped_runs(), init, data, with_rates=True)
    write(folder, "long", long_runs(), init, data, with_rates=True)
    write(folder, "runs", [run_of(i, choice, rng) for i, choice in enumerate(covering_choices(rng))], init, data)


if __name__ == "__main__":
    main()
