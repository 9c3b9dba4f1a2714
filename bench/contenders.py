"""Programs that take turns: what the comparing scripts of this folder share.

A contender is a program that prints "ready FACTS" (JSON) and then answers each line of its standard input with a line
of JSON (bench/programs/serving.h; bench/gpt2_pytorch.py). Machines change their speed within seconds, so contenders run in
rounds, and only ratios of medians, or of times of one round, are compared.
"""
import argparse
import json
import os
import statistics
import subprocess
import tempfile
import threading

HERE = os.path.dirname(os.path.abspath(__file__))
CORES = len(os.sched_getaffinity(0))


def options(doc, **numbers):
    """A parser of --build and of whole numbers, by their names and defaults; `doc` is the script's."""
    ap = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--build", default=os.path.join(HERE, "..", "build"))
    for name, default in numbers.items():
        ap.add_argument("--" + name.replace("_", "-"), type=int, default=default)
    return ap


class Unavailable(Exception):
    """A contender that cannot run here, and why."""


class Contender:
    def __init__(self, name, command, env=None, timeout=600):
        """`timeout`: seconds that it may take to start, or to answer."""
        self.name, self.command, self.timeout = name, [str(word) for word in command], timeout
        self.env = {**os.environ, **{k: str(v) for k, v in (env or {}).items()}}
        self.facts, self.process, self.errors = {}, None, None

    def start(self):
        """Its facts. Throws Unavailable with its last words when it does not come up."""
        if self.process:
            return self.facts
        self.errors = tempfile.TemporaryFile(mode="w+")
        try:
            self.process = subprocess.Popen(self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                            stderr=self.errors, text=True, env=self.env)
        except OSError as error:
            raise Unavailable(f"{self.command[0]}: {error.strerror}") from error
        line = self._read("starting")
        while not line.startswith("ready"):  # libraries may greet on standard output
            line = self._read("starting")
        self.facts = json.loads(line[5:].strip() or "{}")
        return self.facts

    def ask(self, line):
        """What it answers to a line: a number or an object. Throws Unavailable when it stops."""
        self.start()
        try:
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise Unavailable(self._last_words(line)) from None
        return json.loads(self._read(line))

    def stop(self):
        if not self.process:
            return
        process, self.process = self.process, None
        try:
            process.stdin.close()
            process.wait(30)
        except (OSError, subprocess.TimeoutExpired):
            process.kill()
            process.wait()
        process.stdout.close()
        self.errors.close()

    def _read(self, doing):
        late = threading.Event()
        timer = threading.Timer(self.timeout, lambda: (late.set(), self.process.kill()))
        timer.start()
        try:
            line = self.process.stdout.readline()
        finally:
            timer.cancel()
        if late.is_set():
            raise Unavailable(f"took longer than {self.timeout} s ({doing})")
        if not line:
            raise Unavailable(self._last_words(doing))
        return line

    def _last_words(self, doing):
        code = self.process.wait()
        self.errors.seek(0)
        lines = [line.strip() for line in self.errors.read().splitlines() if line.strip()]
        errors = [line for line in lines if "Error" in line or "error" in line or line.startswith("bench_")]
        said = (errors or lines or ["without a word"])[-1]
        return f"stopped with {code} ({doing}): {said[:400]}"


def alternate(contenders, rounds, measure, restart=False):
    """Yields per round {name: measure(contender)}. Who goes first changes. Contenders that fail are dropped, and their
    `facts` become {"unavailable": why}; `restart` stops each after its turn, so that one at a time holds memory."""
    running = list(contenders)
    for r in range(rounds):
        shift = r % len(running) if running else 0
        taken = {}
        for contender in running[shift:] + running[:shift]:
            try:
                taken[contender.name] = measure(contender)
            except Unavailable as why:
                contender.stop()
                contender.facts = {"unavailable": str(why)}
                running.remove(contender)
            if restart:
                contender.stop()
        yield taken
    for contender in running:
        contender.stop()


def medians(rounds):
    """{name: median} of what alternate() yielded, for those that finished every round."""
    return {name: statistics.median(r[name] for r in rounds) for name in (rounds[0] if rounds else {})
            if all(name in r for r in rounds)}


def median_of_ratios(rounds, above, below):
    """Median over rounds of one contender's value by another's; None where either is missing."""
    ratios = [r[above] / r[below] for r in rounds if above in r and below in r]
    return statistics.median(ratios) if ratios else None


def program(build, name):
    """A benchmark of the build folder."""
    return os.path.join(build, "bench", name)


def run_json(command, timeout=600):
    """The last line of JSON that a command prints. Throws Unavailable."""
    try:
        done = subprocess.run([str(word) for word in command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                              timeout=timeout)
    except OSError as error:
        raise Unavailable(f"{command[0]}: {error.strerror}") from error
    except subprocess.TimeoutExpired:
        raise Unavailable(f"took longer than {timeout} s") from None
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        said = [line.strip() for line in done.stderr.splitlines() if line.strip()] or ["without a word"]
        raise Unavailable(f"{os.path.basename(str(command[0]))} stopped with {done.returncode}: {said[-1][:400]}")
    return json.loads(lines[-1])
