#!/usr/bin/env python3
"""Prints the step times that `sherd plan` predicts beside published ones.

CSV has the columns source, model, task, gpu, gpus, precision, gbs_seqs, mbs, seq, fsdp, tp, pp, cp, vp, ep, other,
step_s and tokens_s_gpu: tables of Megatron Bridge, SimuMax and LLMQ. Tables of papers and of Megatron-LM and NeMo are
in published/. Each machine has rates, the same for all its runs; no run has rates of its own.

Usage: plan_vs_published.py CSV [--program build/sherd] [--set NAME]... [--ablations] [--search] [--calibrate MACHINE]
Without options: the tables of all sets, and of layers. --ablations: of runs that differ in layout alone, whether the
fastest is the fastest by the plan too. --search: whether a search finds published layouts. --calibrate: chooses a few
rates of a machine on all families of runs but one, and tells the error on that one.
"""
import argparse
import collections
import concurrent.futures
import copy
import csv
import dataclasses
import json
import math
import pathlib
import re
import statistics
import subprocess
import tempfile
import time

from published.machines import A100_2022, ROOT, count_rates, machine_named
from published.models import gpt
from published.rows import csv_run
from published.typed import LAYERS, SEEDS, seed, typed_runs

# ---------------------------------------------------------------------------------------------------------------------
# Predictions


def rates_beside(run, rates):
    """A machine for a program whose kernels do what several of Sherd's do."""
    families = [dict(family=name, bandwidth=1e18) for name in run.fused]
    if run.fp8 and "movement" not in run.fused:
        # Transformer Engine and LLMQ read an operand once for the codes of both its orders: per number 4 bytes for
        # Sherd's 6, and with a scale for a tensor, which needs a pass before, 6 for 10.
        faster = 10 / 6 if run.fp8 == "current" else 6 / 4
        families.append(dict(family="movement", bandwidth=faster * rates["rates"][0]["bandwidth"]))
    if not families:
        return rates
    out = copy.deepcopy(rates)
    out["rates"][0]["families"] = families
    return out


class Planner:
    def __init__(self, program, folder):
        self.program, self.folder, self.kept, self.machines, self.count = program, pathlib.Path(folder), {}, {}, 0

    def file(self, value, name):
        self.count += 1
        path = self.folder / f"{name}{self.count}.json"
        path.write_text(json.dumps(value))
        return path

    def plan(self, config, rates, gpus, *options):
        """The program's answer, or {"error": its last words}."""
        key = json.dumps([config, rates, gpus, options])
        if key in self.kept:
            return self.kept[key]
        devices = min(gpus, rates["devices"])
        if gpus % devices:
            return {"error": f"{gpus} GPUs are no whole machines"}
        command = [self.program, "plan", "--config", self.file(config, "config"), "--machine",
                   self.file(rates, "machine"), "--nodes", str(gpus // devices), "--gpus", str(devices), "--json",
                   *options]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        try:
            out = json.loads(done.stdout)
        except ValueError:
            out = {"error": re.sub(r"/\S+/", "", done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "?")}
        self.kept[key] = out
        return out

    def plans(self, config, rates, gpus, *options):
        answer = self.plan(config, rates, gpus, *options)
        return answer.get("plans") or [], answer.get("error", "nothing fits")

    def seconds(self, run, rates):
        """Predicted seconds of a run, or what is wrong as text."""
        rates = rates_beside(run, rates)
        plans, error = self.plans(run.configuration(), rates, run.gpus, "--as-is")
        if not plans:
            return error
        seconds, bubble = plans[0]["step_s"], plans[0]["bubble"]
        if run.parameters_come_beside:
            # Sherd waits for updated parameters; these runs gather them beside the next forward. The wait is what a
            # network without end saves of the update.
            fast = copy.deepcopy(rates)
            for link in fast["links"]:
                link.update(bandwidth=1e18, latency=0)
            alone, _ = self.plans(run.configuration(), fast, run.gpus, "--as-is")
            seconds -= plans[0]["parts_s"]["update"] - alone[0]["parts_s"]["update"]
        if run.exchanged != 1:
            exchange = plans[0]["parts_s"]["exchanges of layers"]
            if run.tensor * run.context > 1:
                others = dataclasses.replace(run, expert=1).configuration()
                exchange -= self.plans(others, rates, run.gpus, "--as-is")[0][0]["parts_s"]["exchanges of layers"]
            seconds -= (1 - run.exchanged) * exchange * (1 + bubble)
        return seconds

    def memory(self, run):
        """GiB of a run of Sherd, exactly, or what is wrong as text."""
        plans, error = self.plans(run.configuration(), machine_named(run.machine), run.gpus, "--as-is")
        return plans[0]["device_bytes"] / 2**30 if plans else error

    def all_seconds(self, runs, rates=None):
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            return list(pool.map(lambda run: self.seconds(run, rates or machine_named(run.machine)), runs))

    def layer(self, recompute, sequence_parallel):
        """Seconds of one of 22B's layers, forward and backward: two runs that differ in their number, less updates."""
        def passes(layers):
            run = dataclasses.replace(seed(SEEDS[0], True), model=gpt(6144, layers, 64), recompute=recompute,
                                      sequence_parallel=sequence_parallel)
            plans, error = self.plans(run.configuration(), A100_2022, run.gpus, "--as-is")
            if not plans:
                raise SystemExit(error)
            return plans[0]["step_s"] - plans[0]["parts_s"]["update"]
        return (passes(12) - passes(4)) / 8


# ---------------------------------------------------------------------------------------------------------------------
# Tables


def print_table(title, rows):
    print(f"\n{title}\n")
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        cells = [cell.ljust(w) if i < 2 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths))]
        print("  " + "  ".join(cells).rstrip())


