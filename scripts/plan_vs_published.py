#!/usr/bin/env python3
"""Prints the step times that `sherd plan` predicts beside published ones.

CSV has the columns source, model, task, gpu, gpus, precision, gbs_seqs, mbs, seq, fsdp, tp, pp, cp, vp, ep, other,
step_s and tokens_s_gpu: tables of Megatron Bridge, SimuMax and LLMQ. Tables of papers and of Megatron-LM and NeMo are
typed in below. Each machine has rates, the same for all its runs; no run has rates of its own.

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

ROOT = pathlib.Path(__file__).resolve().parent.parent

# ---------------------------------------------------------------------------------------------------------------------
# Machines of published runs that are no files of the product: older software, or other GPUs.


def machine(name, memory, peak, product, attention, rates, links, devices=8, host=None):
    products = [dict(dtype="bf16", peak=peak, attention=attention, **product), dict(dtype="fp32", peak=peak / 16)]
    out = dict(name=name, devices=devices, memory=memory, rates=[dict(products=products, **rates)], links=links)
    return dict(out, host=host) if host else out


def links(near, near_latency, far, far_latency, ranks=8):
    return [dict(name="near", ranks=ranks, bandwidth=near, latency=near_latency),
            dict(name="far", bandwidth=far, latency=far_latency)]


# Megatron-LM and NeMo of 2022 on DGX A100, before FlashAttention. Scores go through memory: of each, 13 bytes in
# forward for the product's, the softmax's and the dropout's reads and writes, and as many in backward. Products: 251 of
# 312 at 6144 x 12288 x 12288 (Azure), and 0.95 of that. Overlap stands for two things: exchanges of tensor ranks beside
# gradients of weights, of which little hides, and reductions of gradients, which these programs do behind the last
# backward of a pipeline, where they delay no other stage.
A100_2022 = machine("DGX A100, software of 2022", "80GB", 312e12, dict(efficiency=0.77, half_depth=64),
                    dict(forward=0.4, backward=0.4, forward_score_bytes=13, backward_score_bytes=13),
                    dict(bandwidth=1.65e12, latency=4e-6, overlap=0.6, units=108), links(230e9, 8e-6, 24e9, 10e-6))
# The year before one layout of 530B took a tenth longer: 54.1 s by 163 TFLOP/s, and 49.05 s with as large a batch of
# each pipeline. So products have a tenth less.
A100_2021 = copy.deepcopy(A100_2022)
A100_2021["name"] = "DGX A100, software of 2021"
A100_2021["rates"][0]["products"][0]["efficiency"] = 0.69
# Megatron Core 0.8 on DGX H100: products at the low end of what is published, 639 of 989 (PyTorch issue 100850), as
# cards in long runs take all the power they may. Reductions run beside backward (assumed: 0.9 of them).
H100_2024 = machine("DGX H100, Megatron Core 0.8", "80GB", 989e12, dict(efficiency=0.64, half_depth=256),
                    dict(forward=0.6, backward=0.45, half_keys=500),
                    dict(bandwidth=2.8e12, latency=4e-6, overlap=0.9, units=132), links(350e9, 8e-6, 46e9, 10e-6))
# SimuMax tells what operators reached on its B200: large products 0.45 (gradients of weights) to 0.49 of the peak,
# 0.473 together; attention 0.7 to 0.85 with all scores counted, of which half are computed; memory 0.67 of 8 TB/s, and
# 30 µs, where products have none; collectives 0.67 of 900 GB/s, 24 µs and 8 µs a rank, which is 20 µs a round.
B200_SIMUMAX = machine("B200 of SimuMax", "180GB", 2250e12, dict(efficiency=0.473), dict(forward=0.42, backward=0.35),
                       dict(bandwidth=5.3e12, latency=15e-6, overlap=0), links(606e9, 20e-6, 46e9, 20e-6))
MACHINES = {"a100_2022": A100_2022, "a100_2021": A100_2021, "h100_2024": H100_2024, "b200_simumax": B200_SIMUMAX}
# LLMQ's other cards, by data sheets; it keeps states in the host's memory and computes on them on the card.
PRO6000 = machine("RTX PRO 6000", "95GiB", 504e12, dict(efficiency=0.75, half_depth=64),
                  dict(forward=0.6, backward=0.5, half_keys=300), dict(bandwidth=1.6e12, latency=2.5e-6, overlap=0.8),
                  links(40e9, 10e-6, 12e9, 20e-6), host=dict(update=200e9, to_device=50e9, from_device=50e9))
RTX5060TI = machine("RTX 5060 Ti", "15GiB", 47.4e12, dict(efficiency=0.9, half_depth=64),
                    dict(forward=0.9, backward=0.6, half_keys=300), dict(bandwidth=0.4e12, latency=2.5e-6), [],
                    devices=1, host=dict(update=20e9, to_device=20e9, from_device=20e9))
# NVLink of a rack: 72 GPUs. Products as in configs/machines/hgx_b200.json, grouped ones too.
NVL72 = machine("GB200 NVL72", "185GB", 2500e12, dict(efficiency=0.70, half_depth=350),
                dict(forward=0.7, backward=0.47, half_keys=1150), dict(bandwidth=6.4e12, latency=2.5e-6, overlap=0.8),
                links(680e9, 12e-6, 47e9, 12e-6, 64), devices=4)
GB300 = dict(copy.deepcopy(NVL72), name="GB300 NVL72", memory="280GB")
MACHINES.update(pro6000=PRO6000, rtx5060ti=RTX5060TI, gb200=NVL72, gb300=GB300)
FILES = ("dgx_a100_80gb", "dgx_h100_80gb", "hgx_h200", "rtx_4090_x8", "hgx_b200")


def machine_named(name):
    if name in MACHINES:
        return MACHINES[name]
    text = (ROOT / "configs/machines" / f"{name}.json").read_text()
    return json.loads(re.sub(r"(?m)//[^\"\n]*$", "", text))


def count_rates(value):
    """Numbers of a machine but the data sheet's: peaks, numbers of ranks and units, sizes."""
    if isinstance(value, dict):
        kept = (v for k, v in value.items() if k not in ("devices", "memory", "peak", "ranks", "units"))
        return sum(map(count_rates, kept))
    return sum(map(count_rates, value)) if isinstance(value, list) else isinstance(value, (int, float))


