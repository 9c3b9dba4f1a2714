#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "base/crc32c.h"
#include "engine/checkpoint/checkpoint.h"
#include "engine/checkpoint/format.h"

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
  text.erase(std::min(text.rfind(key), text.size()));
  return cat(text, key, crc32c(text.data(), text.size()), "\n}\n");
}

/// The same text, of another format.
inline std::string in_format(std::string text, int format) {
  return text.replace(text.find(checkpoint_format), checkpoint_format.size(), cat(format_prefix, format));
}

}  // namespace sherd::engine
