// Written by scripts/references/make_trainer_reference.py with transformers 5.24.0 and accelerate 1.15.0.
#pragma once

/// A file, the arguments of section training, and the file as Trainer fills it; or, in pairs of DeepSpeed's
/// key and Trainer's argument, what it finds contradictory.
namespace sherd::config::trainer_reference {

struct Case {
  const char *file, *training;
  int hidden_size;
  const char *filled, *contradictions;
};

inline const Case cases[] = {
    {R"json({"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto",
"gradient_accumulation_steps": "auto", "fp16": {"enabled": "auto", "loss_scale": 0}, "bf16":
{"enabled": "auto"}, "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps":
"auto", "weight_decay": "auto"}}, "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_min_lr":
"auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto", "total_num_steps": "auto"}},
"zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size":
"auto", "stage3_param_persistence_threshold": "auto"}, "gradient_clipping": "auto"})json",
     R"json({"steps": 100})json", 64,
     R"json({"train_batch_size": 8, "train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 1,
"fp16": {"enabled": false, "loss_scale": 0}, "bf16": {"enabled": false}, "optimizer": {"type":
"AdamW", "params": {"lr": 5e-05, "betas": [0.9, 0.999], "eps": 1e-08, "weight_decay": 0.0}},
"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 5e-05,
"warmup_num_steps": 1, "total_num_steps": 100}}, "zero_optimization": {"stage": 3,
"reduce_bucket_size": 4096, "stage3_prefetch_bucket_size": 3686,
"stage3_param_persistence_threshold": 640}, "gradient_clipping": 1.0})json",
     ""},
    {R"json({"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto",
"gradient_accumulation_steps": "auto", "fp16": {"enabled": "auto", "loss_scale": 0}, "bf16":
{"enabled": "auto"}, "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps":
"auto", "weight_decay": "auto"}}, "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_min_lr":
"auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto", "total_num_steps": "auto"}},
"zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size":
"auto", "stage3_param_persistence_threshold": "auto"}, "gradient_clipping": "auto"})json",
     R"json({"steps": 50, "learning_rate": 0.0003, "weight_decay": 0.1, "adam_beta1": 0.8, "adam_beta2": 0.95,
"adam_epsilon": 1e-06, "warmup_steps": 7, "max_grad_norm": 0.5, "per_device_train_batch_size": 2,
"gradient_accumulation_steps": 3, "precision": "bf16"})json",
     100,
     R"json({"train_batch_size": 6, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3,
"fp16": {"enabled": false, "loss_scale": 0}, "bf16": {"enabled": true}, "optimizer": {"type":
"AdamW", "params": {"lr": 0.0003, "betas": [0.8, 0.95], "eps": 1e-06, "weight_decay": 0.1}},
"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.0003,
"warmup_num_steps": 7, "total_num_steps": 50}}, "zero_optimization": {"stage": 3,
"reduce_bucket_size": 10000, "stage3_prefetch_bucket_size": 9000,
"stage3_param_persistence_threshold": 1000}, "gradient_clipping": 0.5})json",
     ""},
    {R"json({"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto",
"gradient_accumulation_steps": "auto", "fp16": {"enabled": "auto", "loss_scale": 0}, "bf16":
{"enabled": "auto"}, "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps":
"auto", "weight_decay": "auto"}}, "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_min_lr":
"auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto", "total_num_steps": "auto"}},
"zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size":
"auto", "stage3_param_persistence_threshold": "auto"}, "gradient_clipping": "auto"})json",
     R"json({"steps": 77, "warmup_steps": 0.13, "precision": "fp16"})json", 48,
     R"json({"train_batch_size": 8, "train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 1,
