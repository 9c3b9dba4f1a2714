#!/usr/bin/env python3
"""What `sherd estimate` says against the memory in which `sherd train` resides.

  bench/resident_memory.py --data PREFIX [--build build] [--steps 4] [--only NAME] [--nvme DIR] [--json]

Each configuration is trained for a few steps, on ranks that are threads or processes, while a sampler adds up, every 10 ms
and over all processes of the run, the anonymous and the shared memory of /proc/PID/smaps_rollup (proportional shares,
so that a page which several ranks map counts once). Pages of files, the program's and its libraries' code among them,
the kernel takes back when it needs memory; they are listed apart. PREFIX is a dataset of `sherd prepare`.
Prints a table, or with --json one object per line: bytes estimated (and of these the allowance for the process
itself), bytes resident, their ratio.
"""
import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(HERE)
NVME_BOTH = ["zero_optimization.offload_optimizer.device=nvme", "zero_optimization.offload_param.device=nvme",
             "zero_optimization.offload_param.buffer_size=4e6", "zero_optimization.offload_param.max_in_cpu=0",
             "zero_optimization.sub_group_size=2e6"]
FP32 = ["bf16.enabled=false"]
WIDE = ["model.hidden_size=512", "model.num_heads=8"]
# name: ranks, how they run, keys
CASES = {
    "demo, 1 rank": (1, "threads", []),
    "demo, 2 ranks": (2, "threads", []),
    "demo, 4 ranks": (4, "threads", []),
    "demo, 2 processes": (2, "processes", []),
    "demo, 4 processes": (4, "processes", []),
    "demo, 4 processes under mpirun": (4, "mpirun", []),
    "demo in fp32, 2 ranks": (2, "threads", FP32),
    "stage 0, 1 rank": (1, "threads", ["zero_optimization.stage=0"]),
    "stage 0 in fp32, 2 ranks": (2, "threads", FP32 + ["zero_optimization.stage=0"]),
    "stage 0, 4 processes": (4, "processes", ["zero_optimization.stage=0"]),
    "stage 2, wider, 2 ranks": (2, "threads", WIDE + ["zero_optimization.stage=2"]),
    "full recompute, 2 ranks": (2, "threads", ["training.recompute=full"]),
    "optimizer on host, 2 ranks": (2, "threads", ["zero_optimization.offload_optimizer.device=cpu"]),
    "optimizer on NVMe, 1 rank": (1, "threads", ["zero_optimization.offload_optimizer.device=nvme",
                                                 "zero_optimization.sub_group_size=2e6"]),
    "all on NVMe, 1 rank": (1, "threads", NVME_BOTH),
    "all on NVMe, 2 ranks": (2, "threads", NVME_BOTH),
    "all on NVMe, 4 processes": (4, "processes", NVME_BOTH),
    "all on NVMe in fp32, 2 ranks": (2, "threads", NVME_BOTH + FP32),
}


def processes_below(pid):
    found = [pid]
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children") as children:
                for child in children.read().split():
                    found += processes_below(int(child))
    except OSError:
        pass
    return found


def shares(pid, program):
    """Proportional shares of a process of the program, by kind, in KiB; none for others."""
    try:
        if os.path.realpath(f"/proc/{pid}/exe") != program:
            return None
        with open(f"/proc/{pid}/smaps_rollup") as lines:
            fields = [line.split() for line in lines]
    except OSError:
        return None
    return {words[0][:-1]: int(words[1]) for words in fields if words[0].startswith("Pss_")}


def resident(command, environment, program):
    """Peak over time of what all processes hold, and the file pages at that moment; bytes."""
    run = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    most, files = 0, 0
    while run.poll() is None:
        seen = [s for s in (shares(pid, program) for pid in processes_below(run.pid)) if s]
        held = sum(s.get("Pss_Anon", 0) + s.get("Pss_Shmem", 0) for s in seen)
        if held > most:
            most, files = held, sum(s.get("Pss_File", 0) for s in seen)
        time.sleep(0.01)
    output = run.stdout.read()
    if run.returncode != 0:
        sys.exit(f"{' '.join(command)}\nended with {run.returncode}:\n{output[-3000:]}")
    return most * 1024, files * 1024


def started(how, ranks, train):
    if how == "threads":
        return train + ["--ranks", str(ranks)]
    if how == "processes":
        return [os.path.join(ROOT, "tests/support/launch.sh"), str(ranks)] + train
    return ["mpirun", "--oversubscribe", "-n", str(ranks)] + train


def measure(case, arguments, program, folder):
    ranks, how, keys = CASES[case]
    sets = [f"data.path={arguments.data}", "training.eval_interval=2"]
    sets += ["device.type=cpu", "device.threads_per_rank=1"] + keys
    for state in ("optimizer", "param"):
        if f"zero_optimization.offload_{state}.device=nvme" in keys:
            sets.append(f"zero_optimization.offload_{state}.nvme_path={folder}")
    options = ["--config", os.path.join(ROOT, "configs/demo.json")]
    for assignment in sets:
        options += ["--set", assignment]
    told = json.loads(subprocess.run([program, "estimate", *options, "--gpus", str(ranks), "--json"], check=True,
                                     capture_output=True, text=True).stdout)
    train = [program, "train", *options, "--steps", str(arguments.steps)]
    environment = dict(os.environ, OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
    held, files = resident(started(how, ranks, train), environment, program)
    estimate = told["resident"]["of_machine"]
    itself = told["resident"]["process_itself"] * ranks
    return {"configuration": case, "estimate": estimate, "process_itself": itself, "resident": held, "files": files,
            "ratio": round(estimate / held, 4), "ratio_beside_process": round((estimate - itself) / held, 4)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--build", default=os.path.join(ROOT, "build"))
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--only", default="")
    parser.add_argument("--nvme", default=None)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    program = os.path.realpath(os.path.join(arguments.build, "sherd"))
    folder = tempfile.mkdtemp(prefix="sherd-resident-", dir=arguments.nvme)
    mib = 1 << 20
    try:
        if not arguments.json:
            print(f"{'configuration':32}  estimate  resident  ratio  (files)   MiB")
        for case in CASES:
            if arguments.only not in case:
                continue
            row = measure(case, arguments, program, folder)
            if arguments.json:
                print(json.dumps(row), flush=True)
            else:
                print(f"{case:32}  {row['estimate'] / mib:8.1f}  {row['resident'] / mib:8.1f}  {row['ratio']:5.3f}"
                      f"  ({row['files'] / mib:.1f})", flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
