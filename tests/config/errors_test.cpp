#include <gmock/gmock.h>

#include <cctype>
#include <ostream>
#include <string>

#include "config/support.h"

namespace sherd::config {
namespace {

struct Mistake {
  const char* text;
  std::string message;
};
std::string all_families() {
  std::string out;
  for (const std::string& name : family_names()) out += (out.empty() ? "" : ", ") + name;
  return out;
}
/// The words of the text, for the names of tests.
void PrintTo(const Mistake& mistake, std::ostream* out) {
  std::string words;
  for (const char* c = mistake.text; *c; ++c)
    if (std::isalnum(static_cast<unsigned char>(*c)) || *c == '.' || *c == '-')
      words += *c;
    else if (!words.empty() && words.back() != '_')
      words += '_';
  while (!words.empty() && words.back() == '_') words.pop_back();
  *out << words;
}

class Mistakes : public ::testing::TestWithParam<Mistake> {};

TEST_P(Mistakes, NamesPlaceKeyAndNextStep) {
  EXPECT_EQ(error_of(GetParam().text), GetParam().message);
}

INSTANTIATE_TEST_SUITE_P(
    Keys, Mistakes,
    ::testing::Values(
        Mistake{"{\n  \"gradient_cliping\": 1.0\n}",
                "run.json:2: unknown key \"gradient_cliping\"; did you mean \"gradient_clipping\"?"},
        Mistake{"{\"zero_optimization\": {\n\"stage\": 3,\n\"overlap_com\": true}}",
                "run.json:3: unknown key \"zero_optimization.overlap_com\"; did you mean \"overlap_comm\"?"},
        Mistake{"{\"data\": {\"sources\": []}}",
                "run.json:1: data.sources: needs at least one source, such as {\"path\": \"corpus/a\"}"},
        Mistake{"{\"data\": {\"path\": \"a\", \"sources\": [{\"path\": \"b\"}]}}",
                "run.json:1: data: has \"path\" and \"sources\"; name all datasets in \"sources\""},
        Mistake{"{\"data\": {\"path\": \"a\", \"sources\": [{\"path\": \"b\", \"weight\": 1}]}}",
                "run.json:1: data: has \"path\" and \"sources\"; name all datasets in \"sources\""},
        Mistake{"{\"data\": {\"sources\": [{\"path\": \"a\", \"weight\": 1},\n{\"path\": \"b\"}]}}",
                "run.json:1: data.sources: some sources have a \"weight\" and some have not; give one to "
                "all, or to none "
                "(each has then that of its tokens)"},
        Mistake{"{\"data\": {\"sources\": [{\"path\": \"a\",\n\"weight\": 0}]}}",
                "run.json:1: data.sources[0]: a weight of 0 would never be drawn from; leave the source out"},
        Mistake{"{\"data\": {\"sources\": [{\"weight\": 1}]}}",
                "run.json:1: data.sources[0]: needs \"path\", the dataset prefix that `sherd prepare` wrote"},
        Mistake{"{\"data\": {\"sources\": [{\"pth\": \"a\"}]}}",
                "run.json:1: unknown key \"data.sources[0].pth\"; did you mean \"path\"?"},
        Mistake{
            "{\"data\": {\"path\": \"a\", \"packing\": \"documents\"}, \"parallel\": {\"context\": 2}}",
            "run.json:1: data.packing: \"documents\" are kept apart on ranks that have whole sequences, and "
            "parallel.context is 2; take \"stream\", or set parallel.context to 1"},
        Mistake{"{\"lr\": 0.1}", "run.json:1: unknown key \"lr\"; did you mean \"optimizer.params.lr\"?"},
        Mistake{"{\"training\": {\"lr\": 0.1}}",
                "run.json:1: unknown key \"training.lr\"; did you mean \"training.learning_rate\"?"},
        Mistake{"{\"parallel\": {\"pp\": 2}}",
                "run.json:1: unknown key \"parallel.pp\"; did you mean \"parallel.pipeline\"?"},
        Mistake{"{\"tensor_model_parallel_size\": 2}",
                "run.json:1: unknown key \"tensor_model_parallel_size\"; did you mean \"parallel.tensor\"?"},
        Mistake{"{\"zero_stage\": 3}",
                "run.json:1: unknown key \"zero_stage\"; did you mean \"zero_optimization.stage\"?"},
        Mistake{"{\"bf16_enabled\": true}",
                "run.json:1: unknown key \"bf16_enabled\"; did you mean \"bf16.enabled\"?"},
        Mistake{"{\"offload_optimizer_device\": \"cpu\"}",
                "run.json:1: unknown key \"offload_optimizer_device\"; did you mean "
                "\"zero_optimization.offload_optimizer.device\"?"},
        Mistake{"{\"optimizer\": {\"type\": \"AdamW\", \"params\": {\"momentum\": 0.9}}}",
                "run.json:1: unknown key \"optimizer.params.momentum\"; it belongs to the type SGD"},
        Mistake{"{\"offload_optimizer\": {\"device\": \"cpu\"}}",
                "run.json:1: unknown key \"offload_optimizer\"; did you mean "
                "\"zero_optimization.offload_optimizer\"?"},
        Mistake{"{\"training\": {\"gradient_clipping\": 1}}",
                "run.json:1: unknown key \"training.gradient_clipping\"; did you mean \"gradient_clipping\" "
                "at the top "
                "level?"},
        Mistake{"{\"max_grad_norm\": 1}",
                "run.json:1: unknown key \"max_grad_norm\"; did you mean \"gradient_clipping\"?"},
        Mistake{"{\"eval_batch_size\": 1}",
                "run.json:1: unknown key \"eval_batch_size\"; no key of this section is like it; remove it, "
                "or put \"_\" "
                "in front if it is a note"},
        Mistake{"{\"zero_force_ds_cpu_optimization\": true}",
                "run.json:1: unknown key \"zero_force_ds_cpu_optimization\"; did you mean "
                "\"zero_force_ds_cpu_optimizer\"?"},
        Mistake{"{\"frobnicate\": 1}",
                "run.json:1: unknown key \"frobnicate\"; no key of this section is like it; remove it, or "
                "put \"_\" in "
                "front if it is a note"},
        Mistake{"{\"optimizer\": {\"type\": \"AdamW\", \"params\": {\"learning_rate\": 1}}}",
                "run.json:1: unknown key \"optimizer.params.learning_rate\"; did you mean \"lr\"?"},
        Mistake{"{\"tensorboard\": {\"enabld\": true}}",
                "run.json:1: unknown key \"tensorboard.enabld\"; did you mean \"enabled\"?"},
        Mistake{"{\"zero_optimization\": {\"offload_optimizer\": {\"buffer_size\": 5}}}",
                "run.json:1: unknown key \"zero_optimization.offload_optimizer.buffer_size\"; did you mean "
                "\"zero_optimization.offload_param.buffer_size\"?"},
        Mistake{"{\n\"steps_per_print\": 1,\n\n\"steps_per_print\": 2}",
                "run.json:4: key \"steps_per_print\" is already given on line 2; remove one of the two"},
        Mistake{"{\"zero_optimization\": {\"max_live_parameters\": 1, \"stage3_max_live_parameters\": 2}}",
                "run.json:1: zero_optimization.stage3_max_live_parameters: means the same as "
                "\"max_live_parameters\", which is given too; remove one of the two"}));

INSTANTIATE_TEST_SUITE_P(
    Values, Mistakes,
    ::testing::Values(
        Mistake{"{\"zero_optimization\": {\"stage\": 4}}",
                "run.json:1: zero_optimization.stage: must be an integer from 0 to 3, not 4"},
        Mistake{"{\"zero_optimization\": {\"reduce_bucket_size\": 1.5}}",
                "run.json:1: zero_optimization.reduce_bucket_size: must be an integer >= 0, not 1.5"},
        Mistake{"{\"zero_optimization\": {\"reduce_bucket_size\": -1}}",
                "run.json:1: zero_optimization.reduce_bucket_size: must be an integer >= 0, not -1"},
        Mistake{"{\"zero_optimization\": {\"allgather_bucket_size\": 3}}",
                "run.json:1: zero_optimization.allgather_bucket_size: must be even, not 3"},
        Mistake{"{\"train_batch_size\": \"64 samples\"}",
                "run.json:1: train_batch_size: must be an integer >= 1, not \"64 samples\""},
        Mistake{"{\"train_batch_size\": \"-1\"}",
                "run.json:1: train_batch_size: must be an integer >= 1, not \"-1\""},
        Mistake{"{\"fp16\": {\"enabled\": \"yes\"}}",
                "run.json:1: fp16.enabled: must be true or false, not \"yes\""},
        Mistake{"{\"fp16\": {\"enabled\": \"1\"}}",
                "run.json:1: fp16.enabled: must be true or false, not \"1\""},
        Mistake{"{\"fp16\": {\"loss_scale\": -2}}",
                "run.json:1: fp16.loss_scale: must be a number >= 0, not -2"},
        Mistake{"{\"fp16\": {\"enabled\": true},\n\"bf16\": {\"enabled\": true}}",
                "run.json:2: bf16: fp16 and bf16 are both enabled; enable one of them"},
        Mistake{"{\"fp16\": true}", "run.json:1: fp16: must be a section, not true"},
        Mistake{"[1]", "run.json:1: the file must hold a section, not […]"},
        Mistake{"{\"communication_data_type\": \"fp8\"}",
                "run.json:1: communication_data_type: \"fp8\" is none of fp32, fp16, bf16"},
        Mistake{"{\"bf16\": {\"enabled\": true}, \"data_types\": {\"grad_accum_dtype\": \"fp16\"}}",
                "run.json:1: data_types.grad_accum_dtype: \"fp16\" does not go with a model in bf16; use "
                "\"fp32\" or "
                "\"bf16\""},
        Mistake{"{\"bf16\": {\"enabled\": true}, \"data_types\": {\"param_dtype\": \"fp16\"}}",
                "run.json:1: data_types.param_dtype: \"fp16\" contradicts the model's bf16; choose the "
                "precision with "
                "the sections fp16 and bf16"},
        Mistake{"{\"fp16\": {\"enabled\": true, \"initial_scale_power\": 2, \"min_loss_scale\": 8}}",
                "run.json:1: fp16: the initial loss scale 2^2 is below min_loss_scale 8"},
        Mistake{"{\"checkpoint\": {\"tag_validation\": \"Fial\"}}",
                "run.json:1: checkpoint.tag_validation: \"Fial\" is none of Ignore, Warn, Fail; did you mean "
                "\"Fail\"?"},
        Mistake{"{\n\"a\": }",
                "run.json:2:6: not valid JSON: syntax error while parsing value - unexpected '}'; expected "
                "'[', '{', or a literal"}));

INSTANTIATE_TEST_SUITE_P(
    OptimizerAndScheduler, Mistakes,
    ::testing::Values(
        Mistake{
            "{\"optimizer\": {\"params\": {}}}",
            "run.json:1: optimizer: needs a \"type\"; this build has Adam, AdamW, SGD, Lion, Adagrad, Lamb, "
            "NVLamb, LARS, OneBitAdam, OneBitLamb, Muon and AdamW8bit"},
        Mistake{"{\"optimizer\": {\"type\": \"MuAdam\"}}",
                "run.json:1: optimizer.type: \"MuAdam\" is not in this build; use one of Adam, AdamW, SGD, "
                "Lion, Adagrad, Lamb, NVLamb, LARS, OneBitAdam, OneBitLamb, Muon and AdamW8bit"},
        Mistake{R"({"optimizer": {"type": "Muon", "params": {"adjust_lr_fn": "moonshot"}}})",
                "run.json:1: optimizer.params.adjust_lr_fn: \"moonshot\" is none of original, "
                "match_rms_adamw, spectral_unclamped"},
        Mistake{R"({"optimizer": {"type": "Muon", "params": {"ns_coefficients": [1, 2]}}})",
                "run.json:1: optimizer.params.ns_coefficients: must be a list of three numbers such as "
                "[3.4445, -4.775, 2.0315], not […]"},
        Mistake{R"({"optimizer": {"type": "Muon", "params": {"ns_coefficients": [1, 2, -3]}}})",
                "run.json:1: optimizer.params.ns_coefficients: needs a last coefficient of 0 or more"},
        Mistake{R"({"optimizer": {"type": "Muon", "params": {"momentum": 1}}})",
                "run.json:1: optimizer.params: momentum 1 must be below 1: Muon's is a mean"},
        Mistake{R"({"optimizer": {"type": "Muon", "params": {"ns_eps": 0}}})",
                "run.json:1: optimizer.params: ns_eps must be above 0: it divides matrices of zeros"},
        Mistake{R"({"optimizer": {"type": "Muon", "params": {"adam_w_mode": false}}})",
                "run.json:1: optimizer.params.adam_w_mode: Sherd does not support false here: what Muon "
                "leaves goes to AdamW, whose decay is decoupled"},
        Mistake{R"({"optimizer": {"type": "ZeroOneAdam"}})",
                "run.json:1: optimizer.type: 0/1 Adam takes steps that only some replicas know of, so that "
                "their weights differ between exchanges: use OneBitAdam, whose replicas always agree"},
        Mistake{R"({"optimizer": {"type": "OneBitAdam"}, "zero_optimization": {"stage": 2}})",
                "run.json:1: optimizer: OneBitAdam compresses what replicas exchange, and at "
                "zero_optimization.stage 2 all ranks share one replica's states: give parallel.shard_size, "
                "the ranks that share (such as those of one machine), or take stage 0"},
        Mistake{R"({"optimizer": {"type": "AdamW", "groups": [{"match": "*", "type": "OneBitAdam"}]},
                    "training": {"moments_dtype": "bf16"}})",
                "run.json:1: optimizer: what OneBitAdam has not sent yet is kept in fp32: drop "
                "training.moments_dtype"},
        Mistake{R"({"optimizer": {"type": "OneBitAdam", "params": {"freeze_step": -1}}})",
                "run.json:1: optimizer.params.freeze_step: must be an integer >= 1, not -1"},
        Mistake{R"({"optimizer": {"type": "Lamb", "params": {"min_coeff": 20}}})",
                "run.json:1: optimizer.params: min_coeff 20 is above max_coeff 10"},
        Mistake{R"({"optimizer": {"type": "Lamb", "params": {"eps_inside_sqrt": true}}})",
                "run.json:1: optimizer.params.eps_inside_sqrt: Sherd does not support true here: eps stands "
                "outside of the root"},
        Mistake{"{\"optimizer\": {\"type\": \"Adamm\"}}",
                "run.json:1: optimizer.type: \"Adamm\" is none of Adam, AdamW, SGD, Lion, Adagrad, Lamb, "
                "NVLamb, LARS, OneBitAdam, OneBitLamb, Muon, AdamW8bit; did you mean \"Adam\"?"},
        Mistake{"{\"optimizer\": {\"type\": \"Adam\", \"params\": {\"max_grad_norm\": 1.0}}}",
                "run.json:1: optimizer.params.max_grad_norm: Sherd does not support 1.0 here: clip with the "
                "top-level "
                "key \"gradient_clipping\""},
        Mistake{"{\"optimizer\": {\"type\": \"Adam\", \"params\": {\"betas\": [0.9]}}}",
                "run.json:1: optimizer.params.betas: must be a list of two numbers such as [0.9, 0.999], not "
                "[…]"},
        Mistake{"{\"optimizer\": {\"type\": \"Adam\", \"params\": {\"betas\": [0.9, 1]}}}",
                "run.json:1: optimizer.params.betas[1]: must be below 1"},
        Mistake{"{\"optimizer\": {\"type\": \"Lamb\", \"params\": {\"max_coeff\": \"auto\"}}}",
                "run.json:1: optimizer.params.max_coeff: transformers' Trainer has no argument that would "
                "fill in "
                "\"auto\" here; give a value, or one with --set optimizer.params.max_coeff=VALUE"},
        Mistake{
            "{\"optimizer\": {\"type\": \"SGD\", \"params\": {\"nesterov\": true}}}",
            "run.json:1: optimizer.params: nesterov needs a momentum above 0; set momentum or drop nesterov"},
        Mistake{"{\"scheduler\": {\"type\": \"StepLR\"}}",
                "run.json:1: scheduler.type: \"StepLR\" is PyTorch's and not in this build, which has "
                "LRRangeTest, "
                "OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR, and transformers' linear, cosine and "
                "constant_with_warmup"},
        Mistake{"{\"scheduler\": {\"type\": \"WarmupDecayLR\", \"params\": {}}}",
                "run.json:1: scheduler: needs \"params.total_num_steps\""},
        Mistake{"{\"scheduler\": {\"type\": \"WarmupLR\", \"params\": {\"warmup_num_steps\": -1}}}",
                "run.json:1: scheduler.params.warmup_num_steps: must be an integer >= 0, not -1"},
        Mistake{"{\"scheduler\": {\"type\": \"WarmupLR\", \"params\": {\"warmup_max_lr\": [0.1, 0.2]}}}",
                "run.json:1: scheduler.params.warmup_max_lr: must be a number >= 0, not […]; one value "
                "serves all "
                "parameters here"},
        Mistake{"{\"scheduler\": {\"type\": \"WarmupLR\", \"params\": {\"warmup_type\": \"linaer\"}}}",
                "run.json:1: scheduler.params.warmup_type: \"linaer\" is none of log, linear; did you mean "
                "\"linear\"?"}));

