#include "cli/train_run.h"

#include <algorithm>
#include <cstdio>

#include "base/excerpt.h"
#include "base/files.h"
#include "base/log.h"
#include "base/random.h"
#include "cli/inference/inference.h"
#include "cli/weights.h"
#include "comm/gather.h"
#include "device/accelerator.h"
#include "engine/report/report.h"
#include "engine/setup/process_grid.h"
#include "models/adapters/prompt_weights.h"
#include "models/gpt.h"

namespace sherd::cli {
namespace {

/// Tells whose kernels attention ran on, on a GPU.
std::string route_shown(const tensor::AttentionRoutes& attention) {
  if (attention.by_own == 0) return "by cuDNN";
  if (attention.by_library == 0) return "by Sherd's own kernels (see docs/gpu.md)";
  return cat("by cuDNN, and ", attention.by_own, " of ", attention.by_library + attention.by_own,
             " calls by Sherd's own kernels (see docs/gpu.md)");
}

}  // namespace

TrainRun::TrainRun(DistributedPtr dist, const TrainRequest& request,
                   std::shared_ptr<const engine::TokenData> data, double gemm_rate,
                   std::function<double(double)> better_rate)
    : dist_(std::move(dist)),
      request_(request),
      data_(std::move(data)),
      shape_(models::gpt_config(request.config, data_->vocab_size)),
      gemm_rate_(gemm_rate),
      better_rate_(std::move(better_rate)) {
  const auto groups = make_groups(dist_, request_.config);
  engine_ = std::make_unique<Engine>(
      dist_, std::make_shared<models::Gpt>(shape_, layout_of(*groups, request_.config)), request_.config,
      nullptr, nullptr, groups);
  make_loaders();
  trainer_ = std::make_unique<Trainer>(*engine_, *train_loader_, trainer_options());
  const std::string& folder = request_.config.training.init_from;
  if (!trainer_->resumed() && !folder.empty())
    begin_from(folder);
  else if (!trainer_->resumed())
    require_base();
  if (!request_.trace.empty()) {
    if (speaks()) AtomicFile probe(request_.trace);  // an error now rather than after the last step
    trace_ = std::make_unique<engine::Trace>();
    engine_->set_trace(trace_.get());
  }
  if (speaks() && request_.resume_or_start && !trainer_->resumed())
    log_info("there is no checkpoint in ", request_.config.training.save_dir, " yet: training begins");
  if (speaks()) announce();
}

/// An adapter means nothing without the model that it belongs to.
void TrainRun::require_base() const {
  const config::Adapter& adapter = request_.config.training.adapter;
  if (!adapter.init_from.empty())
    fail(ErrorKind::config, "training.adapter.init_from names an adapter, '", adapter.init_from,
         "', and nothing names the model that it belongs to: give its folder as training.init_from");
  if (adapter.prompt.init != config::PromptInit::random)
    fail(
        ErrorKind::config,
        "training.adapter.init is of vectors of the model's own table, and nothing names the model: give its "
        "folder as training.init_from, or \"init\": \"random\"");
  if (adapter.type != config::AdapterType::none && speaks())
    log_warning(
        "training.adapter trains beside weights that stay as they are, and these are drawn by chance: "
        "give training.init_from");
}

void TrainRun::make_loaders() {
  const config::Batch& batch = engine_->config().batch;
  train_loader_ = data_->training_loader(engine_->loader_rank(), engine_->device());
  engine_->set_training_data(*train_loader_, data_);
  if (!data_->validation && speaks() && request_.config.data->split[1] > 0)
    log_warning(
        "no validation: its part of the data has no whole sample; give data.split a larger second part");
  if (!data_->validation) return;
  validation_loader_ = data_->validation_loader(engine_->loader_rank(),
                                                request_.config.training.eval_steps * batch.train_batch_size,
                                                engine_->device());
}

TrainerOptions TrainRun::trainer_options() {
  TrainerOptions options;
  options.validation = validation_loader_.get();
  options.resume = request_.resume;
  options.may_begin = request_.resume_or_start;
  options.resume_tag = request_.resume_tag;
  options.metrics_file = request_.metrics;
  options.mfu = [this](double tokens_per_second) { return mfu(tokens_per_second); };
  options.words = {
      .resume = "--resume", .tag = "--tag", .validation = "give data.split a larger second part"};
  return options;
}

/// The model's operations per second, over those that the machine can do.
std::optional<double> TrainRun::mfu(double tokens_per_second) {
  if (gemm_rate_ <= 0) return {};
  const double reached = tokens_per_second * models::flops_per_token(shape_, shape_.seq_length,
                                                                     models::AttentionFlops::causal_half);
  if (reached > gemm_rate_)
    gemm_rate_ = better_rate_(reached);  // measured while the machine did other things
  return reached / gemm_rate_;
}

int TrainRun::run() {
  const int signal = trainer_->run();
  report();
  report_trace();
  return signal;
}

/// ", tensor 2 x context 1 x data 2" where ranks share a model, or its experts.
std::string TrainRun::layout_shown() const {
  const comm::Grid& grid = engine_->groups().grid();
  const bool apart = grid.size(comm::Axis::data) == grid.ranks() && grid.size(comm::Axis::expert) == 1;
  return apart ? "" : cat(", ", engine::describe(grid));
}

void TrainRun::announce() const {
  const config::Config& config = engine_->config();
  log_info(config::name_of(config.model->type), " with ",
           engine::human_count(static_cast<double>(shape_.num_parameters())), " parameters (",
           counted(shape_.num_layers, "layer"), ", ", shape_.hidden_size, " hidden, ", shape_.vocab_size,
           " vocabulary) in ", name_of(config.precision.compute), ", ZeRO stage ", config.zero.stage,
           " over ", dist_->world().name(), layout_shown(), ", ",
           counted(engine_->device().arena().threads(), "thread"), " per rank");
  if (const config::Adapter& adapter = config.training.adapter; adapter.type != config::AdapterType::none) {
    std::int64_t trained = 0;
    for (const nn::ParameterPtr& parameter : engine_->module().parameters())
      if (parameter->trainable) trained += parameter->logical_slice().logical().numel();
    log_info("trained is an adapter (", config::name_of(adapter.type), ") with ",
             engine::human_count(static_cast<double>(trained)),
             " parameters; the model's own stay as they are");
  }
  log_info("batch ", config.batch.train_batch_size, " = ", config.batch.micro_batch_size, " per rank x ",
           config.batch.gradient_accumulation_steps, " accumulated x ",
           counted(engine_->data_ranks().size(), "data-parallel rank"), ", ",
           counted(shape_.seq_length, "token"), " each; data ", data_->name(), ": ",
           engine::human_count(static_cast<double>(data_->train->tokens())), " training tokens");
  if (config.training.save_dir.empty()) log_info("nothing will be saved: training.save_dir is not set");
  if (!engine_->device().accelerator()) return;
  if (gemm_rate_ > 0)
    log_info("MFU counts against ", engine::human_count(gemm_rate_),
             "FLOP/s: ", config.device.peak_tflops > 0 ? "device.peak_tflops" : "the data sheet's dense peak",
             ", over all GPUs");
  else
    log_info("the peak of GPU '", engine_->device().accelerator()->name(),
             "' is not known, so MFU is not told: set device.peak_tflops");
}

/// Warns where the weights were trained on ids of another tokenizer, to which these mean nothing.
void TrainRun::warn_of_other_tokenizer(const engine::ExtraFiles& companions) const {
  const std::string prefix = companion_prefix;
  const auto came = companions.find(prefix + engine::tokenizer_file_of(data_->tokenizer));
  const bool any = companions.contains(prefix + engine::tokenizer_file) ||
                   companions.contains(prefix + engine::tokenizer_json_file) ||
                   companions.contains(prefix + "vocab.json");
  const bool other = came != companions.end() && !data_->tokenizer_model.empty()
                         ? came->second != data_->tokenizer_model
                         : any;
  if (other && !data_->tokenizer.empty())
    log_warning("the weights came with a tokenizer of their own, and the data were made with '",
                data_->tokenizer, "': ids will mean other text than the weights were trained on");
}

/// The ids whose vectors all prompts' vectors are at first; none: they are drawn.
std::vector<std::int32_t> TrainRun::prompt_ids() const {
  const config::PromptKeys& prompt = request_.config.training.adapter.prompt;
  std::vector<std::int32_t> out;
  if (prompt.init == config::PromptInit::sample_vocab) {
    const RandomKey key{request_.config.training.seed, stable_hash("the prompt's ids")};
    for (std::int64_t i = 0; i < prompt.prompts() * prompt.virtual_tokens; ++i) {
      const double drawn =
          uniform_at(key, static_cast<std::uint64_t>(i)) * static_cast<double>(shape_.vocab_size);
      out.push_back(static_cast<std::int32_t>(
          std::min<std::int64_t>(static_cast<std::int64_t>(drawn), shape_.vocab_size - 1)));
    }
  }
  if (prompt.init != config::PromptInit::text) return out;
  if (data_->tokenizer.empty())
    fail(
        ErrorKind::config,
        "training.adapter.init_text is tokenised as the data were, and nothing says how: set data.tokenizer");
  const auto tokenizer = data::make_tokenizer(data_->tokenizer);
  for (std::int64_t i = 0; i < prompt.prompts(); ++i) {
    const std::string own = prompt.tasks.empty() ? "" : prompt.tasks[static_cast<std::size_t>(i)].init_text;
    const std::vector<std::int32_t> ids =
        models::repeated(prompt_of(*tokenizer, own.empty() ? prompt.init_text : own), prompt.virtual_tokens);
    out.insert(out.end(), ids.begin(), ids.end());
  }
  return out;
}

void TrainRun::begin_from(const std::string& folder) {
  const config::Config& config = engine_->config();
  Weights weights(folder, shape_, engine_->device(), config.training.adapter, prompt_ids());
  comm::gather_results(dist_->world(), "weights verified", [&] {
    weights.verify_share(dist_->rank(), dist_->world_size());
    return true;
  });
  engine_->load_weights(weights.source());
  if (speaks()) engine_->set_checkpoint_files(weights.companions());
  if (!speaks()) return;
  log_info("weights from ", folder);
  warn_of_other_tokenizer(weights.companions());
  for (const std::string& note : weights.notes()) log_info(folder, "/config.json: ", note);
}

void TrainRun::report_trace() {
  if (!trace_) return;
  engine_->set_trace(nullptr);
  const std::vector<engine::TraceTotals> all =
      comm::gather_records(dist_->world(), trace_->totals(), "totals of the trace");
  engine::write_trace(*dist_, *trace_, request_.trace);
  if (speaks())
    std::printf("\n%s",
                engine::trace_table(all, engine_->groups().grid().size(comm::Axis::pipeline)).c_str());
}

void TrainRun::report() const {
  const engine::MemoryReport mine = engine::MemoryReport::of(engine_->device());
  const std::vector<engine::MemoryReport> all = comm::gather_records(dist_->world(), mine, "memory report");
  if (!speaks()) return;
  const Trainer::Totals& totals = trainer_->totals();
  const auto steps = static_cast<std::int64_t>(totals.step_seconds.size());
  std::printf("\n%s", engine::memory_table(all).c_str());
  if (const std::string layout = layout_shown(); !layout.empty())
    std::printf("\n%s%s\n", counted(dist_->world_size(), "rank").c_str(), layout.c_str());
  if (steps > 0 && !totals.routing.empty())
    std::printf("\n%s", engine::experts_table(totals.routing).c_str());
  if (steps > 0 && all.size() > 1) std::printf("\n%s", engine::traffic_table(totals.traffic, steps).c_str());
  if (steps > 0) {
    std::vector<double> seconds = totals.step_seconds;
    std::sort(seconds.begin(), seconds.end());
    const double median = seconds[seconds.size() / 2];
    const std::optional<double>& val_loss = trainer_->validation_loss();
    const std::int64_t skipped = engine_->skipped_steps();
    std::printf("\nstep %lld: loss %.4f%s%s; median step %.1f ms, %.0f tokens/s\n",
                static_cast<long long>(engine_->global_steps()), engine_->last_step().loss,
                val_loss ? cat(", validation loss ", *val_loss).c_str() : "",
                skipped > 0 ? cat(", ", counted(skipped, "step"), " skipped").c_str() : "", median * 1e3,
                static_cast<double>(totals.units) / static_cast<double>(steps) / median);
  }
  if (const tensor::AttentionRoutes attention = engine_->kernels().attention_routes();
      attention.by_library + attention.by_own > 0)
    std::printf("attention: %s\n", route_shown(attention).c_str());
  if (data_->info)
    std::printf("unigram entropy of the corpus: %.4f nats per token\n", data_->info->unigram_entropy);
}

}  // namespace sherd::cli
