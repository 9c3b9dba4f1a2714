#pragma once

#include "config/adapter.h"
#include "config/model.h"
#include "config/reader.h"

// Sections that files of other programs have too, read there by the rows by which a configuration's are:
// models/hub reads Hugging Face's, PEFT's and AdapterHub's files.
namespace sherd::config {

/// Reads the keys of `model.rope_scaling`, and fills in what follows from those that were given.
void read_rope(RopeScaling& rope, const Value& section);
/// The keys that say something, as such a file has them.
Node written_rope(const RopeScaling& rope);

/// Reads a key of LoraKeys by one of its names.
void read_lora_key(LoraKeys& lora, const std::string& name, const Value& value);
/// Reads the keys of bottleneck adapters, and requires `needed` among them.
void read_bottleneck(BottleneckKeys& keys, const Value& section, const std::vector<const char*>& needed);
/// Whether bottleneck adapters have a key of that name.
bool has_bottleneck_key(const std::string& name);

/// Whether a value says that a feature is off: null, false, 0, "none" or empty.
bool is_off(const Node& node);

}  // namespace sherd::config