INSTANTIATE_TEST_SUITE_P(
    NotInThisBuild, Mistakes,
    ::testing::Values(
        Mistake{
            "{\"amp\": {\"enabled\": true}}",
            "run.json:1: amp: Sherd does not support this section: use bf16 or fp16; remove or disable it"},
        Mistake{"{\"parallel\": {\"sequence\": 2}}",
                "run.json:1: parallel.sequence: Sherd does not support 2 here: parallel.sequence_parallel "
                "(with parallel.tensor) cuts what lies between a layer's products along the sequence, "
                "parallel.context all of it: give one of these"},
        Mistake{"{\"parallel\": {\"tensor\": 0}}",
                "run.json:1: parallel.tensor: must be an integer >= 1, not 0"},
        Mistake{"{\"parallel\": {\"context_method\": \"rings\"}}",
                "run.json:1: parallel.context_method: \"rings\" is none of ring, ulysses; did you mean "
                "\"ring\"?"},
        Mistake{"{\"tensor_parallel\": {\"tp\": {\"tp_size\": 2}},\n \"parallel\": {\"tensor\": 4}}",
                "run.json:2: parallel.tensor: parallel.tensor and tensor_parallel.autotp_size say the same, "
                "the ranks that hold slices of the same layers, but are given as 2 and 4; keep one of them"},
        Mistake{
            "{\"parallel\": {\"tensor\": 1}, \"tensor_parallel\": {\"autotp_size\": 2}}",
            "run.json:1: tensor_parallel.autotp_size: parallel.tensor and tensor_parallel.autotp_size say "
            "the same, the ranks that hold slices of the same layers, but are given as 1 and 2; keep one "
            "of them"},
        Mistake{"{\"parallel\": {\"context\": 2}, \"sequence_parallel_size\": 4}",
                "run.json:1: sequence_parallel_size: parallel.context and sequence_parallel_size say the "
                "same, the ranks that hold pieces of the same sequences, but are given as 2 and 4; keep one "
                "of them"},
        Mistake{"{\"device\": {\"type\": \"gpu\"}}",
                "run.json:1: device.type: \"gpu\" is none of auto, cpu, cuda; did you mean \"cuda\"?"},
        Mistake{"{\"device\": {\"type\": \"CPUs\"}}",
                "run.json:1: device.type: \"CPUs\" is none of auto, cpu, cuda; did you mean \"cpu\"?"},
        Mistake{"{\"parallel\": {\"expert\": 0}}",
                "run.json:1: parallel.expert: must be an integer >= 1, not 0"},
        Mistake{"{\"zero_optimization\": {\"zero_quantized_weights\": true}}",
                "run.json:1: zero_optimization.zero_quantized_weights: Sherd does not support true here: "
                "ZeRO++ is not in this build; OneBitAdam compresses what replicas exchange"},
        Mistake{"{\"zero_optimization\": {\"zero_hpz_partition_size\": 4}}",
                "run.json:1: zero_optimization.zero_hpz_partition_size: Sherd does not support 4 here: "
                "ZeRO++ is not in this build; parallel.shard_size keeps gathers within a machine"},
        Mistake{"{\"parallel\": {\"shard_size\": 0}}",
                "run.json:1: parallel.shard_size: must be an integer >= 1, not 0"},
        Mistake{"{\"parallel\": {\"reduction\": \"nativ\"}}",
                "run.json:1: parallel.reduction: \"nativ\" is none of ordered, native; did you mean "
                "\"native\"?"},
        Mistake{"{\"parallel\": {\"shard_size\": 2}, \"zero_optimization\": {\"mics_shard_size\": 4}}",
                "run.json:1: zero_optimization.mics_shard_size: parallel.shard_size and "
                "zero_optimization.mics_shard_size say the same, the ranks that share states, but are given "
                "as 2 and 4; keep one of them"},
        Mistake{"{\"zero_optimization\": {\"mics_shard_size\": 4},\n \"parallel\": {\"shard_size\": 2}}",
                "run.json:2: parallel.shard_size: parallel.shard_size and "
                "zero_optimization.mics_shard_size say the same, the ranks that share states, but are given "
                "as 4 and 2; keep one of them"}));

