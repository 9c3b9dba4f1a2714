#include "support/equality.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "base/arena.h"
#include "base/random.h"
#include "config/config.h"
#include "engine/setup/process_grid.h"
#include "models/gpt.h"
#include "support/gpu/lazy_kernels.h"

namespace sherd::test {

namespace {

std::string offload(const std::string& device, const std::string& path, const std::string& extra) {
  return R"({"device": ")" + device + "\"" + (device == "nvme" ? R"(, "nvme_path": ")" + path + "\"" : "") +
         extra + "}";
}

}  // namespace

std::string RunSpec::config() const {
  auto str = [](auto v) { return std::to_string(v); };
  auto flag = [](bool b) { return b ? std::string("true") : std::string("false"); };
  std::string precision =
      dtype == "bf16"   ? cat(R"("bf16": {"enabled": true)",
                            check_overflow ? "" : R"(, "check_grad_overflow": false)", "},")
      : dtype == "fp16" ? cat(R"("fp16": {"enabled": true, "initial_scale_power": 8, "loss_scale_window": )",
                              loss_scale_window, "},")
                        : "";
  if (!fp8.empty()) precision += R"("fp8": {"enabled": true, )" + fp8 + "},";
  if (!accumulate_in.empty())
    precision += R"("data_types": {"grad_accum_dtype": ")" + accumulate_in + R"("},)";
  if (!communicate_in.empty()) precision += R"("communication_data_type": ")" + communicate_in + R"(",)";
  const int shared_heads = kv_heads > 0 ? kv_heads : !llama && !adapter.empty() ? 4 : 2;
  return "{" + precision + R"("train_micro_batch_size_per_gpu": )" + str(rows) +
         R"(, "gradient_accumulation_steps": )" + str(accumulation) + R"(, "gradient_clipping": )" +
         str(clipping) + R"(, "optimizer": {)" + optimizer +
         (groups.empty() ? "" : R"(, "groups": )" + groups) + "}," +
         R"("scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5, "warmup_type": "linear"}},)" +
         R"("zero_optimization": {"stage": )" + str(stage) + R"(, "reduce_bucket_size": )" + str(bucket) +
         R"(, "allgather_bucket_size": )" + str(bucket / 2 * 2) + R"(, "overlap_comm": )" + flag(overlap) +
         R"(, "stage3_prefetch_bucket_size": )" + str(prefetch) +
         R"(, "stage3_param_persistence_threshold": )" + str(persistence) +
         R"(, "stage3_max_live_parameters": )" + str(max_live) + R"(, "stage3_max_reuse_distance": )" +
         str(max_reuse) +
         (offload_param != "none"
              ? R"(, "offload_param": )" + offload(offload_param,
                                                   param_nvme_path.empty() ? nvme_path : param_nvme_path,
                                                   offload_param_extra)
              : "") +
         (offload_optimizer != "none"
              ? R"(, "offload_optimizer": )" + offload(offload_optimizer, nvme_path, offload_extra)
              : "") +
         (sub_group != 1'000'000'000 ? R"(, "sub_group_size": )" + str(sub_group) : "") + "}," +
         (aio.empty() ? "" : R"("aio": {)" + aio + "},") +
         (cpu_checkpointing ? R"("activation_checkpointing": {"cpu_checkpointing": true},)" : "") +
         (nvme_checkpointing ? R"("activation_checkpointing": {"nvme_checkpointing": true},)" : "") +
         R"("model": {"type": ")" + (llama ? "llama" : "gpt2") + R"(", "vocab_size": 101, "seq_length": )" +
         str(seq) + R"(, "hidden_size": )" + str(hidden) + R"(, "num_layers": )" + str(layers) +
         R"(, "num_heads": 4, "num_kv_heads": )" + str(shared_heads) + R"(, "dropout": )" + str(dropout) +
         R"(, "tie_embeddings": )" + flag(tied) + (moe.empty() ? "" : R"(, "moe": {)" + moe + "}") + model +
         "}," + R"("training": {"steps": )" + str(steps) + R"(, "seed": 7, "recompute": ")" + recompute +
         (split_masters ? "\"" : R"(", "split_masters": false)") +
         (recompute_blocks >= 0 ? cat(R"(, "recompute_blocks": )", recompute_blocks) : "") +
         (recompute_micro_batches >= 0 ? cat(R"(, "recompute_micro_batches": )", recompute_micro_batches)
                                       : "") +
         (moments == "fp32" ? "" : R"(, "moments_dtype": ")" + moments + "\"") +
         (adapter.empty() ? "" : R"(, "adapter": {)" + adapter + "}") +
         (sparsity.empty() ? "" : R"(, "sparsity": {)" + sparsity + "}") +
         R"(}, "parallel": {"timeout_seconds": )" + str(timeout_seconds) +
         (shard_size > 0 ? R"(, "shard_size": )" + str(shard_size) : "") +
         (reduction.empty() ? "" : R"(, "reduction": ")" + reduction + "\"") + stages_keys() +
         R"(, "tensor": )" + str(tensor) +
         (tensor > 1 ? R"(, "sequence_parallel": )" + flag(sequence_parallel) : "") + R"(, "context": )" +
         str(context) + (context > 1 ? R"(, "context_method": ")" + context_method + "\"" : "") +
         R"(}, "device": {"type": ")" + device + R"(", "threads_per_rank": )" + str(threads) +
         (bind_cores ? R"(, "bind_cores": true)" : "") + (graphs ? R"(, "cuda_graphs": true)" : "") +
         (device_limit > 0 ? R"(, "device_memory_limit": )" + str(device_limit) : "") + "}}";
}

