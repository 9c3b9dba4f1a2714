"""Machines of published runs that are no files of the product: older software, or other GPUs."""
import copy
import json
import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent


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
PRO6000 = machine("RTX PRO 6000", "95GiB", 504e12, dict(efficiency=0.75, half_depth=64, fp8=2),
                  dict(forward=0.6, backward=0.5, half_keys=300), dict(bandwidth=1.6e12, latency=2.5e-6, overlap=0.8),
                  links(40e9, 10e-6, 12e9, 20e-6), host=dict(update=200e9, to_device=50e9, from_device=50e9))
RTX5060TI = machine("RTX 5060 Ti", "15GiB", 47.4e12, dict(efficiency=0.9, half_depth=64, fp8=2),
                    dict(forward=0.9, backward=0.6, half_keys=300), dict(bandwidth=0.4e12, latency=2.5e-6), [],
                    devices=1, host=dict(update=20e9, to_device=20e9, from_device=20e9))
# NVLink of a rack: 72 GPUs, of which jobs take 64. Products as in configs/machines/hgx_b200.json, grouped ones too; in
# FP8 the best of all shapes reaches 3616, in bf16 1822 (ml-engineering). These are short runs: in long ones a card
# takes all the power it may, 1400 W of a GB300 and 1200 W of a GB200 (data sheets), which computes by so much slower.
def nvl72(name, memory, watts):
    power = watts / 1400
    return machine(name, memory, 2500e12, dict(efficiency=0.70 * power, half_depth=350, fp8=1.98),
                   dict(forward=0.7 * power, backward=0.47 * power, half_keys=1150, half_width=40),
                   dict(bandwidth=6.4e12, latency=2.5e-6, overlap=0.8), links(680e9, 12e-6, 47e9, 12e-6, 64), devices=4)


MACHINES.update(pro6000=PRO6000, rtx5060ti=RTX5060TI, gb200=nvl72("GB200 NVL72", "185GB", 1200),
                gb300=nvl72("GB300 NVL72", "280GB", 1400))


def read(name):
    """A file of the product."""
    text = (ROOT / "configs/machines" / f"{name}.json").read_text()
    return json.loads(re.sub(r"(?m)//[^\"\n]*$", "", text))


def machine_named(name):
    return MACHINES[name] if name in MACHINES else read(name)


# The same rates with more memory. In FP8 the best of all shapes reaches 3353, in bf16 1769 (ml-engineering).
HGX_B300 = dict(read("hgx_b200"), name="HGX B300", memory="268GiB")
HGX_B300["rates"][0]["products"][0]["fp8"] = 1.9
MACHINES["hgx_b300"] = HGX_B300


def count_rates(value):
    """Numbers of a machine but the data sheet's: peaks, numbers of ranks and units, sizes."""
    if isinstance(value, dict):
        kept = (v for k, v in value.items() if k not in ("devices", "memory", "peak", "ranks", "units"))
        return sum(map(count_rates, kept))
    return sum(map(count_rates, value)) if isinstance(value, list) else isinstance(value, (int, float))
