#!/usr/bin/env python3
"""Makes tests/engine/reference/one_bit.safetensors: what 1-bit Adam and 1-bit LAMB do, with simulated workers.

The algorithms are those of Tang et al., "1-bit Adam" (2021), Algorithm 1, and Li et al., "1-bit LAMB" (2022), Algorithm
1, with DeepSpeed's updates (no bias correction, weight decay added to the direction), in NumPy, fp32 but for the sums
of squares and 1-bit LAMB's coefficients (double). Workers' gradients and the first weights come from formulas that the
test has too (tests/engine/oracle/one_bit_oracle_test.cpp), so that the file holds results alone: `CASE.STEP.KIND`, fp32, of
both parameters one after the other (worker_error with a row per worker). A case is a
number of workers (replicas) and of shards into which each replica's states are cut; what one worker serves is an
equal part of a shard, and a scale belongs to what that part has of one parameter. In the cases called packed the first
parameter is three tensors, each with a trust ratio of its own, and padding, which has no gradients, no part in a scale,
and a ratio of 1.

Needs numpy (and torch, which make_reference.py takes). Usage: make_one_bit_reference.py [OUTPUT_FILE]
"""
import pathlib
import sys

import numpy as np

from make_reference import save

SHAPES = [340, 17]  # elements of the parameters
PACKED = [range(0, 100), [*range(100, 140), *range(220, 280)], range(140, 220)]  # elements of the first parameter
PADDING = range(280, 340)
ALIGNED = 64  # parameters, shards and parts begin at multiples of it
BETA1, BETA2, EPS, DECAY, RATE, FREEZE, STEPS = 0.9, 0.99, 1e-3, 0.1, 0.01, 8, 50
KEPT = [8, 9, 20, 50]
MIN_COEFF, MAX_COEFF, COEFF_BETA = 0.01, 10.0, 0.8
FACTOR_MIN, FACTOR_MAX, FACTOR_THRESHOLD = 0.9, 1.2, 0.05
F = np.float32


def up(n, to):
    return (n + to - 1) // to * to


