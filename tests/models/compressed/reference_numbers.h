#pragma once

#include <cstring>
#include <filesystem>
#include <set>
#include <string>
#include <vector>

#include "models/gpt.h"
#include "models/hub/config_json.h"
#include "models/hub/hugging_face_weights.h"
#include "support/cpu_fixture.h"
#include "support/places.h"
#include "support/temp_folder.h"
#include "tensor/safetensors/safetensors.h"

namespace sherd::test {

/// A file of scripts/references/make_compressed_reference.py.
class Numbers {
 public:
  explicit Numbers(const std::string& name)
      : file_(std::filesystem::path(SHERD_SOURCE_DIR) / "tests/models/compressed/reference" / name) {}

  const std::vector<std::int64_t>& shape(const std::string& name) const { return file_.at(name).shape; }
  template <class T>
  std::vector<T> of(const std::string& name) const {
    const tensor::SafetensorsEntry& entry = file_.at(name);
    std::vector<T> out(entry.bytes / sizeof(T));
    file_.read_bytes(entry, 0, std::as_writable_bytes(std::span(out)));
    return out;
  }

 private:
  tensor::SafetensorsFile file_;
};

/// A family's tiny model in published files.
struct PublishedModel {
  explicit PublishedModel(const std::string& family)
      : folder(std::filesystem::path(SHERD_SOURCE_DIR) / "tests/models/reference/hugging_face" / family),
        config(testing::read_text(folder / "config.json")),
        options(models::GptConfig{models::from_hugging_face(config, "config.json").model}.resolved()),
        model(options),
        layout(options),
        weights(folder, layout) {
    model.assign_names();
    for (const auto& weight : model.linear_weights()) linear.insert(weight->name);
  }

  Cpu cpu{2};
  std::filesystem::path folder;
  std::string config;
  models::GptConfig options;
  models::Gpt model;
  models::HuggingFaceLayout layout;
  models::HuggingFaceWeights weights;
  std::set<std::string> linear;
};

}  // namespace sherd::test
