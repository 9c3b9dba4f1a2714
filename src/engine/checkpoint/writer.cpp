#include "engine/checkpoint/writer.h"

#include <map>
#include <vector>

#include "base/atomic_file.h"
#include "base/crc32c.h"
#include "engine/checkpoint/format.h"
#include "engine/checkpoint/states.h"
#include "tensor/safetensors.h"

namespace sherd::engine {

using sharding::Piece;
using tensor::Tensor;

void write_rank_file(const std::filesystem::path& path, const sharding::ShardedModel& model,
                     device::Device& device, const std::string& save_id,
                     const std::map<std::string, std::string>& learned) {
  std::vector<SafetensorsSpec> specs;
  std::map<std::string, std::string> metadata{{save_id_key, save_id}};
  for (const auto& [parameter, text] : learned) metadata[learned_prefix + parameter] = text;
  const auto each = [&](const auto& visit) {
    for_each_piece(model, Kinds::all, Extent::written,
                   [&](const SavedState& state, const autograd::Parameter& parameter, const Piece& piece) {
                     const std::string kind = state.held == optim::Held::by_each
                                                  ? kind_of_replica(state.kind, state.replica)
                                                  : state.kind;
                     visit(state, kind + "." + parameter.name, parameter, piece);
                   });
  };
  each([&](const SavedState& state, const std::string& name, const autograd::Parameter& parameter,
           const Piece& piece) {
    specs.push_back({name, state.dtype, {piece.count}});
    const PieceRecord record{parameter.logical_slice(),
                             {piece.parameter_begin, piece.parameter_begin + piece.count}};
    metadata[specs.back().name] = record.to_json();
  });
  SafetensorsWriter writer(path, std::move(specs), metadata);
  each([&](const SavedState& state, const std::string& name, const autograd::Parameter&, const Piece& piece) {
    in_chunks(device, state.dtype, piece.count, [&](std::int64_t done, const Tensor& elements) {
      state.read(piece.flat_begin + done, elements);
      writer.write(name, done, elements);
    });
  });
  writer.finish();
}

void write_tokenizer(const std::filesystem::path& folder, const TokenData* tokens, Manifest& manifest) {
  if (!tokens || tokens->tokenizer_model.empty()) return;
  const std::string& bytes = tokens->tokenizer_model;
  write_file_atomically(folder / tokenizer_file, bytes);
  manifest.files[tokenizer_file] = {bytes.size(), crc32c(bytes.data(), bytes.size())};
}

}  // namespace sherd::engine