def summary(errors):
    worst = max(errors, key=abs)
    near = sum(abs(e) <= 0.1 for e in errors) / len(errors)
    return (f"{len(errors)} runs, median |error| {100 * statistics.median(map(abs, errors)):.1f} %, worst "
            f"{100 * worst:+.1f} %, within 10 %: {100 * near:.0f} %")


def error_rows(cases):
    """The table, the errors, and how often what kept the plan from an answer."""
    rows, errors = [("case", "layout", "published", "predicted", "error")], []
    failures = collections.Counter()
    for case, layout, published, predicted in cases:
        if isinstance(predicted, str):
            rows.append((case, layout, f"{published:.4g}", "none", ""))
            failures[re.sub(r"config\d+", "", predicted)[:90]] += 1
            continue
        errors.append(predicted / published - 1)
        rows.append((case, layout, f"{published:.4g}", f"{predicted:.4g}", f"{100 * errors[-1]:+.1f} %"))
    return rows, errors, failures


def print_kinds(runs, predicted):
    """Errors by family, machine and products."""
    rows = [("runs", "number", "median", "median |error|", "worst")]
    kinds = collections.defaultdict(list)
    for run, seconds in zip(runs, predicted):
        if isinstance(seconds, str):
            continue
        for kind in (run.family, run.machine, f"FP8, {run.fp8}" if run.fp8 else "bf16"):
            kinds[kind].append(seconds / run.seconds - 1)
    for kind, errors in sorted(kinds.items()):
        rows.append((kind, str(len(errors)), f"{100 * statistics.median(errors):+.1f} %",
                     f"{100 * statistics.median(map(abs, errors)):.1f} %", f"{100 * max(errors, key=abs):+.1f} %"))
    print_table("by family, machine and products", rows)