INSTANTIATE_TEST_SUITE_P(
    Offload, Mistakes,
    ::testing::Values(
        Mistake{R"({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}})",
                "run.json:1: zero_optimization.offload_optimizer: device \"cpu\" needs stage 1, 2 or 3, "
                "which shard the optimizer's states, not stage 0; set zero_optimization.stage to 1, or the "
                "device to \"none\""},
        Mistake{R"({"zero_optimization": {"cpu_offload": true}})",
                "run.json:1: zero_optimization.cpu_offload: device \"cpu\" needs stage 1, 2 or 3, which "
                "shard the optimizer's states, not stage 0; set zero_optimization.stage to 1, or the device "
                "to \"none\""},
        Mistake{R"({"zero_optimization": {"stage": 3, "cpu_offload_params": true,
                    "offload_param": {"device": "nvme"}}})",
                "run.json:1: zero_optimization.cpu_offload_param: means \"offload_param\" with device "
                "\"cpu\", and that section is given too; remove one of the two"},
        Mistake{"{\"zero_optimization\": {\"stage\": 1,\n\"offload_optimizer\": {\"device\": \"nvme\"}}}",
                "run.json:2: zero_optimization.offload_optimizer: device \"nvme\" needs \"nvme_path\", a "
                "directory on the drive that is to hold the states"},
        Mistake{R"({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme",
                    "nvme_path": "/d", "buffer_size": 0}}})",
                "run.json:2: zero_optimization.offload_param.buffer_size: must be at least 1 with device "
                "\"nvme\", not 0"},
        Mistake{R"({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme",
                    "nvme_path": "/d", "buffer_count": 0}}})",
                "run.json:2: zero_optimization.offload_optimizer.buffer_count: must be at least 1 with "
                "device \"nvme\", not 0"},
        Mistake{
            R"({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}})",
            "run.json:1: zero_optimization.offload_optimizer.ratio: 0.5 needs stage 3, not stage 2; set "
            "zero_optimization.stage to 3, or ratio to 1"},
        Mistake{
            R"({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 1.5}}})",
            "run.json:1: zero_optimization.offload_optimizer.ratio: must be a number from 0 to 1, not "
            "1.5"},
        Mistake{R"({"zero_optimization": {"stage": 3, "offload_param": {"device": "disk"}}})",
                "run.json:1: zero_optimization.offload_param.device: \"disk\" is none of none, cpu, nvme; "
                "did you mean \"nvme\"?"},
        Mistake{R"({"zero_optimization": {"sub_group_size": -1}})",
                "run.json:1: zero_optimization.sub_group_size: must be an integer >= 0, not -1"},
        Mistake{R"({"aio": {"block_size": 1000}})",
                "run.json:1: aio.block_size: must be an integer from 4096 to 1073741824, not 1000"},
        Mistake{
            R"({"aio": {"block_size": 5000}})",
            "run.json:1: aio.block_size: must be a multiple of 4096 bytes, not 5000; the next one is 8192"},
        Mistake{R"({"aio": {"queue_depth": 5000}})",
                "run.json:1: aio.queue_depth: must be an integer from 1 to 4096, not 5000"},
        Mistake{R"({"aio": {"intra_op_parallelism": 0}})",
                "run.json:1: aio.intra_op_parallelism: must be an integer from 1 to 256, not 0"},
        Mistake{R"({"aio": {"thread_count": 2, "intra_op_parallelism": 2}})",
                "run.json:1: aio.intra_op_parallelism: means the same as \"thread_count\", which is given "
                "too; remove one of the two"},
        Mistake{R"({"aio": {"use_gds": true}})",
                "run.json:1: aio.use_gds: Sherd does not support true here: it needs CUDA's GPUDirect "
                "Storage, which is not in this build; transfers pass through host memory"},
        Mistake{R"({"aio": {"backend": "libaio"}})",
                "run.json:1: aio.backend: \"libaio\" is none of auto, io_uring, threads"},
        Mistake{R"({"training": {"moments_dtype": "fp16"}})",
                "run.json:1: training.moments_dtype: \"fp16\" is none of fp32, bf16"},
        Mistake{R"({"bf16": {"enabled": true, "bf16_optimizer_states": true}})",
                "run.json:1: bf16.bf16_optimizer_states: Sherd does not support true here: give "
                "training.moments_dtype \"bf16\" instead; masters stay fp32"}));

