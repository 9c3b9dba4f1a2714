#include "engine/checkpoint/writer.h"

#include <utility>

#include "base/crc32c.h"
#include "base/files.h"
#include "engine/checkpoint/checkpoint.h"
#include "tensor/safetensors/safetensors.h"

namespace sherd::engine {

using sharding::Piece;
using tensor::Tensor;

void for_each_tensor(const sharding::ShardedModel& model, FilePart part,
                     const std::function<void(FileTensor, const SavedState&, const Piece&)>& visit) {
  for_each_piece(model, Kinds::all, PieceUse::written,
                 [&](const SavedState& state, const autograd::Parameter& parameter, const Piece& piece) {
                   if ((state.kind == "frozen") != (part == FilePart::frozen)) return;
                   const std::string kind = state.over_replicas == optim::OverReplicas::own
                                                ? kind_of_replica(state.kind, state.replica)
                                                : state.kind;
                   visit({cat(kind, ".", parameter.name),
                          state.dtype,
                          state.in_file(piece.count),
                          {parameter.logical_slice(),
                           {piece.parameter_begin, piece.parameter_begin + piece.count},
                           state.format},
                          nullptr},
                         state, piece);
                 });
}

std::vector<FileTensor> live_tensors(const sharding::ShardedModel& model, device::Device& device,
                                     FilePart part) {
  std::vector<FileTensor> out;
  for_each_tensor(model, part, [&](FileTensor tensor, const SavedState& state, const Piece& piece) {
    tensor.elements = [&device, read = state.read, dtype = state.dtype, count = tensor.count,
                       begin = state.in_file(piece.flat_begin)](const FileTensor::Put& put) {
      in_chunks(device, dtype, count, [&](std::int64_t done, const Tensor& elements) {
        read(begin + done, elements);
        put(done, elements);
      });
    };
    out.push_back(std::move(tensor));
  });
  return out;
}

FileChecksum write_rank_file(const std::filesystem::path& path, const RankFile& file,
                             const std::string& save_id, const std::function<void()>& go_on) {
  std::vector<SafetensorsSpec> specs;
  std::map<std::string, std::string> metadata{{save_id_key, save_id}};
  for (const auto& [parameter, text] : file.learned) metadata[learned_prefix + parameter] = text;
  for (const FileTensor& tensor : file.tensors) {
    specs.push_back({tensor.name, tensor.dtype, {tensor.count}});
    metadata[tensor.name] = tensor.record.to_json();
  }
  SafetensorsWriter writer(path, std::move(specs), metadata);
  for (const FileTensor& tensor : file.tensors)
    tensor.elements([&](std::int64_t done, const Tensor& elements) {
      if (go_on) go_on();
      writer.write(tensor.name, done, elements);
    });
  return writer.finish();
}

void write_files(const std::filesystem::path& folder, const ExtraFiles& files, Manifest& manifest) {
  for (const auto& [name, bytes] : files) {
    write_file_atomically(folder / name, bytes);
    manifest.files[name] = {bytes.size(), crc32c(bytes.data(), bytes.size())};
  }
}

void write_tokenizer(const std::filesystem::path& folder, const TokenData* tokens, Manifest& manifest) {
  if (!tokens || tokens->tokenizer_model.empty()) return;
  write_files(folder, {{tokenizer_file_of(tokens->tokenizer), tokens->tokenizer_model}}, manifest);
}

std::string SaveAct::name() const {
  return cat(write ? "local " : "", "checkpoint ", tag);
}

std::string SaveAct::complete(std::span<const FileChecksum> sums, std::int64_t ordinal) {
  for (std::size_t of = 0; of < sums.size(); ++of) manifest.files[rank_file(static_cast<int>(of))] = sums[of];
  write_tokenizer(partial, tokens.get(), manifest);
  if (files) write_files(partial, *files, manifest);
  manifest.ordinal = ordinal;
  return manifest.to_json();
}

void SaveAct::publish(std::span<const FileChecksum> sums) {
  write_file_atomically(partial / "manifest.json", complete(sums, next_ordinal(folder->path())));
  folder->publish(partial, tag, options.best);
  if (options.keep_last > 0)
    remove_old_checkpoints(folder->path(), static_cast<std::size_t>(options.keep_last), tag);
}

}  // namespace sherd::engine