# ---------------------------------------------------------------------------------------------------------------------
# Models


def gpt(hidden, layers, heads, vocabulary=51200, sequence=2048, **more):
    return dict(type="gpt2", hidden_size=hidden, num_layers=layers, num_heads=heads, vocab_size=vocabulary,
                seq_length=sequence, **more)


def llama(hidden, layers, heads, groups, inner, vocabulary=128256, **more):
    return {"type": "llama", "hidden_size": hidden, "num_layers": layers, "num_heads": heads, "num_kv_heads": groups,
            "head_dim": 128, "ffn_hidden_size": inner, "vocab_size": vocabulary, **more}


def qwen2(hidden, layers, heads, groups, inner, tied, head=128):
    return llama(hidden, layers, heads, groups, inner, 151936 if tied else 152064, type="qwen2", head_dim=head,
                 tie_embeddings=tied)


def qwen3_moe(hidden, layers, heads, inner):
    return llama(hidden, layers, heads, 4, inner, 151936, type="qwen3_moe",
                 moe=dict(experts=128, top_k=8, ffn_hidden_size=inner))


NAMED = {
    "llama3 8b": llama(4096, 32, 32, 8, 14336), "llama3 70b": llama(8192, 80, 64, 8, 28672),
    "llama3.1 405b": llama(16384, 126, 128, 8, 53248), "qwen3 30b a3b": qwen3_moe(2048, 48, 32, 768),
    "qwen3 235b a22b": qwen3_moe(4096, 94, 64, 1536), "llama3 70b cut to 12 layers": llama(8192, 12, 64, 8, 28672),
    "llama3 405b cut to 4 layers": llama(16384, 4, 128, 16, 53248),  # 16 groups in SimuMax's launcher, not 8
    "qwen2.5 0.5b": qwen2(896, 24, 14, 2, 4864, True, 64), "qwen2.5 1.5b": qwen2(1536, 28, 12, 2, 8960, True),
    "qwen2.5 3b": qwen2(2048, 36, 16, 2, 11008, True), "qwen2.5 7b": qwen2(3584, 28, 28, 4, 18944, False),
    "qwen2.5 14b": qwen2(5120, 48, 40, 8, 13824, False), "qwen2.5 32b": qwen2(5120, 64, 40, 8, 27648, False)}
# Whose shapes are not given here.
UNLIKE = [("deepseekv4", "sparse attention"), ("deepseek", "MLA"), ("kimi", "MLA"), ("moonlight", "MLA"),
          ("nemotron", "Mamba"), ("gpt oss", "attention sinks")]

# ---------------------------------------------------------------------------------------------------------------------
# Runs