std::string RunSpec::stages_keys() const {
  std::string out;
  const auto add = [&](const char* key, const std::string& value) { out += cat(", \"", key, "\": ", value); };
  if (pipeline > 1) add("pipeline", cat(pipeline));
  if (expert > 1) add("expert", cat(expert));
  if (virtual_stages > 1) add("virtual_stages", cat(virtual_stages));
  if (!schedule.empty()) add("schedule", cat('"', schedule, '"'));
  if (!partition.empty()) add("partition_method", cat('"', partition, '"'));
  if (micro_batch_group > 0) add("micro_batch_group", cat(micro_batch_group));
  return out;
}

std::vector<unsigned char> RunResult::bits() const {
  std::vector<unsigned char> out;
  std::size_t size = 3 * losses.size() * sizeof(double);
  for (const auto* weights : {&masters, &parameters})
    for (const auto& [name, bytes] : *weights) size += name.size() + bytes.size();
  out.reserve(size);
  const auto put = [&](const void* data, std::size_t bytes) {
    const auto* from = static_cast<const unsigned char*>(data);
    out.insert(out.end(), from, from + bytes);
  };
  put(losses.data(), losses.size() * sizeof(double));
  put(norms.data(), norms.size() * sizeof(double));
  put(scales.data(), scales.size() * sizeof(double));
  for (const auto* weights : {&masters, &parameters})
    for (const auto& [name, bytes] : *weights) put(name.data(), name.size()), put(bytes.data(), bytes.size());
  return out;
}

tensor::Batch synthetic_batch(device::Device& device, std::int64_t rows, std::int64_t seq, int vocab,
                              std::int64_t step, int micro, int rank,
                              const std::function<data::VirtualTokens(std::int64_t row)>& prompt) {
  const RandomKey key = RandomKey{99, 0}
                            .at(static_cast<std::uint64_t>(step))
                            .at(static_cast<std::uint64_t>(micro))
                            .at(static_cast<std::uint64_t>(rank));
  std::vector<std::int32_t> tokens, labels;
  for (std::int64_t row = 0; row < rows; ++row) {
    const data::VirtualTokens before = prompt ? prompt(row) : data::VirtualTokens{};
    for (std::int64_t i = 0; i <= seq; ++i) {
      const auto id =
          static_cast<std::int32_t>(philox(key, static_cast<std::uint64_t>(row * (seq + 1) + i))[0] %
                                    static_cast<std::uint32_t>(vocab));
      const bool is_virtual = i < before.count;
      if (i < seq) tokens.push_back(is_virtual ? static_cast<std::int32_t>(before.first + i) : id);
      if (i > 0) labels.push_back(is_virtual ? data::no_label : id);
    }
  }
  return {{"tokens", tensor::Tensor::of<std::int32_t>(device, {rows, seq}, tokens)},
          {"labels", tensor::Tensor::of<std::int32_t>(device, {rows, seq}, labels)}};
}

