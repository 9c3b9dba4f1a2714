#!/usr/bin/env python3
"""Writes the keys of DeepSpeed's configuration with their defaults, for tests/config/keys_test.cpp:

    make_deepspeed_keys.py        # writes tests/config/deepspeed_keys.h

The sections that DeepSpeed describes by classes or tables of defaults; names are the fields' and their aliases. Needs
torch and DeepSpeed (pip install deepspeed). Neither building nor testing Sherd runs this file.
"""
import enum
import json
import pathlib

import deepspeed
import pydantic
from deepspeed.comm.config import CommsLoggerConfig
from deepspeed.compile.config import CompileConfig
from deepspeed.module_inject import auto_ep_config
from deepspeed.monitor import config as monitor
from deepspeed.profiling.config import DeepSpeedFlopsProfilerConfig
from deepspeed.runtime import constants, precision_config
from deepspeed.runtime.activation_checkpointing.config import ACT_CHKPT_DEFAULT
from deepspeed.runtime.config import HybridEngineConfig
from deepspeed.runtime.swap_tensor.aio_config import AIO_DEFAULT_DICT
from deepspeed.runtime.tensor_parallel.config import TPConfig, TPTrainingConfig
from deepspeed.runtime.zero import config as zero, offload_config
from deepspeed.utils.config import DeepSpeedThroughputTimerConfig

TARGET = pathlib.Path(__file__).resolve().parents[2] / "tests/config/deepspeed_keys.h"
MODELS = {"zero_optimization": zero.DeepSpeedZeroConfig,
          "zero_optimization.offload_param": offload_config.DeepSpeedZeroOffloadParamConfig,
          "zero_optimization.offload_optimizer": offload_config.DeepSpeedZeroOffloadOptimizerConfig,
          "fp16": precision_config.DeepSpeedFP16Config, "bf16": precision_config.DeepSpeedBF16Config,
          "tensor_parallel": TPTrainingConfig, "tensor_parallel.tp": TPConfig,
          "tensor_parallel.tensor_parallel": TPConfig, "compile": CompileConfig, "comms_logger": CommsLoggerConfig,
          "hybrid_engine": HybridEngineConfig, "tensorboard": monitor.TensorBoardConfig,
          "wandb": monitor.WandbConfig, "csv_monitor": monitor.CSVConfig, "comet": monitor.CometConfig,
          "timers.throughput": DeepSpeedThroughputTimerConfig}
TOP = ["managed_gradient_accumulation", "steps_per_print", "dump_state", "disable_python_gc", "disable_allgather",
       "communication_data_type", "seq_parallel_communication_data_type", "prescale_gradients",
       "gradient_predivide_factor", "gradient_allreduce_op", "gradient_clipping", "zero_allow_untested_optimizer",
       "zero_force_ds_cpu_optimizer", "wall_clock_breakdown", "memory_breakdown", "dataloader_drop_last",
       "sparse_gradients", "graph_harvesting"]


def plain(value):
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, pydantic.BaseModel):
        return {name: plain(getattr(value, name)) for name in type(value).model_fields}
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def of_attributes(made):
    return {name: plain(value) for name, value in vars(made).items() if not name.startswith("_") and
            not callable(value)}


def sections():
    for section, model in MODELS.items():
        made = model()
        for name, field in model.model_fields.items():
            for key in {name, field.alias or name}:
                yield section, key, plain(getattr(made, name))
    experts = auto_ep_config.AutoEPConfig()
    for name in vars(experts):
        if not name.startswith("_") and name != "expert_w3":  # whose default is not to be there
            yield "expert_parallel", name, plain(getattr(experts, name))
    for section, values in [("activation_checkpointing", ACT_CHKPT_DEFAULT), ("aio", AIO_DEFAULT_DICT),
                            ("flops_profiler", of_attributes(DeepSpeedFlopsProfilerConfig({})))]:
        for key, value in values.items():
            yield section, key, plain(value)
    for key in TOP:
        default = [value for name, value in vars(constants).items()
                   if name.endswith("_DEFAULT") and getattr(constants, name[:-8], None) == key]
        if default:
            yield "", key, plain(default[0])


def main():
    text = (f"// Written by scripts/references/make_deepspeed_keys.py with DeepSpeed {deepspeed.__version__}.\n#pragma once\n\n"
            "/// DeepSpeed's keys and their defaults, as JSON; those of section \"\" stand at the top level.\n"
            "namespace sherd::config::deepspeed_keys {\n\nstruct Key {\n  const char *section, *name, *value;\n};\n\n"
            "inline const Key keys[] = {\n")
    for section, key, value in sorted(sections(), key=lambda each: each[:2]):
        text += f"    {{\"{section}\", \"{key}\",\n     R\"json({json.dumps(value)})json\"}},\n"
    TARGET.write_text(text + "};\n\n}  // namespace sherd::config::deepspeed_keys\n")


if __name__ == "__main__":
    main()