@dataclasses.dataclass
class Run:
    set: str
    case: str
    family: str = ""  # of runs that share what is not published; --calibrate leaves out one
    model: dict = None
    machine: str = ""
    gpus: int = 0
    batch: int = 0
    micro: int = 1
    tensor: int = 1
    pipeline: int = 1
    virtual: int = 1
    context: int = 1
    expert: int = 1
    sequence_parallel: bool = True
    recompute: str = "none"
    zero: int = 0
    precision: str = "bf16"
    seconds: float = 0  # published
    peak: float = 0  # GiB of a GPU, published
    parameters_come_beside: bool = False  # those updated, beside the next step's forward
    more: dict = dataclasses.field(default_factory=dict)  # of the configuration
    why_not: str = ""

    def layout(self):
        parts = [("t", self.tensor), ("p", self.pipeline), ("v", self.virtual), ("c", self.context), ("e", self.expert)]
        out = " ".join(f"{name}{size}" for name, size in parts if size > 1) or "data"
        return f"{out} mb{self.micro}" + (f" {self.recompute}" if self.recompute != "none" else "") + (
            " sp" if self.sequence_parallel and self.tensor > 1 else "")

    def configuration(self):
        config = {"model": self.model, "train_batch_size": self.batch, "train_micro_batch_size_per_gpu": self.micro,
                  "device": {"type": "cuda"}, "data": {"path": "tokens"},
                  "training": {"steps": 1, "recompute": self.recompute}, "zero_optimization": {"stage": self.zero},
                  "parallel": {"tensor": self.tensor, "pipeline": self.pipeline, "context": self.context,
                               "sequence_parallel": self.sequence_parallel}, self.precision: {"enabled": True}}
        if self.virtual > 1:
            config["parallel"]["virtual_stages"] = self.virtual
        if self.expert > 1:
            config["parallel"]["expert"] = self.expert
        for section, keys in self.more.items():
            if isinstance(keys, dict):
                config.setdefault(section, {}).update(keys)
            else:
                config[section] = keys
        return config


BESIDE = {"zero_optimization": {"overlap_comm": True}}
FP32_GRADIENTS = {"data_types": {"grad_accum_dtype": "fp32"}, "communication_data_type": "fp32"}


def model_flops(layers, hidden, sequence, vocabulary, batch, recomputed=False):
    """Attention counted whole; with full recompute four passes instead of three."""
    passes, head = (96, 16) if recomputed else (72, 12)
    return passes * batch * layers * sequence * hidden ** 2 * (
        1 + sequence / (6 * hidden) + vocabulary / (head * hidden * layers))


# Korthikanti et al. 2022, arXiv 2205.05198: model, hidden, layers, heads, pipeline, virtual stages, batch, micro-batch,
# GPUs, seconds with full recompute, seconds with sequence parallelism and selective recompute. Tensor parallelism of 8.
SEEDS = [("22B", 6144, 48, 64, 1, 1, 4, 4, 8, 1.42, 1.10), ("175B", 12288, 96, 96, 8, 3, 64, 1, 64, 18.13, 13.75),
         ("530B", 20480, 105, 128, 35, 3, 280, 1, 280, 49.05, 37.83), ("1T", 25600, 128, 160, 64, 1, 512, 1, 512, 94.42,
                                                                      71.49)]
# One of 22B's layers: forward and backward together, in milliseconds, by recompute and sequence parallelism.
LAYERS = [("none", False, 19.6), ("none", True, 19.0), ("full", False, 27.2), ("selective", False, 20.9),
          ("selective", True, 20.3)]
# Narayanan et al. 2021, arXiv 2104.04473, table 1, and Megatron-LM's script for it: model, hidden,
# layers, heads, tensor, pipeline, virtual stages, micro-batch, batch, GPUs, TFLOP/s of a GPU with recompute counted.
A100_TABLE = [
    ("1.7B", 2304, 24, 24, 1, 1, 1, 16, 512, 32, 137), ("3.6B", 3072, 30, 32, 2, 1, 1, 16, 512, 64, 138),
    ("7.5B", 4096, 36, 32, 4, 1, 1, 16, 512, 128, 142), ("18B", 6144, 40, 48, 8, 1, 1, 8, 1024, 256, 135),
    ("39B", 8192, 48, 64, 8, 2, 1, 4, 1536, 512, 138), ("76B", 10240, 60, 80, 8, 4, 3, 2, 1792, 1024, 140),
    ("145B", 12288, 80, 96, 8, 8, 2, 2, 2304, 1536, 148), ("310B", 16384, 96, 128, 8, 16, 2, 1, 2160, 1920, 155),
    ("530B", 20480, 105, 128, 8, 35, 3, 1, 2520, 2520, 163), ("1T", 25600, 128, 160, 8, 64, 1, 1, 3072, 3072, 163)]
