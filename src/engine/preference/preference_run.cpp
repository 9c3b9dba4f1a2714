#include "engine/preference/preference_run.h"

#include <algorithm>
#include <bit>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <limits>
#include <utility>

#include "base/log.h"
#include "base/text/excerpt.h"
#include "comm/gather.h"

namespace sherd::engine {
namespace {

constexpr const char* client_key = "reference";

nn::TextModel& texts_of(Engine& engine) {
  auto* model = dynamic_cast<nn::TextModel*>(&engine.module());
  if (!model)
    fail(ErrorKind::config, "training.objective \"", config::name_of(engine.config().objective()),
         "\" is learned by models that score texts (nn::TextModel), as those of a `model` section do");
  return *model;
}

/// Where the run saves, so that no other run's takes its place; else beside the data.
std::string path_of(const config::Config& config) {
  const std::string &given = config.training.preference.reference_file, &saves = config.training.save_dir;
  if (!given.empty() || !config.data) return given;
  return saves.empty() ? config.data->sources.front().path + ".reference"
                       : (std::filesystem::path(saves) / "reference").string();
}

std::vector<std::int64_t> bits_of(const std::vector<std::vector<double>>& lists) {
  std::vector<std::int64_t> out;
  for (const std::vector<double>& list : lists) {
    out.push_back(std::ssize(list));
    for (const double value : list) out.push_back(std::bit_cast<std::int64_t>(value));
  }
  return out;
}

std::vector<std::vector<double>> lists_of(const std::vector<std::int64_t>& bits) {
  std::vector<std::vector<double>> out;
  for (std::size_t at = 0; at < bits.size();) {
    std::vector<double>& list = out.emplace_back(static_cast<std::size_t>(bits[at++]));
    for (double& value : list) value = std::bit_cast<double>(bits[at++]);
  }
  return out;
}

/// Targets of each text of a batch.
std::vector<std::int64_t> targets_of(const tensor::Batch& batch) {
  const std::size_t texts = sides_of(batch).size();
  std::vector<std::int64_t> ends, out(texts);
  const tensor::Tensor& targets = batch.at("targets");
  if (const auto documents = batch.find("documents"); documents != batch.end()) {
    const auto* bounds = documents->second.data<std::int32_t>();
    ends.assign(bounds + 1, bounds + documents->second.numel());
  } else {
    const std::int64_t rows = batch.at("tokens").shape()[1];
    for (std::size_t i = 1; i <= texts; ++i) ends.push_back(static_cast<std::int64_t>(i) * rows);
  }
  std::size_t text = 0;
  for (std::int64_t i = 0; i < targets.numel(); ++i) {
    while (ends[text] <= targets.data<std::int32_t>()[i]) ++text;
    ++out[text];
  }
  return out;
}

/// The part of a batch that its mismatched like is (data::mismatched_prefix).
tensor::Batch mismatched_of(const tensor::Batch& batch) {
  const std::string prefix = data::mismatched_prefix;
  tensor::Batch out;
  for (const auto& [name, values] : batch)
    if (name.starts_with(prefix)) out[name.substr(prefix.size())] = values;
  return out;
}

}  // namespace

int passes_before_step(const config::Config& config) {
  if (!config.learns_preferences()) return 0;
  const config::Reference reference = config.reference();
  const bool at_hand = reference == config::Reference::none || reference == config::Reference::precomputed;
  const int baseline = config.has_baseline() ? 1 : 0;
  return (at_hand ? 0 : 1 + baseline) + baseline + (looks_at_partners(config.preference_terms()) ? 1 : 0);
}

PreferenceRun::PreferenceRun(Engine& engine, std::shared_ptr<const TokenData> data, Engine* reference)
    : engine_(engine),
      model_(texts_of(engine)),
      data_(std::move(data)),
      copy_(reference),
      reference_(engine.config().reference()),
      file_(path_of(engine.config())) {
  require(reference_ != config::Reference::copy || copy_,
          "training.preference.reference \"copy\" needs the copy");
  require(engine_.preference_loss(), "an engine that does not learn preferences");
}

nn::TextScores PreferenceRun::scores(Engine& engine, const tensor::Batch& batch, bool without_adapter) const {
  nn::TextScores out;
  auto& model = dynamic_cast<nn::TextModel&>(engine.module());
  engine.evaluate([&](autograd::Tape& tape) { out = model.text_scores(tape, batch, without_adapter); });
  return out;
}

void PreferenceRun::add_reference(tensor::Batch& batch, Answers answers) {
  if (reference_ == config::Reference::none) return;
  if (reference_ != config::Reference::precomputed) {
    Engine& from = reference_ == config::Reference::copy ? *copy_ : engine_;
    batch["reference"] = tensor::Tensor::on_host(
        engine_.device(), scores(from, batch, reference_ == config::Reference::adapter).weighted);
    return;
  }
  const std::vector<double>& all = answers == Answers::own ? values_->texts : values_->mismatched;
  const tensor::Tensor& numbers = batch.at("texts");
  const std::vector<std::int32_t> sides = sides_of(batch);
  std::vector<double> found(sides.size(), 0.0);
  for (std::size_t i = 0; i < sides.size(); ++i) {
    if (sides[i] == 0) continue;
    found[i] = all.at(static_cast<std::size_t>(numbers.data<std::int32_t>()[i]));
    if (std::isnan(found[i]))
      fail(ErrorKind::data, "'", file_.path().string(), "' has no log-probability of text ",
           numbers.data<std::int32_t>()[i], ": remove it, and begin the run anew");
  }
  batch["reference"] = tensor::Tensor::on_host(engine_.device(), found);
}

std::function<tensor::Batch()> PreferenceRun::begin_step(const std::function<tensor::Batch()>& next) {
  prepare_reference();
  auto batches = std::make_shared<Batches>();
  for (std::int64_t i = 0; i < engine_.gradient_accumulation_steps(); ++i) batches->push_back(next());
  engine_.preference_loss()->set_step(before(*batches));
  return [batches, i = std::size_t{0}]() mutable { return std::move(batches->at(i++)); };
}

PreferenceStep PreferenceRun::before(Batches& batches) {
  for (tensor::Batch& batch : batches) add_reference(batch, Answers::own);
  PreferenceStep out;
  if (engine_.config().has_baseline()) out.baseline = baseline(batches);
  if (engine_.preference_loss()->learns_chosen() &&
      engine_.config().training.loss_average == config::LossAverage::tokens)
    out.sft_scale = sft_scale(batches);
  if (engine_.preference_loss()->looks_at_partners()) add_partners(batches);
  return out;
}

/// The mean log-ratio of mismatched answers over the global batch, 0 at least.
double PreferenceRun::baseline(Batches& batches) {
  MetricSums sums(engine_.device());
  for (const tensor::Batch& each : batches) {
    sums.next_batch();
    tensor::Batch batch = mismatched_of(each);
    if (batch.empty()) continue;
    add_reference(batch, Answers::of_others);
    const std::vector<double> policy = scores(engine_, batch, false).weighted,
                              reference = numbers_of(batch, "reference", policy.size());
    const std::vector<std::int32_t> sides = sides_of(batch);
    for (std::size_t i = 0; i < sides.size(); ++i)
      if (sides[i] != 0) sums.add("kl", policy[i] - reference[i]);
  }
  const MetricMeans means = sums.means(engine_.data_ranks(), engine_.groups().group(comm::Axis::pipeline));
  const auto found = means.find("kl");
  return found == means.end() ? 0 : std::max(0.0, found->second);
}

/// So that the sum over pairs is the mean over all tokens of the step's chosen answers.
double PreferenceRun::sft_scale(const Batches& batches) const {
  MetricSums sums(engine_.device());
  for (const tensor::Batch& batch : batches) {
    sums.next_batch();
    const std::vector<std::int64_t> targets = targets_of(batch);
    for (const std::size_t i : pairs_of(sides_of(batch)))
      sums.add("targets", static_cast<double>(targets[i]));
  }
  const MetricMeans means = sums.means(engine_.data_ranks(), engine_.groups().group(comm::Axis::pipeline));
  const auto found = means.find("targets");
  return found == means.end() || found->second == 0 ? 0 : 1 / found->second;
}

/// Micro-batch by micro-batch of all data ranks, in their global order.
std::vector<std::vector<double>> PreferenceRun::of_all_ranks(
    const std::vector<std::vector<double>>& mine) const {
  std::vector<std::vector<std::vector<double>>> all;
  for (const auto& bits :
       comm::gather_lists(engine_.data_ranks(), engine_.device(), bits_of(mine), "scores of a step's pairs"))
    all.push_back(lists_of(bits));
  std::vector<std::vector<double>> out;
  for (std::size_t i = 0; i < mine.size(); ++i)
    for (const auto& of_rank : all) out.push_back(of_rank.at(i));
  return out;
}

/// Finds for each pair which lies as high among all of the step's.
void PreferenceRun::add_partners(Batches& batches) const {
  const std::vector<config::PreferenceTerm> terms = engine_.config().preference_terms();
  const bool unpaired = std::any_of(terms.begin(), terms.end(), [](const config::PreferenceTerm& term) {
    return term.loss == config::PreferenceLoss::aot_unpaired;
  });
  std::vector<std::vector<double>> first, second;  // of this rank's micro-batches
  for (const tensor::Batch& batch : batches) {
    const std::vector<double> policy = scores(engine_, batch, false).weighted,
                              reference = numbers_of(batch, "reference", policy.size());
    first.emplace_back(), second.emplace_back();
    for (const std::size_t i : pairs_of(sides_of(batch))) {
      first.back().push_back(unpaired ? policy[i] - reference[i] : policy[i] - policy[i + 1]);
      second.back().push_back(unpaired ? policy[i + 1] - reference[i + 1] : reference[i] - reference[i + 1]);
    }
  }
  const auto joined = [](const std::vector<std::vector<double>>& lists) {
    std::vector<double> out;
    for (const std::vector<double>& list : lists) out.insert(out.end(), list.begin(), list.end());
    return out;
  };
  const std::vector<std::vector<double>> all_first = of_all_ranks(first), all_second = of_all_ranks(second);
  const std::vector<double> a = joined(all_first), b = joined(all_second);
  const std::vector<double> of_first = of_same_rank(a, b), of_second = of_same_rank(b, a);
  const auto ranks = static_cast<std::size_t>(engine_.data_ranks().size()),
             rank = static_cast<std::size_t>(engine_.data_ranks().rank());
  std::size_t at = 0;
  for (std::size_t i = 0; i < all_first.size(); ++i) {
    if (i % ranks == rank) {
      tensor::Batch& batch = batches[i / ranks];
      const std::vector<std::int32_t> sides = sides_of(batch);
      std::vector<double> partners(sides.size(), 0.0);
      std::size_t pair = at;
      for (const std::size_t text : pairs_of(sides)) {
        partners[text] = of_first[pair];
        partners[text + 1] = of_second[pair];
        ++pair;
      }
      batch["partners"] = tensor::Tensor::on_host(engine_.device(), partners);
    }
    at += all_first[i].size();
  }
}

MetricMeans PreferenceRun::end_step() {
  MetricSums& sums = engine_.preference_loss()->sums();
  MetricMeans out = sums.means(engine_.data_ranks(), engine_.groups().group(comm::Axis::pipeline));
  sums.clear();
  if (const auto chosen = out.find("rewards/chosen"), rejected = out.find("rewards/rejected");
      chosen != out.end() && rejected != out.end())
    out.emplace("rewards/margins", chosen->second - rejected->second);  // kto's, of no pairs
  return out;
}

/// Where the loss's numbers are those of the whole pass all of it is there, as they are found.
PreferenceRun::Evaluated PreferenceRun::evaluate(data::Loader& loader) {
  prepare_reference();
  const std::int64_t count = loader.batches_per_epoch();
  loader.seek(0);
  const bool at_once = engine_.config().has_baseline() || engine_.preference_loss()->learns_chosen() ||
                       engine_.preference_loss()->looks_at_partners();
  Batches all;
  std::vector<std::int64_t> samples;
  for (std::int64_t i = 0; at_once && i < count; ++i) {
    data::CountedBatch each = loader.next_of_pass();
    all.push_back(std::move(each.batch)), samples.push_back(each.samples);
  }
  engine_.preference_loss()->set_step(at_once ? before(all) : PreferenceStep());
  engine_.preference_loss()->sums().clear();
  Evaluated out;
  std::size_t i = 0;
  const std::function<data::CountedBatch()> next = [&] {
    if (at_once) {
      const std::size_t at = i++;
      return data::CountedBatch{std::move(all.at(at)), samples.at(at)};
    }
    data::CountedBatch each = loader.next_of_pass();
    add_reference(each.batch, Answers::own);
    return each;
  };
  out.loss = engine_.eval_batches(next, count);
  out.metrics = end_step();
  return out;
}

// ---- precomputed log-probabilities ----

ReferenceFacts PreferenceRun::facts() const {
  const config::Config& config = engine_.config();
  return {.fingerprint = data_->fingerprint,
          .texts = data_->sequences(),
          .seq_length = config.model->seq_length,
          .packed = config.data->packing == config::SamplePacking::documents,
          .pairs = config.objective() != config::Objective::kto,
          .ld_alpha = config.training.preference.ld_alpha,
          .split = config.data->split,
          .mismatched = config.has_baseline()};
}

void PreferenceRun::save(ClientState& client) const {
  if (values_) client[client_key] = std::to_string(ReferenceFile::checksum(*values_));
}

void PreferenceRun::restore(const ClientState& client) {
  const auto found = client.find(client_key);
  restored_ = found == client.end() ? "" : found->second;
}

/// Rank 0 reads the file, so that all ranks have the same values, wherever they are.
void PreferenceRun::prepare_reference() {
  if (reference_ != config::Reference::precomputed || values_) return;
  require(data_ != nullptr, "precomputed log-probabilities are of a dataset");
  comm::Communicator& world = engine_.dist().world();
  std::string bytes;
  comm::gather_results(world, "reading the reference", [&] {
    if (speaks()) bytes = file_.bytes();
    return true;
  });
  bytes = comm::broadcast_text(world, std::move(bytes), 0, "the reference's log-probabilities");
  ReferenceValues read;
  std::string why;
  const bool there = !bytes.empty(), same = there && file_.read(bytes, facts(), read, why);
  if (engine_.global_steps() > 0) {
    const std::string name = file_.path().string();
    if (!same)
      fail(ErrorKind::config,
           "the reference's log-probabilities, which were computed as the run began, are not in '", name, "'",
           there ? cat(", which is of others (", why, ")") : "",
           ": bring that file back, or name it by training.preference.reference_file, or set "
           "training.preference.reference to \"copy\"");
    if (!restored_.empty() && restored_ != std::to_string(ReferenceFile::checksum(read)))
      fail(ErrorKind::config, "'", name,
           "' has other log-probabilities than those that the checkpoint was trained with: bring that file "
           "back, or name it by training.preference.reference_file");
    values_ = std::move(read);
    return;
  }
  if (same && agrees(read)) {
    values_ = std::move(read);
    if (speaks()) log_info("the reference's log-probabilities are in ", file_.path().string());
    return;
  }
  if (speaks() && there)
    log_info("'", file_.path().string(), "' is of another reference", why.empty() ? "" : cat(" (", why, ")"),
             " and is made anew");
  const auto on_rank_0 = [&](const char* label, const std::function<void()>& body) {
    comm::gather_results(world, label, [&] {
      if (speaks() && writes_) body();
      return true;
    });
  };
  on_rank_0("the reference's file", [&] { file_.require_writable(); });
  values_ = compute();
  on_rank_0("writing the reference", [&] { file_.write(facts(), *values_); });
}

/// Whether the model, which has not trained yet, finds the same for some texts, to the bit: others' weights,
/// or the same in another layout or dtype, do not.
bool PreferenceRun::agrees(const ReferenceValues& values) {
  const auto loader = data_->training_loader(engine_.loader_rank(), engine_.device());
  const tensor::Batch batch = loader->next();
  std::int32_t apart = 0;
  const auto compare = [&](const tensor::Batch& texts, const std::vector<double>& there) {
    const std::vector<double> found = scores(engine_, texts, false).weighted;
    const std::vector<std::int32_t> sides = sides_of(texts);
    for (std::size_t i = 0; i < sides.size(); ++i)
      if (sides[i] != 0 &&
          found[i] != there.at(static_cast<std::size_t>(texts.at("texts").data<std::int32_t>()[i])))
        apart = 1;
  };
  compare(batch, values.texts);
  if (!values.mismatched.empty()) compare(mismatched_of(batch), values.mismatched);
  comm::reduce_values(engine_.dist().world(), engine_.device(), std::span(&apart, 1),
                      "whether the reference is the same", comm::ReduceOp::max);
  return apart == 0;
}

ReferenceValues PreferenceRun::compute() {
  const bool both = facts().mismatched;
  const auto texts = static_cast<std::size_t>(facts().texts);
  ReferenceValues out{std::vector<double>(texts, 0.0), std::vector<double>(both ? texts : 0, 0.0)};
  std::vector<double> seen(texts, 0.0);
  if (speaks())
    log_info("the reference's log-probabilities of ", counted(facts().texts, "text"),
             " are computed before the first step, and kept in ", file_.path().string());
  const auto find = [&](const tensor::Batch& batch, std::vector<double>& values) {
    const std::vector<double> found = scores(engine_, batch, false).weighted;
    const std::vector<std::int32_t> sides = sides_of(batch);
    const auto* numbers = batch.at("texts").data<std::int32_t>();
    for (std::size_t text = 0; text < sides.size(); ++text)
      if (sides[text] != 0) {
        const auto at = static_cast<std::size_t>(numbers[text]);
        values[at] = found[text], seen[at] = 1;
      }
  };
  auto told = std::chrono::steady_clock::now();
  for (const auto& part : data_->parts) {
    data::TokenLoader loader(part, engine_.loader_rank(), engine_.device());
    const std::int64_t batches = loader.batches_per_epoch();
    for (std::int64_t i = 0; i < batches; ++i) {
      if (const auto now = std::chrono::steady_clock::now();
          speaks() && now - told > std::chrono::seconds(10)) {
        log_info("the reference: ", 100 * i / batches, " % of a part of the data");
        told = now;
      }
      const tensor::Batch batch = loader.next_of_pass().batch;
      find(batch, out.texts);
      if (both) find(mismatched_of(batch), out.mismatched);
    }
  }
  for (std::vector<double>* each : {&out.texts, &out.mismatched, &seen})
    if (!each->empty())
      comm::reduce_values(engine_.data_ranks(), engine_.device(), std::span(*each), "the reference's values");
  for (std::size_t i = 0; i < texts; ++i)
    if (seen[i] == 0) out.texts[i] = std::numeric_limits<double>::quiet_NaN();
  return out;
}

}  // namespace sherd::engine
