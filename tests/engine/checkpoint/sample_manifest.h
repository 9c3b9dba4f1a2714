#pragma once

#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "base/crc32c.h"
#include "engine/checkpoint.h"
#include "engine/checkpoint/checksum.h"
#include "engine/checkpoint/format.h"
#include "engine/checkpoint/safetensors.h"
#include "support/temp_folder.h"

namespace sherd::engine {

inline Manifest sample_manifest() {
  Manifest out;
  out.world_size = 2;
  out.micro_steps = 15, out.global_steps = 7, out.global_samples = 56, out.skipped_steps = 1;
  out.optimizer_steps = 6;
  out.save_id = "0123456789abcdef";
  out.lr = 0.003;
  out.scheduler = "5";
  out.loss_scaler = "scale=0x1p+16 iteration=7 last_overflow=2 hysteresis=1";
  out.compute_dtype = "bf16";
  out.config = "{\"train_batch_size\": 8}";
  out.data.position = 28;
  out.data.tokenizer = "byte";
  out.data.vocab_size = 257, out.data.tokens = 4096, out.data.sequences = 3,
  out.data.fingerprint = 4294967295u;
  out.client = {{"note", "ü \"quoted\"\n"}};
  out.shapes = {{"wte.weight", {256, 32}}, {"scalar", {}}};
  out.files = {{"rank_00000.safetensors", {1234, 17}}, {"rank_00001.safetensors", {777, 4294967295u}}};
  return out;
}

/// A changed manifest with the checksum of what it now says.
inline std::string sealed(std::string text) {
  const std::string key = ",\n \"crc32c\": ";
  text.erase(text.rfind(key));
  return cat(text, key, crc32c(text.data(), text.size()), "\n}\n");
}

/// As versions without checksum and save id wrote it.
inline std::string manifest_of_format_1(const Manifest& manifest = sample_manifest()) {
  std::string text = manifest.to_json();
  text.erase(text.rfind(",\n \"crc32c\""));
  text += "\n}\n";
  const std::size_t save = text.find("\"save\"");
  text.erase(save, text.find("\"world_size\"") - save);
  const std::size_t data = text.find("\"data\"");
  text.erase(data, text.find("\"config\"") - data);
  return text.replace(text.find("checkpoint-2"), 12, "checkpoint-1");
}

/// Writes the files of ranks in a checkpoint's folder anew, as versions without save ids did; what its
/// manifest must say then, the tokenizer's copy, which is removed, left out.
inline Manifest drop_save_ids(const std::filesystem::path& folder) {
  Manifest manifest = Manifest::from_json(testing::read_text(folder / "manifest.json"), "manifest.json");
  if (manifest.files.erase(tokenizer_file) > 0) std::filesystem::remove(folder / tokenizer_file);
  for (auto& [name, checksum] : manifest.files) {
    const SafetensorsFile file(folder / name);
    std::vector<SafetensorsSpec> specs;
    auto metadata = file.metadata();
    metadata.erase(save_id_key);
    for (const auto& entry : file.entries()) specs.push_back({entry.name, *entry.dtype, entry.shape});
    SafetensorsWriter writer(folder / "copy", specs, metadata);
    for (const auto& entry : file.entries()) {
      std::vector<std::byte> bytes(entry.bytes);
      file.read_bytes(entry, 0, bytes);
      writer.write(entry.name, 0, std::span<const std::byte>(bytes));
    }
    writer.finish();
    std::filesystem::rename(folder / "copy", folder / name);
    checksum = checksum_file(folder / name);
  }
  return manifest;
}

}  // namespace sherd::engine
