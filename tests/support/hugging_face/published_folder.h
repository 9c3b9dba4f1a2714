#pragma once

#include <gtest/gtest.h>

#include <filesystem>
#include <functional>
#include <map>
#include <string>

#include "config/config.h"
#include "models/gpt.h"
#include "models/hub/config_json.h"
#include "models/hub/hugging_face_weights.h"
#include "support/hugging_face/hugging_face_dict.h"
#include "support/places.h"
#include "support/temp_folder.h"
#include "tensor/safetensors/safetensors_folder.h"

// Folders of tiny models that transformers wrote (scripts/references/make_hugging_face_reference.py).

namespace sherd::models {

/// The folder of that family's.
inline std::filesystem::path folder_of(const std::string& family) {
  return std::filesystem::path(SHERD_SOURCE_DIR) / "tests/models/reference/hugging_face" / family;
}

/// The configuration that the folder's config.json describes.
inline config::Config config_in(const std::filesystem::path& folder) {
  const auto published = from_hugging_face(sherd::testing::read_text(folder / "config.json"), "config.json");
  return config::parse_text(config::section_of(published.model));
}

/// A copy of the family's folder that a test may change.
class Copy {
 public:
  explicit Copy(const std::string& family) {
    std::filesystem::copy(folder_of(family), path_ / "model", std::filesystem::copy_options::recursive);
    std::filesystem::remove(folder() / "expected.safetensors");
  }
  std::filesystem::path folder() const { return path_ / "model"; }
  /// Writes the tensors again; `change` gets each before.
  using Dict = std::map<std::string, HostTensor>;
  void rewrite(const std::function<void(Dict&)>& change) {
    Dict all;
    const tensor::SafetensorsFile file(folder() / "model.safetensors");
    for (const auto& entry : file.entries()) {
      HostTensor host{tensor::Shape{std::span<const std::int64_t>(entry.shape)}, *entry.dtype,
                      std::vector<std::byte>(entry.bytes)};
      file.read_bytes(entry, 0, host.bytes);
      all[entry.name] = std::move(host);
    }
    change(all);
    std::vector<tensor::SafetensorsSpec> specs;
    for (const auto& [name, host] : all) {
      const auto dims = host.shape.dims();
      specs.push_back({name, host.dtype, {dims.begin(), dims.end()}});
    }
    tensor::SafetensorsWriter writer(folder() / "model.safetensors", specs);
    for (const auto& [name, host] : all) writer.write(name, 0, host.bytes);
    writer.finish();
  }
  /// Puts one text of the header of model.safetensors in the place of another as long.
  void reword(const std::string& from, const std::string& to) {
    std::string bytes = sherd::testing::read_text(folder() / "model.safetensors");
    ASSERT_EQ(from.size(), to.size());
    ASSERT_NE(bytes.find(from), std::string::npos);
    sherd::testing::write_text(folder() / "model.safetensors",
                               bytes.replace(bytes.find(from), from.size(), to));
  }
  /// Reading the folder as the model that its config.json describes.
  void open() const {
    const config::Config config = config_in(folder());
    const GptConfig options = gpt_config(config, config.model->vocab_size);
    Gpt model(options);
    model.assign_names();
    HuggingFaceWeights(folder(), HuggingFaceLayout(options)).check(model.parameters());
  }

 private:
  sherd::testing::TempFolder path_;
};

}  // namespace sherd::models