namespace {

using Weights = std::map<std::string, std::vector<std::byte>>;

/// Adds what the other ranks of an axis hold: stages of a pipeline, or experts.
void collect_from(comm::Axis axis, Engine& engine, Weights& weights) {
  comm::Communicator& stages = engine.groups().group(axis);
  if (stages.size() == 1) return;
  const auto in_host = [&](std::size_t count, DType dtype) {
    return tensor::Tensor::empty(engine.device(), {static_cast<std::int64_t>(count)}, dtype,
                                 device::Category::activations, engine.device().processor_tier());
  };
  const Weights own = weights;
  for (int stage = 0; stage < stages.size(); ++stage) {
    const tensor::Tensor count = in_host(1, DType::i64);
    *count.data<std::int64_t>() = static_cast<std::int64_t>(own.size());
    stages.broadcast(count, stage).wait();
    auto next = own.begin();
    for (std::int64_t i = 0; i < *count.data<std::int64_t>(); ++i) {
      const bool mine = stage == stages.rank();
      const tensor::Tensor sizes = in_host(2, DType::i64);
      auto* size = sizes.data<std::int64_t>();
      if (mine) size[0] = std::ssize(next->first), size[1] = std::ssize(next->second);
      stages.broadcast(sizes, stage).wait();
      const auto length = static_cast<std::size_t>(size[0]);
      const tensor::Tensor all = in_host(length + static_cast<std::size_t>(size[1]), DType::u8);
      if (mine) {
        std::memcpy(all.raw(), next->first.data(), length);
        std::memcpy(all.raw() + length, next->second.data(), next->second.size());
        ++next;
      }
      stages.broadcast(all, stage).wait();
      const std::string name(reinterpret_cast<const char*>(all.raw()), length);
      std::vector<std::byte> bytes(all.raw() + length, all.raw() + all.bytes());
      const auto [place, fresh] = weights.try_emplace(name, bytes);
      require(fresh || place->second == bytes, "ranks hold different copies of ", name);
    }
  }
}

}  // namespace

void collect_weights(Engine& engine, RunResult& out) {
  using tensor::Tensor;
  engine.synchronize();
  for (const auto& unit : engine.sharded().units()) {
    for (const auto& segment : unit->segments()) {
      const auto& layout = segment->layout();
      const auto in_host = [&](std::int64_t numel, DType dtype) {
        return Tensor::empty(engine.device(), {numel}, dtype, device::Category::activations,
                             engine.device().processor_tier());
      };
      const Tensor masters = in_host(layout.shard(), DType::f32);
      const Tensor parameters = in_host(layout.shard(), segment->compute_dtype());
      if (segment->key().in_blocks()) {
        const Tensor blocks = in_host(segment->stored(layout.shard()), DType::u8);
        segment->parameters().read(segment->stored(segment->own_begin()), blocks).wait();
        engine.kernels().dequantize(segment->key().format, blocks, parameters);
      } else {
        segment->parameters().read(segment->own_begin(), parameters).wait();
      }
      if (segment->key().trainable)
        segment->read_masters(segment->own_begin(), masters);
      else
        engine.kernels().copy(parameters, masters);  // frozen: no other weights
      const std::pair<Tensor, std::map<std::string, std::vector<std::byte>>*> kinds[] = {
          {masters, &out.masters}, {parameters, &out.parameters}};
      for (const auto& [shard, to] : kinds) {
        Tensor full = in_host(layout.padded(), shard.dtype());
        segment->groups().shard->all_gather({{shard, full}}).wait();
        for (std::size_t i = 0; i < layout.parameters().size(); ++i) {
          const std::int64_t numel = layout.parameters()[i]->numel();
          const Tensor part = full.range(layout.offset(i), layout.offset(i) + numel);
          comm::Communicator& tensor_ranks = engine.groups().group(comm::Axis::tensor);
          const Tensor all = in_host(numel * tensor_ranks.size(), part.dtype());
          tensor_ranks.all_gather({{part, all}}).wait();
          (*to)[layout.parameters()[i]->name].assign(all.raw(), all.raw() + all.bytes());
        }
      }
    }
  }
  for (Weights* weights : {&out.masters, &out.parameters})
    for (const comm::Axis axis : {comm::Axis::expert, comm::Axis::pipeline})
      collect_from(axis, engine, *weights);
}