"fp16": {"enabled": true, "loss_scale": 0}, "bf16": {"enabled": false}, "optimizer": {"type":
"AdamW", "params": {"lr": 5e-05, "betas": [0.9, 0.999], "eps": 1e-08, "weight_decay": 0.0}},
"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 5e-05,
"warmup_num_steps": 11, "total_num_steps": 77}}, "zero_optimization": {"stage": 3,
"reduce_bucket_size": 2304, "stage3_prefetch_bucket_size": 2073,
"stage3_param_persistence_threshold": 480}, "gradient_clipping": 1.0})json",
     ""},
    {R"json({"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto",
"gradient_accumulation_steps": "auto", "fp16": {"enabled": "auto", "loss_scale": 0}, "bf16":
{"enabled": "auto"}, "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps":
"auto", "weight_decay": "auto"}}, "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_min_lr":
"auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto", "total_num_steps": "auto"}},
"zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size":
"auto", "stage3_param_persistence_threshold": "auto"}, "gradient_clipping": "auto"})json",
     R"json({"steps": 1000, "adam_beta2": 0.95, "warmup_steps": 12.9})json", 7,
     R"json({"train_batch_size": 8, "train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 1,
"fp16": {"enabled": false, "loss_scale": 0}, "bf16": {"enabled": false}, "optimizer": {"type":
"AdamW", "params": {"lr": 5e-05, "betas": [0.9, 0.95], "eps": 1e-08, "weight_decay": 0.0}},
"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 5e-05,
"warmup_num_steps": 12, "total_num_steps": 1000}}, "zero_optimization": {"stage": 3,
"reduce_bucket_size": 49, "stage3_prefetch_bucket_size": 44, "stage3_param_persistence_threshold":
70}, "gradient_clipping": 1.0})json",
     ""},
    {R"json({"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto",
"gradient_accumulation_steps": "auto", "optimizer": {"type": "AdamW", "params": {"lr": "auto",
"betas": "auto", "eps": "auto", "weight_decay": "auto"}}, "scheduler": {"type": "WarmupLR",
"params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"}},
"zero_optimization": {"stage": 2, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size":
"auto", "stage3_param_persistence_threshold": "auto"}})json",
     R"json({"steps": 20, "learning_rate": 0.001, "warmup_steps": 5})json", 33,
     R"json({"train_batch_size": 8, "train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 1,
"optimizer": {"type": "AdamW", "params": {"lr": 0.001, "betas": [0.9, 0.999], "eps": 1e-08,
"weight_decay": 0.0}}, "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0,
"warmup_max_lr": 0.001, "warmup_num_steps": 5}}, "zero_optimization": {"stage": 2,
"reduce_bucket_size": 1089, "stage3_prefetch_bucket_size": "auto",
"stage3_param_persistence_threshold": "auto"}})json",
     ""},
    {R"json({"train_batch_size": "auto", "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps":
"auto", "fp16": {"enabled": "auto", "loss_scale": 0}, "bf16": {"enabled": "auto"}, "optimizer":
{"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto",
"warmup_num_steps": "auto", "total_num_steps": "auto"}}, "zero_optimization": {"stage": 3,
"reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
"stage3_param_persistence_threshold": "auto"}, "gradient_clipping": "auto"})json",
     R"json({"steps": 9, "per_device_train_batch_size": 4, "precision": "fp32"})json", 16,
     R"json({"train_batch_size": 4, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1,
"fp16": {"enabled": false, "loss_scale": 0}, "bf16": {"enabled": false}, "optimizer": {"type":
"AdamW", "params": {"lr": 5e-05, "betas": [0.9, 0.999], "eps": 1e-08, "weight_decay": 0.0}},
"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 5e-05,
"warmup_num_steps": 1, "total_num_steps": 9}}, "zero_optimization": {"stage": 3,
"reduce_bucket_size": 256, "stage3_prefetch_bucket_size": 230, "stage3_param_persistence_threshold":
160}, "gradient_clipping": 1.0})json",
     ""},
    {R"json({"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto",
"gradient_accumulation_steps": "auto", "fp16": {"enabled": false}, "bf16": {"enabled": true},
"optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto",
"weight_decay": "auto"}}, "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_min_lr": "auto",
"warmup_max_lr": "auto", "warmup_num_steps": "auto", "total_num_steps": "auto"}},
"zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size":
"auto", "stage3_param_persistence_threshold": "auto"}, "gradient_clipping": "auto"})json",
     R"json({"steps": 9, "precision": "bf16"})json", 16,
     R"json({"train_batch_size": 8, "train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 1,
