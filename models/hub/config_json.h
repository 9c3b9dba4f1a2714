#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "config/model.h"

// config.json of Hugging Face's transformers, for the families in models/families.
namespace sherd::models {

/// A model that a published config.json describes.
struct PublishedModel {
  config::Model model;             ///< `seq_length` is the longest sequence that it takes
  std::vector<std::string> notes;  ///< keys without effect here that someone might miss
  std::string dtype;  ///< the weights' type, "float32", "bfloat16", …; empty: the file does not say
};

/// Reads a config.json; `name` stands for the file in errors. Keys of transformers 4 and 5 are known; an
/// absent one has its class's default. Throws Error{config} naming every key that would change what the model
/// computes and that Sherd does not have, and every one that it does not know.
PublishedModel from_hugging_face(std::string_view text, const std::string& name);

/// The family as which a model is published: `model.type`, where its class can say all of the model, else the
/// first whose class can. Throws Error{config} naming what none of them has.
config::ModelType published_as(const config::Model& model);

/// The model as a config.json that transformers 4 and 5 read, laid over `original`, the text of one that it
/// came from (may be empty), whose other keys stay. `vocab_size`: token ids, without rows that pad; `dtype`:
/// of the weights ("bfloat16"). Throws as published_as() does.
std::string to_hugging_face(const config::Model& model, std::int64_t vocab_size, std::string_view dtype,
                            std::string_view original = {});

}  // namespace sherd::models
