#pragma once

#include <array>
#include <filesystem>
#include <span>
#include <vector>

#include "models/hub/hugging_face.h"
#include "models/hub/low_bit_files.h"
#include "nn/weight_source.h"
#include "tensor/safetensors/safetensors_folder.h"

namespace sherd::models {

/// The weights of a Gpt in a folder of Hugging Face's transformers, read as they are asked for: nothing is
/// held but the matrix at hand, twice for a moment, where the files have it transposed, or of another dtype a
/// small part of it. Matrices may be there in few bits (low_bit_files.h), and experts each in tensors of
/// their own, or stacked (HuggingFaceLayout::take_stacked_experts).
class HuggingFaceWeights : public nn::WeightSource {
 public:
  /// Opens the files (SafetensorsFolder). `layout`: of the model that is to have them. `stem`: of the files'
  /// names, "adapter_model" of an adapter's parameters as PEFT keeps them.
  HuggingFaceWeights(std::filesystem::path folder, HuggingFaceLayout layout,
                     const std::string& stem = "model");

  /// Beside what WeightSource says, tensors that are not the model's are an error, but for buffers that
  /// older files carry (attn.bias, attn.masked_bias, rotary_emb.inv_freq), and for a head that is stored
  /// beside the table that it is tied to, which must be equal to it.
  void check(const std::vector<nn::ParameterPtr>& parameters) const override;
  /// False for the layers of an encoder's head that the files lack.
  bool has(const std::string& name) const override;
  void read(const std::string& name, const tensor::Slice& slice, std::int64_t begin,
            const tensor::Tensor& to) override;
  std::map<std::string, std::vector<float>> step_states() const override;

 private:
  std::string found_as(const std::string& name) const;
  std::vector<std::pair<std::string, PublishedTensor>> states() const;
  void read_low_bits(const PublishedTensor& tensor, std::int64_t first, std::span<std::byte> to, DType dtype);
  void read_elements(const PublishedTensor& tensor, std::int64_t first, std::span<std::byte> to, DType dtype);
  std::span<const std::byte> turned(const PublishedTensor& tensor);
  void require_tied(const std::string& head, const std::string& table) const;

  tensor::SafetensorsFolder files_;
  HuggingFaceLayout layout_;
  bool has_states_;        ///< the files are a model's, not an adapter's
  std::string text_part_;  ///< the beginning of the text part's names, where files have other parts too
  bool prefixed_ = false;
  std::string table_is_head_;  ///< the published table's name, where the files have the head in its place
  std::unique_ptr<LowBitMatrix> low_bits_;  ///< the last matrix that was asked for; null: it is in none
  std::string low_bits_name_;
  std::vector<std::byte> part_;  ///< as the file has it
  /// Tensors in the file's dtype that lie there otherwise: the transposed one of that name and place; or all
  /// that take turns in the one of that name, one behind the other.
  struct Turned {
    std::string name;
    std::int64_t place = 0;
    std::vector<std::byte> values;
  };
  std::array<Turned, 2> turned_;  ///< the last two that were asked for: experts' take turns in two tensors
  std::size_t last_turned_ = 0;
};

class MatrixExport;

/// How export_to_hugging_face() writes.
struct ExportOptions {
  DType dtype = DType::bf16;  ///< fp32, bf16 or fp16
  std::uint64_t shard_bytes = std::uint64_t{5} << 30;
  std::string stem = "model";        ///< begins the files' names
  MatrixExport* low_bits = nullptr;  ///< how matrices in few bits are written; null: there are none
};

/// Writes the weights of `parameters`, all of a Gpt's in their order, or all of its adapter's, as
/// model.safetensors or shards of it into a folder that is there; of a tied table once. Holds one matrix at a
/// time, twice, where it is transposed, else a part of it. Returns the number of shards.
std::size_t export_to_hugging_face(const std::filesystem::path& folder, const HuggingFaceLayout& layout,
                                   const std::vector<nn::ParameterPtr>& parameters, nn::WeightSource& weights,
                                   device::Device& device, const ExportOptions& options = {});

}  // namespace sherd::models