void nudge(Engine& engine) {
  engine.synchronize();
  sharding::Segment& segment = *engine.sharded().trainable_segments().front();
  const std::int64_t count = std::min<std::int64_t>(segment.update_end() - segment.update_begin(), 64);
  const tensor::Tensor weights = tensor::Tensor::empty(
      engine.device(), {count}, DType::f32, device::Category::activations, engine.device().processor_tier());
  segment.read_masters(segment.update_begin(), weights);
  float& largest = *std::max_element(weights.data<float>(), weights.data<float>() + count,
                                     [](float a, float b) { return std::abs(a) < std::abs(b); });
  largest = std::bit_cast<float>(std::bit_cast<std::uint32_t>(largest) ^ 1u);
  segment.write_values(segment.update_begin(), weights);
}

std::unique_ptr<Engine> make_engine(DistributedPtr dist, const RunSpec& spec) {
  const config::Config config = config::parse_text(spec.config());
  const auto groups = make_groups(dist, config);
  const auto model =
      std::make_shared<models::Gpt>(models::gpt_config(config, 101), layout_of(*groups, config));
  if (!spec.lazy) return std::make_unique<Engine>(std::move(dist), model, config, nullptr, nullptr, groups);
  const auto gpu =
      std::make_shared<testing::LazyCudaDevice>(std::numeric_limits<std::size_t>::max(), spec.graphs);
  return std::make_unique<Engine>(std::move(dist), model, config, gpu,
                                  std::make_unique<testing::LazyKernels>(*gpu), groups);
}

namespace {

/// Which virtual tokens stand in front of rows of a micro-batch; null: none do.
std::function<data::VirtualTokens(std::int64_t row)> prompts_of(const RunSpec& spec,
                                                                const config::Config& config, int step,
                                                                int micro) {
  const config::Adapter& adapter = config.training.adapter;
  if (!adapter.has_prompt()) return nullptr;
  return [&, step, micro](std::int64_t row) -> data::VirtualTokens {
    const std::int64_t global = std::int64_t{micro} * spec.rows + row;
    const std::int64_t prompt =
        spec.prompt_of ? spec.prompt_of(step, global) : global % adapter.prompt.prompts();
    return {config::first_virtual_id(adapter.prompt, 101, config.model->pad_vocab_to_multiple_of, prompt),
            adapter.prompt.virtual_tokens};
  };
}

/// The micro-batch of that number in the step, so that every number of ranks sees the same data.
tensor::Batch batch_of(Engine& engine, const RunSpec& spec, int step, int micro) {
  tensor::Batch batch = synthetic_batch(engine.device(), spec.rows, spec.seq, 101, step, micro, 0,
                                        prompts_of(spec, engine.config(), step, micro));
  if (!spec.ragged) return batch;
  const int left_out = (step + 5 * micro) % spec.seq;
  for (int row = 0; row < spec.rows; ++row)
    std::fill_n(batch.at("labels").data<std::int32_t>() + row * spec.seq, left_out, data::no_label);
  // The last row's end holds no token, and so no target.
  const int filled = std::min((3 * step + 7 * micro) % (spec.seq / 2 + 1), spec.seq - left_out - 1);
  std::fill_n(batch.at("labels").data<std::int32_t>() + spec.rows * spec.seq - filled, filled,
              data::no_label);
  std::vector<std::int32_t> filling(static_cast<std::size_t>(spec.rows));
  filling.back() = filled;
  batch["filling"] = tensor::Tensor::of<std::int32_t>(engine.device(), {spec.rows}, filling);
  const std::vector<std::int32_t> targets{spec.rows * (spec.seq - left_out) - filled};
  batch["target_tokens"] = tensor::Tensor::of<std::int32_t>(engine.device(), {1}, targets);
  return batch;
}

}  // namespace

