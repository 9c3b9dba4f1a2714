#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "config/config.h"
#include "engine/checkpoint/checkpoint.h"
#include "engine/token_data.h"
#include "nn/module.h"

namespace sherd::engine {

/// Throws Error{data} naming both tokenizers where `tokens` were made with another one than the checkpoint's:
/// by kind, number of ids, and the model file's bytes where both are known.
void require_same_tokenizer(const CheckpointReader& reader, const TokenData& tokens);

/// Throws Error{config} naming both where `adapter` has prompts of other tasks, in another order or of
/// another length, than the checkpoint.
void require_same_prompts(const CheckpointReader& reader, const config::Adapter& adapter);

/// Throws Error{config} where an adapter is not to have the values of another's products and rows, `saved` in
/// `where`: rows of tokens are of other ids, or in another order, or the products began as another part of
/// the weights.
void require_same_adapter(const config::Adapter& saved, const config::Adapter& adapter,
                          const std::string& where);
/// The same for the adapter of the run that saved a checkpoint.
void require_same_adapter(const CheckpointReader& reader, const config::Adapter& adapter);

/// Throws Error{config} where a run that goes on would prune other weights of `model` than the one that saved
/// (training.sparsity): its checkpoint holds none to prune, or pruned ones that would not stay so.
void require_same_pruning(const CheckpointReader& reader, const nn::Module& model,
                          const config::Sparsity& sparsity);

/// How the ranks that saved differ from those here, in number or in how they share the model; empty: not.
std::string layout_change(const Manifest& saved, const comm::Grid& grid);

/// Tells how a run with `config` and `tokens` (null: samples of another kind) differs in what it trains from
/// the one that wrote the checkpoint: a line for each key and for the dataset.
std::vector<std::string> changes_since(const CheckpointReader& reader, const config::Config& config,
                                       const TokenData* tokens);

/// Logical shapes by name.
using ParameterShapes = std::map<std::string, std::vector<std::int64_t>>;
ParameterShapes shapes_of(const std::vector<nn::ParameterPtr>& parameters);

/// Throws Error{data} unless the checkpoint has exactly these parameters, in their logical shapes:
/// naming those that differ and, where `config` made the model, the keys of its `model` section that differ
/// from the saved run's. `config` may be null. `part`: which of the checkpoint's are meant, by name; null:
/// all.
void require_same_model(const CheckpointReader& reader, const ParameterShapes& shapes,
                        const config::Config* config,
                        const std::function<bool(const std::string&)>& part = nullptr);

}  // namespace sherd::engine