def tables(planner, runs, sets):
    summaries = []
    for name in dict.fromkeys(run.set for run in runs):
        if sets and name not in sets:
            continue
        own = [run for run in runs if run.set == name and not run.why_not]
        cases = [(f"{run.case} on {run.gpus}", run.layout(), run.seconds, predicted)
                 for run, predicted in zip(own, planner.all_seconds(own))]
        rows, errors, failures = error_rows(cases)
        print_table(f"{name}: seconds of a step", rows)
        if len(own) > 30:
            print_kinds(own, [case[3] for case in cases])
        reasons = failures + collections.Counter(run.why_not for run in runs if run.set == name and run.why_not)
        text = f"{name}: " + (summary(errors) if errors else "no run")
        if reasons:
            text += "; not expressed: " + ", ".join(f"{count} {why}" for why, count in reasons.most_common())
        summaries.append(text)
        print("\n  " + text)
        if peaks := [run for run in own if run.peak and not isinstance(planner.memory(run), str)]:
            rows, errors, _ = error_rows([(f"{run.case} on {run.gpus}", run.layout(), run.peak, planner.memory(run))
                                          for run in peaks])
            print_table(f"{name}: GiB that the fullest GPU holds, published (of another program) and of Sherd", rows)
            summaries.append(f"{name}, memory: " + summary(errors))
            print("\n  " + summaries[-1])
        if name == "seeds":
            cases = [("22B", f"t8 mb4 {recompute}" + (" sp" if sp else ""), ms, 1e3 * planner.layer(recompute, sp))
                     for recompute, sp, ms in LAYERS]
            rows, errors, _ = error_rows(cases)
            print_table("layers: milliseconds of a layer, forward and backward", rows)
            summaries.append("layers: " + summary(errors))
            print("\n  " + summaries[-1])
    print("\nRates beside the data sheet's:")
    for name in dict.fromkeys(run.machine for run in runs if not run.why_not and (not sets or run.set in sets)):
        print(f"  {name}: {count_rates({k: v for k, v in machine_named(name).items() if k in ('rates', 'links')})}")
    print("\n" + "\n".join(summaries))


def ablations(planner, runs):
    """Of runs alike but for their layout."""
    groups = collections.defaultdict(list)
    for run in runs:
        if not run.why_not and run.set != "nemo":
            groups[run.set, json.dumps(run.model), run.machine, run.gpus, run.batch, run.precision, run.fp8, run.fused,
                   json.dumps(run.more.get("training"))].append(run)
    rows, right, groups_told = [("group", "fastest published", "by the plan", "which took", "")], 0, 0
    pairs = alike = 0
    for own in groups.values():
        if len({run.layout() for run in own}) < 2:
            continue
        predicted = planner.all_seconds(own)
        if any(isinstance(p, str) for p in predicted):
            continue
        best = min(own, key=lambda run: run.seconds)
        chosen = own[min(range(len(own)), key=lambda i: predicted[i])]
        good = chosen.seconds <= 1.03 * best.seconds
        right, groups_told = right + good, groups_told + 1
        for i, a in enumerate(own):
            for j in range(i):
                pairs, alike = pairs + 1, alike + ((a.seconds < own[j].seconds) == (predicted[i] < predicted[j]))
        rows.append((f"{own[0].set} {own[0].case} on {own[0].gpus}, {own[0].batch} x {own[0].model['seq_length']}",
                     best.layout(), chosen.layout(), f"{100 * (chosen.seconds / best.seconds - 1):+.1f} %",
                     "" if good else "no"))
    print_table("Groups of runs that differ in layout", rows)
    print(f"\n  {right} of {groups_told}: the plan's fastest is the published fastest or within 3 % of it; "
          f"{alike} of {pairs} pairs in the published order")


# Rows of Megatron Bridge whose layouts are searched for: release, model, machine.
SEARCHED = [("26.04.01", "llama3 70b", "gb200"), ("26.04.01", "gpt oss 120b", "gb300"),
            ("26.04.01", "qwen3 235b a22b", "gb300"), ("26.04.01", "deepseekv3", "gb300")]


