#include <nlohmann/json.hpp>

#include "config/config.h"
#include "config/tables.h"

namespace sherd::config {
namespace {

using Json = nlohmann::ordered_json;

void put_batch(Json& out, const Batch& batch) {
  if (batch.train_batch_size) out["train_batch_size"] = batch.train_batch_size;
  if (batch.micro_batch_size) out["train_micro_batch_size_per_gpu"] = batch.micro_batch_size;
  if (batch.gradient_accumulation_steps)
    out["gradient_accumulation_steps"] = batch.gradient_accumulation_steps;
  out["dataloader_drop_last"] = batch.drop_last;
}

Json params_of(const OptimizerRule& rule) {
  Json params;
  for (const auto& [key, value] : param_values(rule))
    std::visit([&](const auto& any) { params[key] = any; }, value);
  return params;
}

Json optimizer_of(const Optimizer& optimizer) {
  Json out{{"type", name_of(optimizer.type)}, {"params", params_of(optimizer)}};
  for (const OptimizerGroup& group : optimizer.groups) {
    Json entry{{"match", group.match}, {"type", name_of(group.type)}};
    entry.update(params_of(group));
    out["groups"].push_back(std::move(entry));
  }
  return out;
}

const char* name_of(WarmupType type) {
  return type == WarmupType::linear ? "linear" : "log";
}

struct SchedulerDump {
  Json operator()(std::monostate) const { return nullptr; }
  Json operator()(const LrRangeTest& s) const {
    return {{"type", "LRRangeTest"},
            {"params",
             {{"lr_range_test_min_lr", s.min_lr},
              {"lr_range_test_step_size", s.step_size},
              {"lr_range_test_step_rate", s.step_rate},
              {"lr_range_test_staircase", s.staircase}}}};
  }
  Json operator()(const OneCycle& s) const {
    return {{"type", "OneCycle"},
            {"params",
             {{"cycle_min_lr", s.cycle_min_lr},
              {"cycle_max_lr", s.cycle_max_lr},
              {"decay_lr_rate", s.decay_lr_rate},
              {"cycle_first_step_size", s.cycle_first_step_size},
              {"cycle_second_step_size", s.cycle_second_step_size},
              {"cycle_first_stair_count", s.cycle_first_stair_count},
              {"cycle_second_stair_count", s.cycle_second_stair_count},
              {"decay_step_size", s.decay_step_size},
              {"cycle_momentum", s.cycle_momentum},
              {"cycle_min_mom", s.cycle_min_mom},
              {"cycle_max_mom", s.cycle_max_mom},
              {"decay_mom_rate", s.decay_mom_rate}}}};
  }
  Json operator()(const Warmup& s) const {
    Json params;
    if (s.total_num_steps) params["total_num_steps"] = s.total_num_steps;
    params["warmup_min_lr"] = s.warmup_min_lr;
    params["warmup_max_lr"] = s.warmup_max_lr ? Json(*s.warmup_max_lr) : Json(nullptr);
    params["warmup_num_steps"] = s.warmup_num_steps;
    params["warmup_type"] = name_of(s.warmup_type);
    return {{"type", s.total_num_steps ? "WarmupDecayLR" : "WarmupLR"}, {"params", params}};
  }
  Json operator()(const TrainerSchedule& s) const {
    constexpr const char* types[] = {"linear", "cosine", "constant_with_warmup"};
    Json params{{"warmup_num_steps", s.warmup_num_steps}};
    if (s.shape != RateShape::constant_with_warmup) params["total_num_steps"] = s.total_num_steps;
    return {{"type", types[static_cast<std::size_t>(s.shape)]}, {"params", params}};
  }
  Json operator()(const WarmupCosine& s) const {
    return {{"type", "WarmupCosineLR"},
            {"params",
             {{"total_num_steps", s.total_num_steps},
              {"warmup_min_ratio", s.warmup_min_ratio},
              {"warmup_num_steps", s.warmup_num_steps},
              {"cos_min_ratio", s.cos_min_ratio},
              {"warmup_type", name_of(s.warmup_type)}}}};
  }
};

void put_precision(Json& out, const Precision& precision) {
  const LossScaling& s = precision.fp16;
  out["fp16"] = {{"enabled", precision.compute == DType::f16},
                 {"loss_scale", s.loss_scale},
                 {"initial_scale_power", s.initial_scale_power},
                 {"loss_scale_window", s.loss_scale_window},
                 {"hysteresis", s.hysteresis},
                 {"consecutive_hysteresis", s.consecutive_hysteresis},
                 {"min_loss_scale", s.min_loss_scale}};
  out["bf16"] = {{"enabled", precision.compute == DType::bf16},
                 {"check_grad_overflow", precision.check_grad_overflow}};
  if (precision.grad_accum_dtype)
    out["data_types"] = {{"grad_accum_dtype", sherd::name_of(*precision.grad_accum_dtype)}};
  if (precision.communication_data_type)
    out["communication_data_type"] = sherd::name_of(*precision.communication_data_type);
}

/// Which sections and keys are there.
enum class Extent {
  told,  ///< those that say something
  whole  ///< all that have a value or none, so that each key is found with its default
};

Json offload_of(const Offload& offload, bool of_optimizer) {
  constexpr const char* devices[] = {"none", "cpu", "nvme"};
  Json out{{"device", devices[static_cast<std::size_t>(offload.device)]},
           {"buffer_count", offload.buffer_count},
           {"pin_memory", offload.pin_memory}};
  if (!offload.nvme_path.empty()) out["nvme_path"] = offload.nvme_path;
  if (of_optimizer) {
    out["pipeline_read"] = offload.pipeline_read;
    out["pipeline_write"] = offload.pipeline_write;
    out["ratio"] = offload.ratio;
  } else {
    out["buffer_size"] = offload.buffer_size;
    out["max_in_cpu"] = offload.max_in_cpu;
  }
  return out;
}

Json aio_of(const Aio& aio) {
  constexpr const char* backends[] = {"auto", "io_uring", "threads"};
  return {{"backend", backends[static_cast<std::size_t>(aio.backend)]},
          {"block_size", aio.block_size},
          {"queue_depth", aio.queue_depth},
          {"thread_count", aio.thread_count},
          {"single_submit", aio.single_submit},
          {"overlap_events", aio.overlap_events},
          {"checksums", aio.checksums}};
}

Json zero_of(const Zero& zero, Extent extent) {
  Json out{{"stage", zero.stage},
           {"reduce_bucket_size", zero.reduce_bucket_size},
           {"allgather_bucket_size", zero.allgather_bucket_size},
           {"overlap_comm", zero.overlap_comm},
           {"stage3_prefetch_bucket_size", zero.prefetch_bucket_size},
           {"stage3_param_persistence_threshold", zero.param_persistence_threshold},
           {"stage3_model_persistence_threshold", zero.model_persistence_threshold},
           {"stage3_max_live_parameters", zero.max_live_parameters},
           {"stage3_max_reuse_distance", zero.max_reuse_distance},
           {"sub_group_size", zero.sub_group_size}};
  const bool all = extent == Extent::whole;
  if (all || zero.offload_param != Offload{}) out["offload_param"] = offload_of(zero.offload_param, false);
  if (all || zero.offload_optimizer != Offload::of_optimizer())
    out["offload_optimizer"] = offload_of(zero.offload_optimizer, true);
  return out;
}

Json moe_of(const Moe& m) {
  return {{"experts", m.experts},
          {"top_k", m.top_k},
          {"ffn_hidden_size", m.ffn_hidden_size},
          {"every", m.every},
          {"first_dense", m.first_dense},
          {"shared_experts", m.shared_experts},
          {"router", config::name_of(m.router)},
          {"norm_topk", m.norm_topk},
          {"routed_scaling_factor", m.routed_scaling_factor},
          {"groups", m.groups},
          {"top_groups", m.top_groups},
          {"capacity_factor", m.capacity_factor},
          {"drop", config::name_of(m.drop)},
          {"aux_loss", m.aux_loss},
          {"aux_loss_type", config::name_of(m.aux_loss_type)},
          {"z_loss", m.z_loss},
          {"bias_update", m.bias_update},
          {"jitter", m.jitter},
          {"shared_expert_gate", m.shared_expert_gate},
          {"use_residual", m.use_residual}};
}

Json rope_of(const RopeScaling& r) {
  Json out{{"rope_type", config::name_of(r.type)}, {"factor", r.factor}};
  if (r.type != RotaryScaling::linear) out["original_max_position_embeddings"] = r.original_max_positions;
  if (r.type == RotaryScaling::llama3)
    out.update({{"low_freq_factor", r.low_freq_factor}, {"high_freq_factor", r.high_freq_factor}});
  if (r.type == RotaryScaling::yarn) {
    out.update({{"beta_fast", r.beta_fast}, {"beta_slow", r.beta_slow}, {"truncate", r.truncate}});
    if (r.attention_factor > 0) out["attention_factor"] = r.attention_factor;
  }
  return out;
}

Json model_of(const Model& m) {
  Json out{{"type", name_of(m.type)},
           {"vocab_size", m.vocab_size},
           {"pad_vocab_to_multiple_of", m.pad_vocab_to_multiple_of},
           {"seq_length", m.seq_length},
           {"max_positions", m.max_positions},
           {"hidden_size", m.hidden_size},
           {"num_layers", m.num_layers},
           {"num_heads", m.num_heads},
           {"num_kv_heads", m.num_kv_heads},
           {"head_dim", m.head_dim},
           {"ffn_hidden_size", m.ffn_hidden_size},
           {"position", name_of(m.position)},
           {"rotary_base", m.rotary_base},
           {"sliding_window", m.sliding_window},
           {"qk_norm", m.qk_norm},
           {"norm", name_of(m.norm)},
           {"norm_epsilon", m.norm_epsilon},
           {"activation", name_of(m.activation)},
           {"dropout", m.dropout},
           {"attention_dropout", m.attention_dropout},
           {"embedding_dropout", m.embedding_dropout},
           {"tie_embeddings", m.tie_embeddings},
           {"bias", m.bias},
           {"qkv_bias", m.qkv_bias},
           {"init_std", m.init_std}};
  if (m.rope_scaling.type != RotaryScaling::none) out["rope_scaling"] = rope_of(m.rope_scaling);
  if (m.moe.experts > 0) out["moe"] = moe_of(m.moe);
  return out;
}

void put_prompt(Json& out, const Adapter& adapter, Extent extent) {
  constexpr const char* inits[] = {"random", "sample_vocab", "text"};
  const PromptKeys& prompt = adapter.prompt;
  const bool whole = extent == Extent::whole;
  out["virtual_tokens"] = prompt.virtual_tokens;
  if (whole || adapter.type == AdapterType::prompt_tuning) {
    out["init"] = inits[static_cast<std::size_t>(prompt.init)];
    out["init_text"] = prompt.init_text;
  }
  if (prompt.encoder_hidden_size > 0) out["encoder_hidden_size"] = prompt.encoder_hidden_size;
  if (whole) out["tasks"] = Json::array();
  for (const PromptTask& task : prompt.tasks) {
    out["tasks"].push_back({{"name", task.name}});
    if (!task.init_text.empty()) out["tasks"].back()["init_text"] = task.init_text;
  }
}

void put_bottleneck(Json& out, const BottleneckKeys& b) {
  constexpr const char* kinds[] = {"swish", "relu", "gelu", "gelu_new", "tanh"};
  out.update({{"mh_adapter", b.attention},
              {"output_adapter", b.mlp},
              {"non_linearity", kinds[static_cast<std::size_t>(b.non_linearity)]},
              {"scaling", b.scale},
              {"original_ln_before", b.of_sum},
              {"name", b.name}});
  if (b.size > 0)
    out["bottleneck_size"] = b.size;
  else
    out["reduction_factor"] = b.reduction_factor;
}

Json adapter_of(const Adapter& a, Extent extent = Extent::told) {
  Json out{{"type", name_of(a.type)}};
  const bool whole = extent == Extent::whole;
  const LoraKeys& lora = a.lora;
  if (whole || a.type == AdapterType::lora)
    out.update(
        {{"rank", lora.rank}, {"alpha", lora.alpha}, {"use_rslora", lora.rslora}, {"dropout", lora.dropout}});
  if (whole || a.has_prompt()) put_prompt(out, a, extent);
  if (whole || a.type == AdapterType::bottleneck) put_bottleneck(out, a.bottleneck);
  if (whole || a.type == AdapterType::lora || a.type == AdapterType::ia3) out["targets"] = a.targets;
  out["base_dtype"] = a.int8_base ? "int8" : "compute";
  out["init_from"] = a.init_from;
  return out;
}

Json training_of(const Training& t, Extent extent) {
  constexpr const char* recompute[] = {"none", "selective", "full"};
  Json out{{"steps", t.steps},
           {"seed", t.seed},
           {"eval_interval", t.eval_interval},
           {"eval_steps", t.eval_steps},
           {"init_from", t.init_from},
           {"save_dir", t.save_dir},
           {"save_interval", t.save_interval},
           {"keep_last", t.keep_last},
           {"save_async", t.save_async},
           {"keep_best", t.keep_best},
           {"patience", t.patience},
           {"max_skipped_steps", t.max_skipped_steps},
           {"loss_average", t.loss_average == LossAverage::tokens ? "tokens" : "micro_batches"},
           {"recompute", recompute[static_cast<std::size_t>(t.recompute)]},
           {"recompute_blocks", t.recompute_blocks >= 0 ? Json(t.recompute_blocks) : Json(nullptr)},
           {"recompute_micro_batches",
            t.recompute_micro_batches >= 0 ? Json(t.recompute_micro_batches) : Json(nullptr)},
           {"split_masters", t.split_masters},
           {"moments_dtype", sherd::name_of(t.moments_dtype)},
           {"log_interval", t.log_interval}};
  if (t.adapter.type != AdapterType::none) out["adapter"] = adapter_of(t.adapter, extent);
  return out;
}

Json parallel_of(const Parallel& parallel) {
  return {
      {"tensor", parallel.tensor},
      {"sequence_parallel", parallel.sequence_parallel},
      {"context", parallel.context},
      {"context_method", parallel.context_method == ContextMethod::ulysses ? "ulysses" : "ring"},
      {"expert", parallel.expert},
      {"pipeline", parallel.pipeline},
      {"schedule", name_of(parallel.schedule)},
      {"virtual_stages", parallel.virtual_stages},
      {"micro_batch_group", parallel.micro_batch_group ? Json(parallel.micro_batch_group) : Json(nullptr)},
      {"partition_method", parallel.partition_method},
      {"shard_size", parallel.shard_size ? Json(parallel.shard_size) : Json(nullptr)},
      {"reduction", parallel.reduction == Reduction::native ? "native" : "ordered"},
      {"timeout_seconds", parallel.timeout_seconds}};
}

void put_run(Json& out, const Config& config, Extent extent) {
  constexpr const char* levels[] = {"debug", "info", "warning", "error"};
  out["gradient_clipping"] = config.gradient_clipping;
  out["steps_per_print"] = config.steps_per_print;
  out["wall_clock_breakdown"] = config.wall_clock_breakdown;
  out["memory_breakdown"] = config.memory_breakdown;
  out["dump_state"] = config.dump_state;
  const auto put_monitor = [&](const char* section, const Monitor& monitor) {
    if (extent == Extent::told && monitor == Monitor{}) return;
    out[section] = {
        {"enabled", monitor.enabled}, {"output_path", monitor.output_path}, {"job_name", monitor.job_name}};
  };
  put_monitor("tensorboard", config.tensorboard);
  put_monitor("csv_monitor", config.csv_monitor);
  if (config.log_level) out["log_level"] = levels[static_cast<std::size_t>(*config.log_level)];
}

Json data_of(const Data& data) {
  Json out;
  if (data.sources.size() == 1 && data.sources[0].task.empty())
    out["path"] = data.sources[0].path;
  else
    for (const DataSource& source : data.sources) {
      out["sources"].push_back({{"path", source.path}});
      if (source.weight > 0) out["sources"].back()["weight"] = source.weight;
      if (!source.task.empty()) out["sources"].back()["task"] = source.task;
    }
  out["split"] = data.split, out["tokenizer"] = data.tokenizer;
  out["seed"] = data.seed, out["shuffle"] = data.shuffle;
  out["packing"] = data.packing == Packing::stream ? "stream" : "documents";
  return out;
}

void put_sherd(Json& out, const Config& config, Extent extent) {
  constexpr const char* devices[] = {"auto", "cpu", "cuda"};
  if (config.model) out["model"] = model_of(*config.model);
  if (config.data) out["data"] = data_of(*config.data);
  out["training"] = training_of(config.training, extent);
  out["parallel"] = parallel_of(config.parallel);
  out["device"] = {{"type", devices[static_cast<std::size_t>(config.device.type)]},
                   {"threads_per_rank", config.device.threads_per_rank},
                   {"bind_cores", config.device.bind_cores},
                   {"device_memory_limit", config.device.device_memory_limit},
                   {"host_memory_limit", config.device.host_memory_limit},
                   {"tf32", config.device.tf32},
                   {"fused_gelu", config.device.fused_gelu},
                   {"deterministic_attention", config.device.deterministic_attention},
                   {"cuda_graphs", config.device.cuda_graphs},
                   {"peak_tflops", config.device.peak_tflops}};
}

Json tree_of(const Config& config, Extent extent = Extent::told) {
  const bool all = extent == Extent::whole;
  Json out = Json::object();
  put_batch(out, config.batch);
  if (config.optimizer.given) out["optimizer"] = optimizer_of(config.optimizer);
  if (Json scheduler = std::visit(SchedulerDump{}, config.scheduler); !scheduler.is_null())
    out["scheduler"] = std::move(scheduler);
  put_precision(out, config.precision);
  out["zero_optimization"] = zero_of(config.zero, extent);
  if (all || config.aio != Aio{}) out["aio"] = aio_of(config.aio);
  for (const auto& [key, on] : {std::pair{"cpu_checkpointing", config.training.cpu_checkpointing},
                                std::pair{"nvme_checkpointing", config.training.nvme_checkpointing}})
    if (all || on) out["activation_checkpointing"][key] = on;
  put_run(out, config, extent);
  put_sherd(out, config, extent);
  return out;
}

void flatten(const Json& value, const std::string& path,
             std::vector<std::pair<std::string, std::string>>& out) {
  if (value.is_array() && !value.empty() && value.front().is_object()) {
    for (std::size_t i = 0; i < value.size(); ++i)
      flatten(value[i], path + "[" + std::to_string(i) + "]", out);
    return;
  }
  if (!value.is_object()) {
    out.emplace_back(path, value.dump());
    return;
  }
  for (const auto& [name, below] : value.items())
    flatten(below, path.empty() ? name : path + "." + name, out);
}

}  // namespace

std::string section_of(const Model& model) {
  Json out = model_of(model);
  // Defaults go, as the parser would note those without effect.
  const Json defaults = moe_of(Moe());
  if (out.contains("moe"))
    for (const char* key : {"drop", "aux_loss_type", "shared_expert_gate"})
      if (out["moe"][key] == defaults[key]) out["moe"].erase(key);
  return Json{{"model", std::move(out)}}.dump(2);
}

std::string section_of(const Adapter& adapter) {
  return Json{{"training", {{"adapter", adapter_of(adapter)}}}}.dump(2);
}

std::string dump(const Config& config) {
  return tree_of(config).dump(2);
}

std::vector<std::pair<std::string, std::string>> flat_dump(const Config& config) {
  std::vector<std::pair<std::string, std::string>> out;
  flatten(tree_of(config), "", out);
  return out;
}

std::map<std::string, std::string> every_value(const Config& config) {
  std::vector<std::pair<std::string, std::string>> out;
  flatten(tree_of(config, Extent::whole), "", out);
  return {out.begin(), out.end()};
}

}  // namespace sherd::config
