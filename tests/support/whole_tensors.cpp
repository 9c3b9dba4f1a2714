#include "support/whole_tensors.h"

#include <cstdint>
#include <cstring>
#include <nlohmann/json.hpp>

#include "tensor/formats/stored_format.h"

namespace sherd::testing {

std::map<std::string, std::vector<std::byte>> whole_tensors(const std::filesystem::path& folder) {
  using nlohmann::json;
  std::map<std::string, std::vector<std::byte>> out;
  const json manifest = json::parse(read_text(folder / "manifest.json"));
  for (const auto& [file, checksum] : manifest["files"].items()) {
    if (!file.ends_with(".safetensors")) continue;
    const std::string bytes = read_text(folder / file);
    std::uint64_t length = 0;
    std::memcpy(&length, bytes.data(), 8);
    const json header = json::parse(bytes.substr(8, length));
    for (const auto& [name, entry] : header.items()) {
      if (name == "__metadata__") continue;
      const std::string dtype = entry["dtype"], said = header["__metadata__"][name];
      const std::size_t size = dtype == "F32" || dtype == "U8" ? 4 : 2;
      const std::size_t from = entry["data_offsets"][0], end = entry["data_offsets"][1];
      // A number where all of the parameter is cut into runs; else blocks of each dimension.
      const json record = json::parse(said);
      const json shape = manifest["shapes"][name.substr(name.find('.') + 1)];
      std::vector<std::size_t> elements{0};  // of the slice, by logical index
      std::size_t numel = 1;
      for (std::size_t axis = 0; axis < shape.size(); ++axis) {
        const std::size_t extent = shape[axis];
        json blocks = json::array({json::array({0, extent})});
        if (record.is_object()) blocks = record["slice"][axis];
        std::vector<std::size_t> longer;
        for (const std::size_t before : elements)
          for (const json& block : blocks)
            for (std::size_t i = block[0]; i < block[1]; ++i) longer.push_back(before * extent + i);
        elements = longer;
        numel *= extent;
      }
      const std::size_t begin =
          record.is_object() ? record["begin"].get<std::size_t>() : record.get<std::size_t>();
      std::vector<std::byte>& whole = out[name];
      whole.resize(numel * size, std::byte{0xcc});
      if (dtype == "U8" && record.contains("format")) {
        const auto format = tensor::parse_stored_format(record["format"].get<std::string>()).value();
        const auto size_of = tensor::block_size(format);
        std::vector<float> values((end - from) / static_cast<std::size_t>(size_of.bytes) *
                                  static_cast<std::size_t>(size_of.elements));
        tensor::dequantize(format, reinterpret_cast<const std::byte*>(bytes.data() + 8 + length + from), 0,
                           values);
        for (std::size_t i = 0; i < values.size() && begin + i < elements.size(); ++i)
          std::memcpy(&whole.at(elements.at(begin + i) * 4), &values[i], 4);
        continue;
      }
      if (dtype == "U8") {  // 64 codes and a scale, the last block filled up
        const char* blocks = &bytes.at(8 + length + from);
        for (std::size_t i = 0; i < (end - from) / 68 * 64 && begin + i < elements.size(); ++i) {
          float scale;
          std::memcpy(&scale, blocks + i / 64 * 68 + 64, 4);
          const float value =
              static_cast<float>(static_cast<signed char>(blocks[i / 64 * 68 + i % 64])) * scale;
          std::memcpy(&whole.at(elements.at(begin + i) * 4), &value, 4);
        }
        continue;
      }
      for (std::size_t i = 0; i < (end - from) / size; ++i)
        std::memcpy(&whole.at(elements.at(begin + i) * size), &bytes.at(8 + length + from + i * size), size);
    }
  }
  return out;
}

}  // namespace sherd::testing
