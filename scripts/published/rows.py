"""Runs of the rows of a CSV: tables of Megatron Bridge, SimuMax and LLMQ."""
import copy
import re

from published.models import NAMED, UNLIKE, with_next_token
from published.typed import BESIDE, FP32_GRADIENTS, Run

GPUS = {"DGX-GB300": "gb300", "DGX-GB200": "gb200", "DGX-B300": "hgx_b300", "DGX-B200": "hgx_b200",
        "DGX-H100": "dgx_h100_80gb", "H100 80GB": "dgx_h100_80gb", "H100": "dgx_h100_80gb",
        "B200 SXM": "b200_simumax", "4090": "rtx_4090_x8", "Pro6000": "pro6000", "5060Ti": "rtx5060ti"}
# LLMQ's rows that say BF16, whose commands ask for FP8: model, GPUs, seconds.
FP8_AFTER_ALL = {("Qwen2.5-32B", 4, 58.021), ("Qwen2.5-32B", 8, 28.041)}


def whole(text, otherwise=1):
    found = re.match(r"\s*(\d+)", text or "")
    return int(found.group(1)) if found else otherwise


def number(text):
    found = re.match(r"\s*([\d.]+)", text or "")
    return float(found.group(1)) if found else 0


def recipe_of(kind, row):
    """Sherd's recipe of FP8 for a row's precision, "" for bf16. MXFP8 shares a scale among 32 numbers, which one pass
    finds and applies: priced as runs of 128 numbers are, and its products by the data sheet's rate of FP8, which is the
    same. Tables of 2025-09 have the speed with a scale per tensor, and in brackets another."""
    text = row["precision"].upper()
    if kind == "llmq":
        after_all = (row["model"], whole(row["gpus"]), number(row["step_s"])) in FP8_AFTER_ALL
        return "current" if text.startswith("FP8") or after_all else ""
    if "BF16" in text:
        return ""
    return "blockwise" if re.match("MXFP8|FP8-MX|FP8-SC", text) else "current"


def csv_run(row):
    source = row["source"]
    kind = "simumax" if "SimuMax" in source else "llmq" if "llmq" in source else "bridge"
    name = re.sub(r"[\s_-]+", " ", re.sub(r"\s*\(.*?\)", "", row["model"])).lower()
    run = Run(kind, row["model"], gpus=whole(row["gpus"]), batch=whole(row["gbs_seqs"], 0), micro=whole(row["mbs"]),
              tensor=whole(row["tp"]), pipeline=whole(row["pp"]), virtual=whole(row["vp"]), context=whole(row["cp"]),
              expert=whole(row["ep"]), seconds=number(row["step_s"]), peak=number(row.get("peak_gib", "")) or 0)
    run.model, run.machine, run.fp8 = NAMED.get(name), GPUS.get(row["gpu"], ""), recipe_of(kind, row)
    if not run.seconds:  # rows of one model and length that have FLOP/s alone: 710e12 are 1,638 tokens/s in another
        told = number(row["tflops_gpu"]) * 1638 / 710
        run.seconds = told and run.batch * whole(row["seq"]) / (told * run.gpus)
    flags = row["other"]
    reasons = [why for start, why in UNLIKE if name.startswith(start)]
    if "NVFP4" in row["precision"].upper():
        reasons.append("NVFP4 products")
    if not reasons and not run.model:
        reasons.append("unknown model")
    if not reasons and not run.machine:
        reasons.append(f"no rates of {row['gpu']}")
    if not reasons and not (run.seconds and run.batch):
        reasons.append("no step time or batch")
    run.why_not = reasons[0] if reasons else ""
    if run.why_not:
        return run
    run.model = dict(copy.deepcopy(run.model), seq_length=whole(row["seq"]))
    run.family = name.split(" cut")[0]
    if kind == "simumax":
        run.zero, run.more = 1, FP32_GRADIENTS
        if run.context > 1:
            run.more = dict(run.more, parallel={"context_method": "ulysses"})
    elif kind == "llmq":
        llmq_run(run, row, flags)
    else:
        bridge_run(run, row, flags)
    return run


def bridge_run(run, row, flags):
    """Its recipes (src/megatron/bridge/perf_recipes) sum gradients in bf16 and, without FSDP, gather parameters beside
    the next forward. Parts of blocks that some of them compute again, 2 to 5 % of a step, are not counted."""
    run.zero = 3 if whole(row["fsdp"], 0) else 1
    run.parameters_come_beside = run.zero == 1
    run.more = copy.deepcopy(BESIDE)
    run.case = f"{row['release_or_date']} {run.case} {row['gpu'].replace('DGX-', '')} {row['precision']}"
    if row["task"] in ("SFT", "LoRA"):
        run.case += f" {row['task']}"
    if row["task"] == "LoRA":
        run.more["training"] = {"adapter": {"type": "lora", "rank": 16, "targets": ["q_proj", "k_proj", "v_proj"]}}
    if run.family == "deepseekv3" and "w/o MTP" not in row["model"]:
        run.model = with_next_token(run.model)
    if "tokendrop" in row["model"]:
        run.model["moe"]["capacity_factor"] = 1
    if "moe" in run.model:
        bridge_experts(run, row, flags)
    if re.search(r"recompute [^\[]", flags):
        run.why_not = "recomputes parts of a block"
    elif flags:
        run.case += f" ({flags})"


def bridge_experts(run, row, flags):
    """Experts of Megatron Bridge beside Sherd's, by its recipes."""
    ranks, overlaps = run.expert, "EP overlap on" in flags or "graphs, EP overlap" in flags
    if run.tensor > 1:  # its expert ranks lie across tensor ranks, which each send their own tokens
        run.expert //= run.tensor
        run.exchanged /= run.tensor
    family, gpu, release = run.family, row["gpu"].replace("DGX-", ""), row["release_or_date"]
    graphs = re.match(r"26\.0[6-9]", release) and run.fp8 == "blockwise" and not family.startswith("kimi") and (
        family, gpu) != ("gpt oss 120b", "B300")
    plain = "alltoall" in flags or (family == "qwen3 235b a22b" and gpu in ("H100", "B200")) or (
        family == "gpt oss 120b" and not graphs and gpu in ("H100", "B200", "GB200"))
    if not plain:
        # HybridEP and DeepEP send a token once to each rank, or to each machine, however many of its experts are there.
        near = 64 if gpu in ("GB200", "GB300") else 8
        run.exchanged *= sent_once(ranks if ranks <= near else ranks // near, run.model["moe"]["top_k"])
    overlaps |= bool(graphs) or (family, gpu) in (("qwen3 235b a22b", "H100"), ("gpt oss 120b", "GB200")) or (
        family == "deepseekv3" and gpu == "B200" and run.virtual > 1)
    if overlaps:
        # They run beside another micro-batch's kernels: half of them hides, by the four runs of Qwen3 30B-A3B with and
        # without.
        run.exchanged *= 0.5
    if graphs:
        # From 26.06 on a block's experts are few kernels: grouped products with the gate and the scales in them.
        run.fused = ("activation", "movement")
    if run.fp8 == "current":
        run.fp8 = "blockwise"  # rows from each rank have a scale and a product of their own in Sherd, not here


def sent_once(places, choices):
    """Sent of a token's choices where each other place has it once, over all that lie elsewhere."""
    if places == 1:
        return 1
    return (places - 1) * (1 - (1 - 1 / places) ** choices) / (choices * (places - 1) / places)


def llmq_run(run, row, flags):
    run.zero, run.family = 1, row["gpu"]
    run.case = f"{row['model']} {row['gpu']} x {run.gpus}" + (" FP8" if run.fp8 else "")
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