def layout(workers, shards):
    """Where parameters begin in the flat segment, its length, and the runs: (worker that serves it, begin, end)."""
    begins, at = [], 0
    for n in SHAPES:
        begins.append(at)
        at += up(n, ALIGNED)
    shard = up(up(at, shards) // shards, ALIGNED)
    part = up(-(-shard // workers), ALIGNED)
    runs = []
    for first in range(0, shard * shards, shard):
        for worker in range(workers):
            low, high = first + min(shard, worker * part), first + min(shard, (worker + 1) * part)
            for begin, n in zip(begins, SHAPES):
                a, b = max(low, begin), min(high, begin + n)
                if a < b:
                    runs.append((worker, a, b))
    return begins, shard * shards, runs


def gradient(i, step, worker):
    """Of elements i; those at 7 of 50 get none before the variance freezes."""
    value = ((i * 7919 + step * 104729 + worker * 1299709) % 2003 - 1001).astype(F) / F(1001) * (1 + i % 5).astype(F)
    return np.where((i % 50 == 7) & (step <= FREEZE), F(0), value)


def weight(i):
    return ((i * 4813) % 997 - 498).astype(F) / F(498)


def signs(x):
    return np.where(x < 0, F(-1), F(1))


def scale(x):
    return F(np.sqrt(np.sum(x.astype(np.float64) ** 2) / x.size)) if x.size > 0 else F(0)


def norm(x):
    return np.sqrt(np.sum(x.astype(np.float64) ** 2))


class Lamb:
    """The trust ratios of tensors, whose elements of the flat segment `tensors` has."""

    def __init__(self, tensors, length):
        self.tensors, self.mean, self.factor = tensors, [0.0] * len(tensors), [1.0] * len(tensors)
        self.fresh = np.zeros(length, F)

    def step(self, step, p, m, before, v):
        """By what each element's step is multiplied; m and v are already those of the step."""
        direction = m / (np.sqrt(v) + F(EPS))
        update = direction + F(DECAY) * p
        ratio = np.ones_like(p)
        if step > FREEZE:
            if step == FREEZE + 1:
                self.fresh = v.copy()
            g = (m - F(BETA1) * before) / F(1 - BETA1)
            self.fresh = F(BETA2) * self.fresh + F(1 - BETA2) * (g * g)
            ratio = (np.sqrt(v) + F(EPS)) / (np.sqrt(self.fresh) + F(EPS))
        out = np.full_like(p, RATE)
        for k, at in enumerate(self.tensors):
            if step <= FREEZE:
                weight, size = norm(p[at]), norm(update[at])
                trust = np.clip(weight / size, MIN_COEFF, MAX_COEFF) if weight > 0 and size > 0 else 1.0
                if trust != 1.0:
                    self.mean[k] = COEFF_BETA * self.mean[k] + (1 - COEFF_BETA) * trust
            else:
                part = min(1.0, norm(direction[at]) / norm(update[at]))
                factor = float(ratio[at].max()) * part + 1 - part
                factor = np.clip(factor, FACTOR_MIN, FACTOR_MAX)
                last = self.factor[k]
                self.factor[k] = np.clip(factor, last * (1 - FACTOR_THRESHOLD), last * (1 + FACTOR_THRESHOLD))
                trust = self.mean[k] * self.factor[k]
            out[at] = F(RATE * trust)
        return out


def run(workers, shards, lamb=False, packed=False):
    begins, length, runs = layout(workers, shards)
    counted = np.ones(length, bool)
    if packed:
        counted[begins[0] + np.array(PADDING)] = False
    tensors = [begin + np.arange(n) for begin, n in zip(begins, SHAPES)]
    if packed:
        tensors[:1] = [begins[0] + np.array(each) for each in PACKED]
    trusts = Lamb(tensors, length)
    places = np.concatenate([begin + np.arange(n) for begin, n in zip(begins, SHAPES)])
    index = np.arange(places.size, dtype=np.int64)
    flat = lambda values: np.put(out := np.zeros(length, F), places, values) or out
    p, m, v, server = flat(weight(index)), flat(0), flat(0), flat(0)
    errors = [flat(0) for _ in range(workers)]
    kept = {}
    for step in range(1, STEPS + 1):
        before = m
        grads = [flat(gradient(index, step, worker)) for worker in range(workers)]
        for g in grads if packed else []:
            g[begins[0] + np.array(PADDING)] = 0
        if step <= FREEZE:
            total = grads[0].copy()
            for g in grads[1:]:
                total += g
            g = total * F(1 / workers)
            m = F(BETA1) * m + F(1 - BETA1) * g
            v = F(BETA2) * v + F(1 - BETA2) * (g * g)
        elif workers == 1:  # nobody to send anything to
            m = np.where(v > 0, F(BETA1) * m + F(1 - BETA1) * grads[0], F(0))
        else:
            sent = [F(BETA1) * m + F(1 - BETA1) * g + e for g, e in zip(grads, errors)]
            agreed = np.zeros(length, F)
            for _, a, b in runs:
                real = a + np.flatnonzero(counted[a:b])
                scales = [scale(x[real]) for x in sent]
                mean = np.zeros(b - a, F)
                for x, s in zip(sent, scales):
                    mean += s * signs(x[a:b])
                y = mean * F(1 / workers) + server[a:b]
                s = scale(y[real - a])
                agreed[a:b] = s * signs(y)
                server[a:b] = y - s * signs(y)
                for e, x, s in zip(errors, sent, scales):
                    e[a:b] = np.where(v[a:b] > 0, x[a:b] - s * signs(x[a:b]), F(0))
            m = np.where(v > 0, agreed, F(0))
        rate = trusts.step(step, p, m, before, v) if lamb else np.full_like(p, RATE)
        p = p - rate * (m / (np.sqrt(v) + F(EPS)) + F(DECAY) * p)
        if step in KEPT:
            for kind, x in [("fp32", p), ("exp_avg", m), ("exp_avg_sq", v), ("server_error", server)]:
                kept[f"{step}.{kind}"] = x[places]
            kept[f"{step}.worker_error"] = np.stack([e[places] for e in errors])
            if lamb:
                kept[f"{step}.exp_avg_sq_fresh"] = trusts.fresh[places]
    return kept


def main():
    default = pathlib.Path(__file__).resolve().parents[2] / "tests/engine/reference/one_bit.safetensors"
    tensors = {}
    cases = [(lamb, shape, False) for lamb in [False, True] for shape in [(1, 1), (2, 1), (3, 1), (2, 2)]]
    cases += [(False, (2, 1), True), (True, (1, 1), True), (True, (2, 2), True)]
    for lamb, (workers, shards), packed in cases:
        at = f"{'lamb' if lamb else 'adam'}.{workers}x{shards}{'.packed' if packed else ''}"
        for name, values in run(workers, shards, lamb, packed).items():
            if workers > 1 or "error" not in name:
                tensors[f"{at}.{name}"] = values.astype(F)
    save(pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else default, tensors)


if __name__ == "__main__":
    main()