INSTANTIATE_TEST_SUITE_P(
    SherdSections, Mistakes,
    ::testing::Values(
        Mistake{"{\"model\": {\"hidden_size\": 64, \"num_layers\": 2, \"num_heads\": 2}}",
                "run.json:1: model: needs \"seq_length\""},
        Mistake{"{\"model\": {\"seq_length\": 8, \"hidden_size\": 65, \"num_layers\": 2, \"num_heads\": 2}}",
                "run.json:1: model: hidden_size 65 is not a multiple of num_heads 2; set head_dim to have "
                "them differ"},
        Mistake{"{\"model\": {\"seq_length\": 8, \"hidden_size\": 64, \"num_layers\": 2, \"num_heads\": 4, "
                "\"num_kv_heads\": 3}}",
                "run.json:1: model: num_heads 4 is not a multiple of num_kv_heads 3"},
        Mistake{"{\"model\": {\"type\": \"lama\"}}", cat("run.json:1: model.type: \"lama\" is none of ",
                                                         all_families(), "; did you mean \"llama\"?")},
        Mistake{"{\"data\": {}}",
                "run.json:1: data: needs \"path\", the dataset prefix that `sherd prepare` wrote"},
        Mistake{"{\"data\": {\"path\": \"x\", \"split\": [0.9, 0.2]}}",
                "run.json:1: data.split: the fractions sum to 1.1, more than 1"},
        Mistake{"{\"data\": {\"path\": \"x\", \"tokenizer\": \"bpe\"}}",
                "run.json:1: data.tokenizer: \"bpe\" is no tokenizer; use \"byte\", \"spm:MODEL_FILE\" or "
                "\"hf:PATH\""},
        Mistake{"{\"device\": {\"device_memory_limit\": \"5 parsecs\"}}",
                "run.json:1: device.device_memory_limit: must be bytes, or a string with a unit such as "
                "\"512MiB\" or "
                "\"8GB\", not \"5 parsecs\""},
        Mistake{"{\"training\": {\"recompute\": \"ful\"}}",
                "run.json:1: training.recompute: \"ful\" is none of none, selective, full; did you mean "
                "\"full\"?"}));

