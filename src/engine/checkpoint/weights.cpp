#include "engine/checkpoint/weights.h"

#include <algorithm>
#include <functional>
#include <span>

#include "base/files.h"
#include "engine/checkpoint/format.h"
#include "engine/checkpoint/same_run.h"
#include "engine/checkpoint/save_folder.h"
#include "engine/checkpoint/states.h"
#include "engine/checkpoint/writer.h"
#include "sharding/segment.h"
#include "tensor/formats/stored_format.h"
#include "tensor/host_values.h"

namespace sherd::engine {
namespace fs = std::filesystem;

using tensor::Tensor;

void CheckpointWeights::check(const std::vector<nn::ParameterPtr>& parameters) const {
  require_same_model(reader_, shapes_of(parameters), nullptr, part_);
}

void CheckpointWeights::read(const std::string& name, const tensor::Slice& slice, std::int64_t begin,
                             const Tensor& to) {
  // A parameter that is frozen here may have been trained there, and the reverse.
  const bool trained = reader_.holds("fp32", name);
  const char* kind = trained ? "fp32" : "frozen";
  DType dtype = trained ? DType::f32 : parse_dtype(reader_.manifest().compute_dtype).value();
  if (reader_.dtype(kind, name) == DType::u8) dtype = DType::f32;
  if (dtype == to.dtype()) return reader_.read(kind, name, slice, begin, to);
  const Tensor stored = Tensor::on_host(device_, {to.numel()}, dtype);
  reader_.read(kind, name, slice, begin, stored);
  const auto bytes = [](const Tensor& t) {
    return std::span(t.raw(), static_cast<std::size_t>(t.numel()) * size_of(t.dtype()));
  };
  if (trained && dtype == DType::f32 && to.dtype() == DType::bf16) {  // as training rounds its masters
    std::transform(stored.data<float>(), stored.data<float>() + stored.numel(), to.data<bf16>(),
                   round_master_to_bf16);
    return;
  }
  tensor::convert_values(bytes(stored), dtype, bytes(to), to.dtype());
}

std::map<std::string, std::vector<float>> CheckpointWeights::step_states() const {
  return reader_.manifest().step_states;
}

namespace {

tensor::Slice whole_of(const std::vector<std::int64_t>& shape) {
  return tensor::Slice::whole(tensor::Shape{std::span<const std::int64_t>(shape)});
}

/// Gives `count` elements from one on, in the type of the tensor: numbers, or the bytes of their blocks.
using ReadElements = std::function<void(std::int64_t begin, std::int64_t count, const Tensor& to)>;

/// A tensor KIND.PARAMETER of a file, of elements that follow each other in the logical tensor.
FileTensor file_tensor(const CheckpointTensor& of, PieceRecord record, ReadElements read,
                       device::Device& device) {
  const tensor::Range range = record.elements;
  record.format = of.format;
  const auto in_file = [format = of.format](std::int64_t elements) {
    return format == StoredFormat::compute ? elements : tensor::stored_bytes(format, elements);
  };
  FileTensor out{cat(of.kind, ".", of.parameter), of.dtype, in_file(range.size()), std::move(record),
                 nullptr};
  out.elements = [&device, range, in_file, dtype = of.dtype,
                  read = std::move(read)](const FileTensor::Put& put) {
    const Tensor chunk = Tensor::on_host(device, {in_file(std::min(most_at_once, range.size()))}, dtype);
    for (std::int64_t done = 0; done < range.size(); done += most_at_once) {
      const std::int64_t count = std::min(most_at_once, range.size() - done);
      const Tensor elements = chunk.range(0, in_file(count));
      read(range.begin + done, count, elements);
      put(in_file(done), elements);
    }
  };
  return out;
}

/// Reads a checkpoint's elements. Blocks stay as they are where the files hold them whole; else their values
/// are quantised anew.
ReadElements elements_of(const CheckpointReader& reader, const CheckpointTensor& t,
                         const tensor::Slice& slice, device::Device& device) {
  return [&reader, &device, t, slice](std::int64_t begin, std::int64_t count, const Tensor& to) {
    if (t.format == StoredFormat::compute) return reader.read(t.kind, t.parameter, slice, begin, to);
    if (reader.read_blocks(t.kind, t.parameter, slice, begin, count, to)) return;
    const Tensor values = Tensor::on_host(device, {count}, DType::f32);
    reader.read(t.kind, t.parameter, slice, begin, values);
    if (!tensor::quantize(t.format, {values.data<float>(), static_cast<std::size_t>(count)}, to.raw(),
                          device.arena()))
      fail(ErrorKind::data, reader.folder().string(), ": '", t.kind, ".", t.parameter,
           "' holds values that are infinite or no numbers, of which no blocks can be made: take another "
           "checkpoint, or begin anew from its weights");
  };
}

/// DIR/latest is where a run goes on: it may move ahead, to a checkpoint from which one can.
void require_no_later_run(const fs::path& base, const Manifest& manifest, bool states) {
  std::error_code error;
  if (!fs::exists(base / "latest", error)) return;
  const CheckpointReader latest(checkpoint_folder(base));
  const auto there = latest.tensors();
  const bool resumable = std::any_of(there.begin(), there.end(), [](const CheckpointTensor& t) {
    return t.kind != "fp32" && t.kind != "frozen";
  });
  if (resumable && (!states || manifest.global_steps < latest.manifest().global_steps))
    fail(ErrorKind::io, "'", base.string(), "' holds the checkpoints of a run, the latest of step ",
         latest.manifest().global_steps,
         ", from which --resume could not go on any more: name another folder");
}

/// Calls `write` for the folder that becomes DIR/TAG, with the manifest to which it adds its files.
void publish_offline(const fs::path& directory, const std::string& tag, Manifest manifest, bool states,
                     const std::function<void(const fs::path& partial, Manifest& manifest)>& write) {
  require_good_tag(tag);
  const fs::path base = fs::absolute(directory);
  require_replaceable(base / tag);
  require_no_later_run(base, manifest, states);
  const SaveFolder folder(base);
  manifest.save_id = new_save_id();
  const fs::path partial = partial_folder(base, tag, manifest.save_id);
  std::error_code error;
  if (!fs::create_directory(partial, error))
    fail(ErrorKind::io, "cannot create '", partial.string(), "': ", error.message());
  try {
    write(partial, manifest);
    write_file_atomically(partial / "manifest.json", manifest.to_json());
    folder.publish(partial, tag);
  } catch (...) {
    remove_folder(partial);
    throw;
  }
}

}  // namespace

void write_weights(const fs::path& directory, const std::string& tag, Manifest manifest,
                   const std::vector<nn::ParameterPtr>& parameters, nn::WeightSource& weights,
                   const ExtraFiles& files, device::Device& device) {
  manifest.world_size = 1;
  manifest.shapes = shapes_of(parameters);
  manifest.step_states = weights.step_states();
  const auto kernels = tensor::make_kernels(device);
  RankFile file;
  for (const nn::ParameterPtr& parameter : parameters) {
    const tensor::Slice slice = whole_of(manifest.shapes.at(parameter->name));
    const auto read = [&weights, &kernels, parameter, slice](std::int64_t begin, std::int64_t,
                                                             const Tensor& to) {
      if (weights.has(parameter->name))
        weights.read(parameter->name, slice, begin, to);
      else
        sharding::draw_initial(*parameter, to, begin, config::Training().seed, *kernels);
    };
    file.tensors.push_back(
        file_tensor({"fp32", parameter->name, DType::f32}, {slice, {0, slice.numel()}}, read, device));
  }
  publish_offline(directory, tag, std::move(manifest), false, [&](const fs::path& partial, Manifest& made) {
    made.files[rank_file(0)] = write_rank_file(partial / rank_file(0), file, made.save_id);
    write_files(partial, files, made);
  });
}

void copy_checkpoint(const CheckpointReader& reader, const fs::path& directory, const std::string& tag,
                     int ranks, bool weights_only, device::Device& device) {
  Manifest manifest = reader.manifest();
  const int saved_ranks = manifest.world_size;
  for (int rank = 0; rank < saved_ranks; ++rank)
    manifest.files.erase(rank_file(rank)), manifest.files.erase(frozen_file(rank));
  manifest.frozen_id.clear();
  const std::map<std::string, FileChecksum> extra = manifest.files;
  manifest.world_size = ranks;
  manifest.grid = {{"data", ranks}};
  publish_offline(
      directory, tag, std::move(manifest), !weights_only, [&](const fs::path& partial, Manifest& made) {
        for (int rank = 0; rank < ranks; ++rank) {
          RankFile trained, frozen;
          if (!weights_only) trained.learned = reader.learned();
          for (const CheckpointTensor& t : reader.tensors()) {
            if (weights_only && t.kind != "fp32" && t.kind != "frozen") continue;
            const tensor::Slice slice = whole_of(made.shapes.at(t.parameter));
            const bool in_blocks = t.format != StoredFormat::compute;
            const std::int64_t n = slice.numel(),
                               block = in_blocks ? tensor::block_size(t.format).elements : 1,
                               blocks = (n + block - 1) / block;
            const auto until = [&](int of) { return std::min(n, blocks * of / ranks * block); };
            (t.kind == "frozen" ? frozen : trained)
                .tensors.push_back(file_tensor(t, {slice, {until(rank), until(rank + 1)}},
                                               elements_of(reader, t, slice, device), device));
          }
          made.files[rank_file(rank)] = write_rank_file(partial / rank_file(rank), trained, made.save_id);
          if (frozen.tensors.empty()) continue;
          made.frozen_id = made.save_id;
          made.files[frozen_file(rank)] = write_rank_file(partial / frozen_file(rank), frozen, made.save_id);
        }
        for (const auto& [name, checksum] : extra) {
          reader.verify(name);
          fs::copy_file(reader.folder() / name, partial / name);
        }
      });
}

}  // namespace sherd::engine
