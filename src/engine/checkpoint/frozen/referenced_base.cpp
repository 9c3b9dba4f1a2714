#include "engine/checkpoint/frozen/referenced_base.h"

#include <algorithm>
#include <filesystem>
#include <vector>

#include "engine/checkpoint/checkpoint.h"
#include "engine/checkpoint/format.h"
#include "tensor/formats/stored_format.h"
#include "tensor/host_values.h"

namespace sherd::engine {
namespace fs = std::filesystem;

using tensor::Tensor;

namespace {

BaseOpener& opener() {
  static BaseOpener set;
  return set;
}

OpenedBase opened(const CheckpointReader& reader) {
  const BaseReference& base = reader.manifest().base.value();
  for (const auto& [name, sum] : base.files) check_base_file(reader, name, false);
  if (!opener())
    fail(ErrorKind::config, "checkpoint ", reader.folder().string(), " refers to the weights in '",
         base.folder,
         "' (training.adapter.save_base), which this program does not open: see engine::set_base_opener()");
  return opener()(reader);
}

}  // namespace

void check_base_file(const CheckpointReader& reader, const std::string& name, bool contents) {
  const BaseReference& base = reader.manifest().base.value();
  const fs::path path = fs::path(base.folder) / name;
  FileChecksum wanted = base.files.at(name), found;
  std::error_code error;
  found.bytes = fs::file_size(path, error);
  if (error)
    fail(ErrorKind::io, "checkpoint ", reader.folder().string(),
         " was saved without its base, and refers to '", path.string(), "', which is not there (",
         error.message(),
         "): put it there again, or a link to where it is; what trained is whole: `sherd export --adapter`");
  if (contents)
    found = checksum_file(path);
  else
    wanted.crc32c = 0;
  if (found != wanted)
    fail(ErrorKind::data, "'", path.string(), "' has ", found.bytes, " bytes",
         contents ? cat(" with CRC-32C ", found.crc32c) : "", ", and had ", wanted.bytes,
         contents ? cat(" with ", wanted.crc32c) : "", " when checkpoint ", reader.folder().string(),
         " referred to it: it is not the base that was trained beside. Put that there again, or begin a new "
         "run from these weights, with this checkpoint as training.adapter.init_from");
}

void set_base_opener(BaseOpener to) {
  opener() = std::move(to);
}

ReferencedBase::ReferencedBase(const CheckpointReader& reader) : opened_(opened(reader)) {}

StoredFormat ReferencedBase::format_of(const std::string& parameter) const {
  const auto found = opened_.formats.find(parameter);
  return found == opened_.formats.end() ? StoredFormat::compute : found->second;
}

void ReferencedBase::read_blocks(const std::string& parameter, const tensor::Slice& slice, std::int64_t begin,
                                 std::int64_t count, const Tensor& to) const {
  device::Device& device = *opened_.processor;
  const StoredFormat format = format_of(parameter);
  const Tensor values = Tensor::on_host(device, {count}, DType::f32);
  opened_.weights->read(parameter, slice, begin, values);
  if (!tensor::quantize(format, {values.data<float>(), static_cast<std::size_t>(count)}, to.raw(),
                        device.arena()))
    fail(ErrorKind::data, "'", parameter, "' of the base holds values that are infinite or no numbers");
}

void ReferencedBase::read(const std::string& parameter, const tensor::Slice& slice, std::int64_t begin,
                          const Tensor& to) const {
  const StoredFormat format = format_of(parameter);
  if (format == StoredFormat::compute) return opened_.weights->read(parameter, slice, begin, to);
  const std::int64_t block = tensor::block_size(format).elements, first = begin / block * block,
                     end = std::min(slice.numel(), (begin + to.numel() + block - 1) / block * block);
  device::Device& device = *opened_.processor;
  const Tensor blocks = Tensor::on_host(device, {tensor::stored_bytes(format, end - first)}, DType::u8);
  read_blocks(parameter, slice, first, end - first, blocks);
  std::vector<float> values(static_cast<std::size_t>(to.numel()));
  tensor::dequantize(format, reinterpret_cast<const std::byte*>(blocks.raw()), begin - first, values);
  tensor::convert_values(std::as_bytes(std::span(values)), DType::f32, {to.raw(), to.bytes()}, to.dtype());
}

}  // namespace sherd::engine
