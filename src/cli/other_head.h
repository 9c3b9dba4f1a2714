#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "config/model.h"
#include "models/gpt_config.h"
#include "nn/weight_source.h"

// Weights of a model with the same blocks and another head.
namespace sherd::cli {

/// The name that a parameter has in other weights; nothing where it begins anew.
using NameThere = std::function<std::optional<std::string>(const std::string& name)>;

/// Whether a model begins from one that has other labels, or another kind of head.
bool scores_others(const models::GptConfig& options, const config::Model& source);

/// Whether a classifier takes the pooler of a model that learns pairs of texts.
bool takes_pooler(const models::GptConfig& options, const config::Model& source);

/// Names for a model whose head takes over from `source` what it can. These layers begin anew: those that
/// score pairs of texts; in a classifier the layer that scores labels, and the rest of the head where the
/// heads' layers differ; in any other model the whole head where `source` is a classifier.
NameThere names_in(const models::GptConfig& options, const config::Model& source);

/// The weights of `source`, without those of its head that are of no use here.
std::unique_ptr<nn::WeightSource> without_scores(std::unique_ptr<nn::WeightSource> source, NameThere there);

}  // namespace sherd::cli
