#include "cli/other_head.h"

#include <vector>

namespace sherd::cli {
namespace {

class WithoutScores final : public nn::WeightSource {
 public:
  WithoutScores(std::unique_ptr<nn::WeightSource> source, NameThere there)
      : source_(std::move(source)), there_(std::move(there)) {}
  void check(const std::vector<nn::ParameterPtr>& parameters) const override {
    std::vector<nn::ParameterPtr> others;
    for (const nn::ParameterPtr& parameter : parameters)
      if (const std::optional<std::string> name = there_(parameter->name); name == parameter->name) {
        others.push_back(parameter);
      } else if (name) {
        const auto there = std::make_shared<autograd::Parameter>();
        there->name = *name, there->shape = parameter->shape, there->slice = parameter->slice;
        others.push_back(there);
      }
    source_->check(others);
  }
  bool has(const std::string& name) const override {
    const std::optional<std::string> there = there_(name);
    return there && source_->has(*there);
  }
  std::map<std::string, std::vector<float>> step_states() const override { return source_->step_states(); }
  void read(const std::string& name, const tensor::Slice& slice, std::int64_t begin,
            const tensor::Tensor& to) override {
    source_->read(there_(name).value(), slice, begin, to);
  }

 private:
  std::unique_ptr<nn::WeightSource> source_;
  NameThere there_;
};

bool is_of_pairs(const std::string& name) {
  return name.starts_with("pooler.") || name.starts_with("sentence_head.");
}

}  // namespace

bool scores_others(const models::GptConfig& options, const config::Model& source) {
  return source.labels != options.labels || source.head != options.head;
}

bool takes_pooler(const models::GptConfig& options, const config::Model& source) {
  return options.pools() && source.pairs_texts();
}

NameThere names_in(const models::GptConfig& options, const config::Model& source) {
  const models::GptConfig from{source};
  const bool pooler = takes_pooler(options, source), classifies = options.scores_texts(),
             same_layers =
                 options.has_head_dense() && from.has_head_dense() && options.pools() == from.pools(),
             from_labels = from.scores_texts();
  return [=](const std::string& name) -> std::optional<std::string> {
    constexpr std::string_view dense = "head_dense.";
    if (!models::is_of_head(name)) return name;
    if (pooler && name.starts_with(dense)) return "pooler." + name.substr(dense.size());
    if (is_of_pairs(name) || (!classifies && from_labels)) return std::nullopt;
    if (classifies && (name == "head.weight" || name == "head.bias" || !same_layers)) return std::nullopt;
    return name;
  };
}

std::unique_ptr<nn::WeightSource> without_scores(std::unique_ptr<nn::WeightSource> source, NameThere there) {
  return std::make_unique<WithoutScores>(std::move(source), std::move(there));
}

}  // namespace sherd::cli