"fp16": {"enabled": false}, "bf16": {"enabled": true}, "optimizer": {"type": "AdamW", "params":
{"lr": 5e-05, "betas": [0.9, 0.999], "eps": 1e-08, "weight_decay": 0.0}}, "scheduler": {"type":
"WarmupDecayLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 5e-05, "warmup_num_steps": 1,
"total_num_steps": 9}}, "zero_optimization": {"stage": 3, "reduce_bucket_size": 256,
"stage3_prefetch_bucket_size": 230, "stage3_param_persistence_threshold": 160}, "gradient_clipping":
1.0})json",
     ""},
    {R"json({"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto",
"gradient_accumulation_steps": "auto", "fp16": {"enabled": "auto", "loss_scale": 0}, "bf16":
{"enabled": "auto"}, "optimizer": {"type": "AdamW", "params": {"lr": 0.001, "betas": [0.9, 0.999]}},
"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto",
"warmup_num_steps": "auto", "total_num_steps": "auto"}}, "zero_optimization": {"stage": 3,
"reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
"stage3_param_persistence_threshold": "auto"}, "gradient_clipping": "auto"})json",
     R"json({"steps": 9, "learning_rate": 0.002})json", 16, R"json({})json",
     "optimizer.params.lr learning_rate"},
    {R"json({"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto",
"gradient_accumulation_steps": "auto", "fp16": {"enabled": "auto", "loss_scale": 0}, "bf16":
{"enabled": "auto"}, "optimizer": {"type": "AdamW", "params": {"lr": 0.001, "betas": [0.9, 0.999],
"weight_decay": 0}}, "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_min_lr": "auto",
"warmup_max_lr": "auto", "warmup_num_steps": "auto", "total_num_steps": "auto"}},
"zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size":
"auto", "stage3_param_persistence_threshold": "auto"}, "gradient_clipping": "auto"})json",
     R"json({"steps": 9, "learning_rate": 0.001, "adam_beta2": 0.95, "weight_decay": 0.1})json", 16,
     R"json({})json",
     "optimizer.params.betas adam_beta1+adam_beta2 optimizer.params.weight_decay weight_decay"},
    {R"json({"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto",
"gradient_accumulation_steps": "auto", "fp16": {"enabled": true}, "bf16": {"enabled": "auto"},
"optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto",
"weight_decay": "auto"}}, "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_min_lr": "auto",
"warmup_max_lr": "auto", "warmup_num_steps": "auto", "total_num_steps": "auto"}},
"zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size":
"auto", "stage3_param_persistence_threshold": "auto"}, "gradient_clipping": "auto"})json",
     R"json({"steps": 9, "precision": "bf16"})json", 16, R"json({})json", "fp16.enabled fp16|fp16_full_eval"},
    {R"json({"train_batch_size": "auto", "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2,
"fp16": {"enabled": "auto", "loss_scale": 0}, "bf16": {"enabled": "auto"}, "optimizer": {"type":
"AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto",
"warmup_num_steps": "auto", "total_num_steps": "auto"}}, "zero_optimization": {"stage": 3,
"reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
"stage3_param_persistence_threshold": "auto"}, "gradient_clipping": 1.0})json",
     R"json({"steps": 9, "max_grad_norm": 0.5, "gradient_accumulation_steps": 3, "per_device_train_batch_size":
8})json",
     16, R"json({})json",
     "train_micro_batch_size_per_gpu per_device_train_batch_size gradient_accumulation_steps "
     "gradient_accumulation_steps gradient_clipping max_grad_norm"},
    {R"json({"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto",
"gradient_accumulation_steps": "auto", "fp16": {"enabled": "auto", "loss_scale": 0}, "bf16":
{"enabled": "auto"}, "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps":
"auto", "weight_decay": "auto"}}, "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr":
0.001, "warmup_num_steps": 10}}, "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto",
"stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto"},
"gradient_clipping": "auto"})json",
     R"json({"steps": 9, "learning_rate": 0.0001, "warmup_steps": 20})json", 16, R"json({})json",
     "scheduler.params.warmup_max_lr learning_rate scheduler.params.warmup_num_steps warmup_steps"},
};

}  // namespace sherd::config::trainer_reference
