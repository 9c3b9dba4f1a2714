#pragma once

#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "base/crc32c.h"
#include "engine/checkpoint/checkpoint.h"
#include "engine/checkpoint/checksum.h"
#include "engine/checkpoint/format.h"
#include "support/temp_folder.h"
#include "tensor/safetensors/safetensors.h"

namespace sherd::engine {

inline Manifest sample_manifest() {
  Manifest out;
  out.world_size = 2;
  out.grid = {{"data", 2}};
  out.micro_steps = 15, out.global_steps = 7, out.global_samples = 56, out.skipped_steps = 1;
  out.optimizer_steps = 6;
  out.save_id = "0123456789abcdef";
  out.lr = {0.003};
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

/// The same text, of another format.
inline std::string in_format(std::string text, int from, int to) {
  const std::string name = cat(format_prefix, from);
  return text.replace(text.find(name), name.size(), cat(format_prefix, to));
}

/// Without what stands between the keys `from` and `to`, the second of which stays.
inline std::string without(std::string text, const std::string& from, const std::string& to) {
  const std::size_t at = text.find(cat("\"", from, "\""));
  return text.erase(at, text.find(cat("\"", to, "\"")) - at);
}

/// As versions without slices wrote it.
inline std::string manifest_of_format_2(const Manifest& manifest = sample_manifest()) {
  return sealed(in_format(without(manifest.to_json(), "grid", "compute_dtype"), newest_format, 2));
}

/// As versions without checksum and save id wrote it.
inline std::string manifest_of_format_1(const Manifest& manifest = sample_manifest()) {
  std::string text = without(without(manifest_of_format_2(manifest), "save", "world_size"), "data", "config");
  text.erase(text.rfind(",\n \"crc32c\""));
  text += "\n}\n";
  return in_format(text, 2, 1);
}

/// Writes the files of ranks in a checkpoint's folder anew, as versions without slices did, in format 1
/// without save ids too; what its manifest must say then, in format 1 without the tokenizer's copy, which is
/// removed.
inline Manifest to_older_format(const std::filesystem::path& folder, int format) {
  Manifest manifest = Manifest::from_json(testing::read_text(folder / "manifest.json"), "manifest.json");
  if (format == 1)
    if (manifest.files.erase(tokenizer_file) > 0) std::filesystem::remove(folder / tokenizer_file);
  for (auto& [name, checksum] : manifest.files) {
    const SafetensorsFile file(folder / name);
    std::vector<SafetensorsSpec> specs;
    auto metadata = file.metadata();
    if (format == 1) metadata.erase(save_id_key);
    for (const auto& entry : file.entries()) {
      specs.push_back({entry.name, *entry.dtype, entry.shape});
      const std::string parameter = entry.name.substr(entry.name.find('.') + 1);
      metadata[entry.name] = std::to_string(
          PieceRecord::parse(metadata[entry.name], manifest, parameter, entry.numel()).elements.begin);
    }
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
