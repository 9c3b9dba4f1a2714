#pragma once

#include <memory>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "base/arena.h"
#include "base/choices.h"
#include "models/hub/hugging_face.h"
#include "tensor/safetensors/safetensors_folder.h"

namespace sherd::models {

/// How an export writes matrices of linear layers in few bits.
class MatrixExport {
 public:
  virtual ~MatrixExport() = default;
  /// Whether a tensor of that parameter is written so; else as it is.
  virtual bool takes(const std::string& parameter, const PublishedTensor& tensor) const = 0;
  /// The tensors of the files that take its place.
  virtual std::vector<tensor::SafetensorsSpec> specs(const PublishedTensor& tensor) const = 0;
  /// Writes them. `values`: the tensor's, its rows being outputs. Throws Error{data} where one is not finite.
  virtual void write(tensor::SafetensorsFolderWriter& files, const PublishedTensor& tensor,
                     std::span<const float> values) = 0;
  /// The square root of what was rounded away, squared and summed, over the squares of all values.
  double error() const;
  /// The text of config.json with its section quantization_config. `plain`: matrices that are written as they
  /// are; `dtype`: torch's name of what others are written in.
  virtual std::string described(const std::string& config, const std::vector<std::string>& plain,
                                const std::string& dtype) const = 0;

 protected:
  /// Takes the values, and what is written for them, into error(). Returns the error of these alone.
  double count(std::span<const float> values, std::span<const float> stand_for);

 private:
  double rounded_away_ = 0, squares_ = 0;
};

/// Writes matrices in few bits, in the forms that low_bit_files.h reads and transformers loads: nf4, fp4 and
/// their double forms, and int8, as bitsandbytes; fp8 in squares of 128 x 128, with powers of two for scales;
/// mxfp4 as GPT-OSS has its experts. Values are rounded once, from fp32.
class LowBitExport final : public MatrixExport {
 public:
  /// `linear`: the names of parameters that are weights of linear layers. Throws Error{config} for a format
  /// in which the model's family is not published.
  LowBitExport(StoredFormat format, const GptConfig& model, std::set<std::string> linear);

  bool takes(const std::string& parameter, const PublishedTensor& tensor) const override;
  std::vector<tensor::SafetensorsSpec> specs(const PublishedTensor& tensor) const override;
  void write(tensor::SafetensorsFolderWriter& files, const PublishedTensor& tensor,
             std::span<const float> values) override;
  std::string described(const std::string& config, const std::vector<std::string>& plain,
                        const std::string& dtype) const override;

 private:
  void write_four_bits(tensor::SafetensorsFolderWriter& files, const PublishedTensor& tensor,
                       std::span<const float> values);
  void write_int8(tensor::SafetensorsFolderWriter& files, const PublishedTensor& tensor,
                  std::span<const float> values);
  void write_fp8(tensor::SafetensorsFolderWriter& files, const PublishedTensor& tensor,
                 std::span<const float> values);
  void write_mxfp4(tensor::SafetensorsFolderWriter& files, const PublishedTensor& tensor,
                   std::span<const float> values);
  std::vector<std::byte> quantized(const std::string& name, std::span<const float> values,
                                   StoredFormat format);

  StoredFormat format_, plain_format_;  ///< plain_format_: without double scales
  std::set<std::string> linear_;
  Arena arena_{1};
};

}  // namespace sherd::models
