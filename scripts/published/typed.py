"""Runs of papers and of the tables of Megatron-LM and NeMo, typed in."""
import dataclasses

from published.models import gpt


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
    fp8: str = ""  # the recipe of products in FP8
    seconds: float = 0  # published
    peak: float = 0  # GiB of a GPU, published
    parameters_come_beside: bool = False  # those updated, beside the next step's forward
    exchanged: float = 1  # the share of experts' exchanges that the program waits for, beside Sherd
    fused: tuple = ()  # families of kernels that it has inside of others
    more: dict = dataclasses.field(default_factory=dict)  # of the configuration
    why_not: str = ""

    def layout(self):
        parts = [("t", self.tensor), ("p", self.pipeline), ("v", self.virtual), ("c", self.context), ("e", self.expert)]
        out = " ".join(f"{name}{size}" for name, size in parts if size > 1) or "data"
        marks = [(self.zero == 3, "z3"), (self.recompute != "none", self.recompute),
                 (self.sequence_parallel and self.tensor > 1, "sp")]
        return " ".join([f"{out} mb{self.micro}", *(mark for holds, mark in marks if holds)])

    def configuration(self):
        config = {"model": self.model, "train_batch_size": self.batch, "train_micro_batch_size_per_gpu": self.micro,
                  "device": {"type": "cuda"}, "data": {"path": "tokens"},
                  "training": {"steps": 1, "recompute": self.recompute}, "zero_optimization": {"stage": self.zero},
                  "parallel": {"tensor": self.tensor, "pipeline": self.pipeline, "context": self.context,
                               "sequence_parallel": self.sequence_parallel}, self.precision: {"enabled": True}}
        if self.fp8:
            config["fp8"] = {"enabled": True, "recipe": self.fp8}
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