# Megatron-LM's README, Megatron Core 0.8: model, heads, hidden, layers, tensor, pipeline, GPUs, batch, TFLOP/s of a
# GPU.
H100_TABLE = [
    ("1.7B", 16, 2048, 24, 1, 1, 48, 192, 408.8), ("7.1B", 32, 4096, 30, 2, 1, 96, 192, 465.9),
    ("16B", 48, 6144, 32, 4, 1, 192, 192, 489.1), ("32B", 56, 7168, 48, 8, 1, 384, 192, 459.6),
    ("70B", 64, 8192, 84, 8, 2, 768, 384, 419.7), ("119B", 80, 10240, 92, 8, 4, 1536, 768, 420.5),
    ("177B", 96, 12288, 96, 8, 6, 2304, 1152, 432.8), ("314B", 128, 16384, 96, 8, 8, 3072, 1536, 474.4),
    ("462B", 144, 18432, 112, 8, 16, 6144, 3072, 459.9)]
# Its strong scaling of 177B, read off a plot to 3 %: GPUs, PFLOP/s. The layout is assumed to be the table's.
H100_SCALING = [(96, 44.5), (144, 66.5), (288, 132.5), (576, 265), (1152, 512), (3072, 1300), (4608, 1915)]
# NeMo Megatron on DGX A100: hidden, layers, heads; and of a release: model, GPUs, tensor, pipeline, virtual stages,
# micro-batch, batch, sequence parallelism, recompute, days for 300 billion tokens ("about"), ZeRO stage.
NEMO_MODELS = {"126M": (768, 12, 12), "5B": (4096, 24, 32), "20B": (6144, 44, 48), "40B": (8192, 48, 64),
               "175B": (12288, 96, 96)}
NEMO_DAYS = [
    ("2022-08", "5B", 160, 2, 1, 1, 2, 1440, False, "none", 4.8, 0),
    ("2022-08", "20B", 640, 2, 4, 1, 1, 1440, True, "selective", 6, 0),
    ("2022-08", "40B", 640, 4, 4, 1, 1, 1440, True, "selective", 10.3, 0),
    ("2022-08", "175B", 1024, 8, 8, 1, 2, 1536, True, "selective", 27, 0),
    ("2023-01", "126M", 64, 1, 1, 1, 4, 256, False, "none", 0.83, 1),
    ("2023-01", "5B", 128, 1, 1, 1, 2, 2048, False, "none", 5, 1),
    ("2023-01", "20B", 512, 4, 1, 1, 2, 2048, True, "none", 6, 1),
    ("2023-01", "40B", 1024, 8, 1, 1, 2, 2048, True, "none", 6, 1),
    ("2023-01", "175B", 1024, 8, 16, 6, 1, 2048, True, "none", 24, 1)]
# Its strong scaling: tokens per second of all GPUs. 2022-09's 175B is left out: a quarter below 2022-08's, unexplained.
NEMO_SCALING = [
    ("2022-08", "5B", 2, 1, 2, 1440, False, "none", 0,
     {8: 39543, 16: 79128, 40: 195047, 72: 344523, 80: 383500, 144: 670254, 160: 731791}),
    ("2022-08", "175B", 8, 8, 2, 1536, True, "selective", 0, {128: 20642, 256: 38025, 1024: 141306}),
    ("2022-09", "5B", 1, 1, 2, 2048, False, "none", 1,
     {8: 40345, 16: 79815, 32: 161754, 64: 312774, 128: 659481, 256: 1159288})]


def seed(entry, full):
    name, hidden, layers, heads, pipeline, virtual, batch, micro, gpus, with_full, with_selective = entry
    return Run("seeds", f"{name}", "Korthikanti", gpt(hidden, layers, heads), "a100_2022", gpus, batch, micro, 8,
               pipeline, virtual, sequence_parallel=not full, recompute="full" if full else "selective",
               precision="fp16", seconds=with_full if full else with_selective, more=BESIDE)