def search(planner, runs):
    """Seeds and some rows of Megatron Bridge, with the layout left open."""
    rows = [("model", "published layout", "its step", "its place", "first", "saves", "search s", "first layout")]
    chosen = [seed(entry, False) for entry in SEEDS]
    for release, family, name in SEARCHED:
        chosen += [run for run in runs if run.family == family and run.machine == name and not run.why_not
                   and run.case.startswith(release + " ")][:1]
    for run in chosen:
        config, rates = run.configuration(), machine_named(run.machine)
        for key in ("train_micro_batch_size_per_gpu", "parallel", "zero_optimization"):
            del config[key]
        del config["training"]["recompute"]
        begun = time.monotonic()
        plans, error = planner.plans(config, rates, run.gpus)
        took = time.monotonic() - begun
        own, lacks = planner.plans(run.configuration(), rates, run.gpus, "--as-is")
        own = own[0]["step_s"] if own else math.nan
        if not plans:
            rows.append((run.case, run.layout(), f"{own:.4g}", "", "", "", f"{took:.0f}", error or lacks))
            continue
        sizes = {"parallel.tensor": run.tensor, "parallel.pipeline": run.pipeline, "parallel.expert": run.expert}
        place = [i for i, plan in enumerate(plans, 1)
                 if all(plan["keys"].get(key, "1") == str(size) for key, size in sizes.items())]
        first = " ".join(f"{key.split('.')[-1]} {value}" for key, value in plans[0]["keys"].items() if value != "1")
        step = plans[0]["step_s"]
        rows.append((run.case, run.layout(), f"{own:.4g}", str(place[0]) if place else "none", f"{step:.4g}",
                     f"{100 * (1 - step / own):.1f} %", f"{took:.0f}",
                     first.replace("train_micro_batch_size_per_gpu", "mb")))
    print_table("Searches on published GPUs: seconds of a step of Sherd; of ten, the place of the published sizes",
                rows)


# Where --calibrate looks: path of a rate, and its bounds, within which data sheets and measurements leave it.
SOUGHT = [(("rates", 0, "products", 0, "efficiency"), 0.4, 0.9), (("rates", 0, "overlap"), 0, 1),
          (("links", 0, "bandwidth"), 0.5, 1.5), (("links", 0, "latency"), 2e-6, 40e-6)]


def calibrate(planner, runs, name):
    start = machine_named(name)
    own = [run for run in runs if run.machine == name and not run.why_not]
    families = sorted({run.family for run in own})
    print(f"{name}: {len(own)} runs, families {', '.join(families)}")

    def errors(rates, part):
        return [p / run.seconds - 1 for run, p in zip(part, planner.all_seconds(part, rates)) if not isinstance(p, str)]

    def place(rates, path):
        for step in path[:-1]:
            rates = rates[step]
        return rates, path[-1]

    for left_out in families:
        rest = [run for run in own if run.family != left_out]
        rest = rest[::max(1, len(rest) // 16)]  # a share of them is enough, and soon done
        if not rest:
            continue
        best, found = copy.deepcopy(start), math.inf
        for path, low, high in SOUGHT:
            at, key = place(start, path)
            scale = at.get(key, 1) if path[-1] == "bandwidth" else 1
            keep = copy.deepcopy(best)
            for i in range(6):
                tried = copy.deepcopy(keep)
                at, key = place(tried, path)
                at[key] = scale * (low + (high - low) * i / 5) if i < 5 else at.get(key, 1)
                error = statistics.mean(abs(math.log1p(e)) for e in errors(tried, rest))
                if error < found - 1e-4:
                    best, found = tried, error
        chosen = ", ".join(f"{path[-1]} {place(best, path)[0].get(path[-1], 1):.3g}" for path, _, _ in SOUGHT)
        held = [run for run in own if run.family == left_out]
        print(f"  without {left_out}: {chosen}\n    on {left_out}: {summary(errors(best, held))}; "
              f"with the given rates: {summary(errors(start, held))}", flush=True)


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("csv")
    options.add_argument("--program", default=str(ROOT / "build/sherd"))
    options.add_argument("--set", action="append", dest="sets", metavar="NAME")
    options.add_argument("--ablations", action="store_true")
    options.add_argument("--search", action="store_true")
    options.add_argument("--calibrate", metavar="MACHINE")
    chosen = options.parse_args()
    with open(chosen.csv, newline="") as file:
        runs = typed_runs() + [csv_run(row) for row in csv.DictReader(file)]
    with tempfile.TemporaryDirectory() as folder:
        planner = Planner(chosen.program, folder)
        if chosen.calibrate:
            calibrate(planner, runs, chosen.calibrate)
        elif chosen.ablations:
            ablations(planner, runs)
        elif chosen.search:
            search(planner, runs)
        else:
            tables(planner, runs, chosen.sets)


if __name__ == "__main__":
    main()