RunResult train(const DistributedPtr& dist, const RunSpec& spec, int from, int last) {
  RunResult out;
  Before before(spec, dist->rank());
  auto engine = make_engine(dist, spec);
  engine->set_observer(&before);
  if (from > 0) engine->load_checkpoint(spec.directory);
  for (int tier = 0; tier < device::tier_count; ++tier)
    for (const auto category :
         {device::Category::parameters, device::Category::gradients, device::Category::optimizer})
      out.state_bytes[tier] += engine->device().ledger().current(static_cast<device::Tier>(tier), category);
  for (int step = from; step < (last > 0 ? last : spec.steps); ++step) {
    if (step == spec.nudge_step) nudge(*engine);
    if (spec.between_steps) spec.between_steps(*engine);
    int micro = 0;
    before.step = step;
    const auto next = [&] {
      if (spec.before_batch) spec.before_batch(dist->rank(), step);
      const comm::Communicator& ranks = engine->data_ranks();
      return batch_of(*engine, spec, step, micro++ * ranks.size() + ranks.rank());
    };
    const auto& report = [&]() -> const engine::StepReport& {
      try {
        return engine->train_batch(next);
      } catch (...) {
        if (spec.when_failed) spec.when_failed(*engine);
        throw;
      }
    }();
    out.losses.push_back(report.loss);
    out.norms.push_back(report.grad_norm);
    out.scales.push_back(report.loss_scale);
    out.early_updates.push_back(report.early_updates);
    if (const device::Accelerator* gpu = engine->device().accelerator())
      out.graphs.push_back(gpu->graph_counts());
    out.attention = engine->kernels().attention_routes();
    if (step + 1 == spec.resume_at) {
      engine->save_checkpoint(spec.directory, "middle");
      engine.reset();
      engine = make_engine(dist, spec);
      engine->set_observer(&before);
      engine->load_checkpoint(spec.directory);
    }
  }
  if (last > 0) engine->save_checkpoint(spec.directory);
  if (spec.at_end) spec.at_end(*engine);
  collect_weights(*engine, out);
  out.residency = engine->sharded().residency_stats();
  out.reducer = engine->sharded().reducer_stats();
  out.persistent = engine->sharded().persistent_elements();
  out.activation_peak = engine->device().ledger().peak(device::Tier::device, device::Category::activations);
  out.skipped = engine->skipped_steps();
  out.device_peak = engine->device().ledger().peak(device::Tier::device);
  out.io = engine->io_bytes();
  return out;
}

RunResult train_on(const StartRanks& start, const RunSpec& spec, int from, int last) {
  std::vector<RunResult> results(static_cast<std::size_t>(spec.ranks));
  start(spec.ranks, {.timeout_seconds = spec.timeout_seconds}, [&](comm::Communicator& world) {
    set_flush_denormals();
    const auto dist = std::make_shared<Distributed>(
        std::shared_ptr<comm::Communicator>(std::shared_ptr<void>(), &world), world.rank(), world.size());
    results[static_cast<std::size_t>(world.rank())] = train(dist, spec, from, last);
  });
  if (spec.ranks > 1) {
    const std::vector<unsigned char> bits = results[0].bits();
    for (std::size_t rank = 1; rank < results.size(); ++rank)
      require(results[rank].bits() == bits, "ranks of one run disagree");
  }
  return std::move(results[0]);
}

RunResult train_local(const RunSpec& spec, int from, int last) {
  return train_on([](int ranks, const comm::CommOptions& options,
                     const auto& body) { comm::run_local(ranks, options, body); },
                  spec, from, last);
}

}  // namespace sherd::test