def h100_assumed(tensor, pipeline, layers):
    """What the H100 table does not tell, one rule for all rows: in a pipeline chunks of one layer and micro-batches of
    one sequence, without one of two. Scaling tells of the chunks: of 576 and of 12 micro-batches per step, behind six
    stages, it has nearly the same speed."""
    return (1, tensor, pipeline, layers // pipeline) if pipeline > 1 else (2, tensor, 1, 1)


def typed_runs():
    out = [seed(entry, full) for entry in SEEDS for full in (True, False)]
    for name, hidden, layers, heads, t, p, v, micro, batch, gpus, tflops in A100_TABLE:
        out.append(Run("megatron_a100", name, "Narayanan", gpt(hidden, layers, heads), "a100_2021", gpus, batch, micro,
                       t, p, v, sequence_parallel=False, recompute="full", precision="fp16",
                       seconds=model_flops(layers, hidden, 2048, 51200, batch, True) / (gpus * tflops * 1e12),
                       more=BESIDE))
    table = [(*row, "table") for row in H100_TABLE]
    table += [("177B", 96, 12288, 96, 8, 6, gpus, 1152, 1e3 * pflops / gpus, "scaling")
              for gpus, pflops in H100_SCALING]
    for name, heads, hidden, layers, t, p, gpus, batch, tflops, part in table:
        out.append(Run("megatron_h100", name if part == "table" else f"{name} scaling", "Megatron Core 0.8",
                       gpt(hidden, layers, heads, 131072, 4096, tie_embeddings=False), "h100_2024", gpus, batch,
                       *h100_assumed(t, p, layers), zero=1,
                       seconds=model_flops(layers, hidden, 4096, 131072, batch) / (gpus * tflops * 1e12),
                       parameters_come_beside=True, more={**BESIDE, **FP32_GRADIENTS}))
    nemo = [(era, name, gpus, t, p, v, micro, batch, sp, recompute, days * 86400 * batch * 2048 / 3e11, stage, "days")
            for era, name, gpus, t, p, v, micro, batch, sp, recompute, days, stage in NEMO_DAYS]
    nemo += [(era, name, gpus, t, p, 1, micro, batch, sp, recompute, batch * 2048 / tokens, stage, "scaling")
             for era, name, t, p, micro, batch, sp, recompute, stage, speeds in NEMO_SCALING
             for gpus, tokens in speeds.items()]
    for era, name, gpus, t, p, v, micro, batch, sp, recompute, seconds, stage, part in nemo:
        out.append(Run("nemo", f"{era} {name} {part}", f"NeMo {era}", gpt(*NEMO_MODELS[name], 50257), "a100_2022", gpus,
                       batch, micro, t, p, v, sequence_parallel=sp, recompute=recompute, zero=stage, seconds=seconds,
                       more=BESIDE))
    for name in NEMO_MODELS:
        out += [Run("nemo", f"{name} on {gpus}", why_not="extrapolated days, no layout") for gpus in (800, 480, 160)]
    return out


GPUS = {"DGX-GB300": "gb300", "DGX-GB200": "gb200", "DGX-B200": "hgx_b200", "DGX-H100": "dgx_h100_80gb",
        "H100 80GB": "dgx_h100_80gb", "H100": "dgx_h100_80gb", "B200 SXM": "b200_simumax", "4090": "rtx_4090_x8",
        "Pro6000": "pro6000", "5060Ti": "rtx5060ti"}
# LLMQ's rows that say BF16, whose commands ask for FP8: model, GPUs, seconds.
FP8_AFTER_ALL = {("Qwen2.5-32B", 4, 58.021), ("Qwen2.5-32B", 8, 28.041)}


def whole(text, otherwise=1):
    found = re.match(r"\s*(\d+)", text or "")
    return int(found.group(1)) if found else otherwise


def number(text):
    found = re.match(r"\s*([\d.]+)", text or "")
    return float(found.group(1)) if found else 0


def csv_run(row):
    source = row["source"]
    kind = "simumax" if "SimuMax" in source else "llmq" if "llmq" in source else "bridge"
    name = re.sub(r"[\s_-]+", " ", re.sub(r"\s*\(.*?\)", "", row["model"])).lower()
    run = Run(kind, row["model"], gpus=whole(row["gpus"]), batch=whole(row["gbs_seqs"], 0), micro=whole(row["mbs"]),
              tensor=whole(row["tp"]), pipeline=whole(row["pp"]), virtual=whole(row["vp"]), context=whole(row["cp"]),
              expert=whole(row["ep"]), seconds=number(row["step_s"]), peak=number(row.get("peak_gib", "")) or 0)
    precision, flags = row["precision"].upper(), row["other"]
    reasons = [why for start, why in UNLIKE if name.startswith(start)]
    if (kind == "bridge" and "BF16" not in precision) or re.match("FP8|MXFP8|NVFP4", precision) or (
            row["model"], run.gpus, run.seconds) in FP8_AFTER_ALL:
        reasons.append("FP8, MXFP8 or NVFP4 products")
    if row["task"].lower() == "lora":
        reasons.append("LoRA")
    run.model = NAMED.get(name)
    run.machine = GPUS.get(row["gpu"], "")
    if not reasons and not run.model:
        reasons.append("unknown model")
    if not reasons and not run.machine:
        reasons.append(f"no rates of {row['gpu']}")
    if not reasons and not (run.seconds and run.batch):
        reasons.append("no step time or batch")
    run.why_not = reasons[0] if reasons else ""
    if run.why_not:
        return run
    run.model = dict(run.model, seq_length=whole(row["seq"]))
    run.family = name.split(" cut")[0]
    if kind == "simumax":
        run.zero, run.more = 1, FP32_GRADIENTS
        if run.context > 1:
            run.more = dict(run.more, parallel={"context_method": "ulysses"})
    elif kind == "llmq":
        llmq_run(run, row, flags)
    else:
        run.zero = 3 if whole(row["fsdp"], 0) else 1
        run.more = BESIDE
        if "recompute" in flags:
            run.why_not = "recomputes parts of a block"
        elif flags:
            run.case += f" ({flags})"
    return run


def llmq_run(run, row, flags):
    run.zero, run.family = 1, row["gpu"]
    run.case = f"{row['model']} {row['gpu']} x {run.gpus}"
    told = round(run.seconds * number(row["tokens_s_gpu"]) * run.gpus / run.model["seq_length"] / 8) * 8
    if abs(told / run.batch - 1) > 0.1:  # rows of one table give a quarter of the batch that their speeds tell
        run.batch = told
    if re.search("--recompute-(ffn|att|qkv)", flags):
        run.why_not = "recomputes parts of a block"
    elif "--recompute-block" in flags:
        run.recompute = "full"
    elif "--recompute" in flags:
        run.recompute = "selective"
    run.more = {"training": {"moments_dtype": "bf16"}, "zero_optimization": {"overlap_comm": True}}
    if "--offload-opt" in flags or "--offload-master" in flags:
        run.more["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}


# ---------------------------------------------------------------------------------------------------------------------
# Predictions


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
        plans, error = self.plans(run.configuration(), rates, run.gpus, "--as-is")
        if not plans:
            return error
        seconds = plans[0]["step_s"]
        if run.parameters_come_beside:
            # Sherd waits for updated parameters; these runs gather them beside the next forward. The wait is what a
            # network without end saves of the update.
            fast = copy.deepcopy(rates)
            for link in fast["links"]:
                link.update(bandwidth=1e18, latency=0)
            alone, _ = self.plans(run.configuration(), fast, run.gpus, "--as-is")
            seconds -= plans[0]["parts_s"]["update"] - alone[0]["parts_s"]["update"]
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
            groups[run.set, json.dumps(run.model), run.machine, run.gpus, run.batch, run.precision].append(run)
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


def search(planner):
    """Seeds, with the layout left open."""
    rows = [("model", "published layout", "its step", "its place", "first", "saves", "first layout")]
    for entry in SEEDS:
        run = seed(entry, False)
        config = run.configuration()
        del config["train_micro_batch_size_per_gpu"], config["parallel"], config["training"]["recompute"]
        del config["zero_optimization"]
        plans, error = planner.plans(config, A100_2022, run.gpus)
        own = planner.seconds(run, A100_2022)
        if not plans:
            rows.append((run.case, run.layout(), f"{own:.4g}", "", "", "", error))
            continue
        place = [i for i, plan in enumerate(plans, 1) if plan["keys"]["parallel.tensor"] == str(run.tensor) and
                 plan["keys"]["parallel.pipeline"] == str(run.pipeline)]
        first = " ".join(f"{key.split('.')[-1]} {value}" for key, value in plans[0]["keys"].items() if value != "1")
        step = plans[0]["step_s"]
        rows.append((run.case, run.layout(), f"{own:.4g}", str(place[0]) if place else "none", f"{step:.4g}",
                     f"{100 * (1 - step / own):.1f} %", first.replace("train_micro_batch_size_per_gpu", "mb")))
    print_table("Searches on the seeds' GPUs: seconds of a step; of ten, the place of the published sizes",
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
            search(planner)
        else:
            tables(planner, runs, chosen.sets)


if __name__ == "__main__":
    main()