TEST(Problems, AreAllToldAtOnceInFileOrder) {
  EXPECT_EQ(
      error_of("{\"gradient_cliping\": 1,\n"
               " \"optimizer\": {\"type\": \"AdamW\", \"params\": {\"lr\": \"fast\", \"eps\": -1}},\n"
               " \"zero_optimization\": {\"stage\": 3, \"ovelap_comm\": true},\n \"steps_per_print\": 10}"),
      "the configuration has 4 problems:\n"
      "run.json:1: unknown key \"gradient_cliping\"; did you mean \"gradient_clipping\"?\n"
      "run.json:2: optimizer.params.lr: must be a number >= 0, not \"fast\"\n"
      "run.json:2: optimizer.params.eps: must be a number >= 0, not -1\n"
      "run.json:3: unknown key \"zero_optimization.ovelap_comm\"; did you mean \"overlap_comm\"?");
}

// fp16 and bf16 both on would be an error if bf16 could be read.
TEST(Problems, NothingIsConcludedFromASectionThatHasOne) {
  EXPECT_EQ(error_of("{\"fp16\": {\"enabled\": true}, \"bf16\": {\"enabled\": true, \"enable\": 1}}"),
            "run.json:1: unknown key \"bf16.enable\"; did you mean \"enabled\"?");
}

TEST(Problems, BeyondThirtyAreCounted) {
  std::string text = "{";
  for (int i = 0; i < 33; ++i) text += cat(i ? ", " : "", "\"wrong_", i, "\": 1");
  const std::string error = error_of(text + "}");
  EXPECT_TRUE(error.starts_with("the configuration has 33 problems:\n")) << error;
  EXPECT_NE(error.find("\"wrong_29\""), std::string::npos);
  EXPECT_EQ(error.find("\"wrong_30\""), std::string::npos);
  EXPECT_TRUE(error.ends_with("\nand 3 more")) << error;
}

TEST(Overrides, ErrorsNameTheOverride) {
  EXPECT_EQ(
      error_of("{}", {"zero_optimization.stage=5"}),
      "--set zero_optimization.stage=5: zero_optimization.stage: must be an integer from 0 to 3, not 5");
  EXPECT_EQ(error_of("{}", {"novalue"}), "--set novalue: an override has the form section.key=VALUE");
  EXPECT_EQ(error_of("{}", {"a..b=1"}), "--set a..b=1: the key path has an empty part");
}

}  // namespace
}  // namespace sherd::config
