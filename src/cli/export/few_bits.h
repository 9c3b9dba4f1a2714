#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/choices.h"
#include "cli/command_line.h"
#include "engine/report/progress.h"
#include "models/hub/compressed_export.h"

namespace sherd::cli {

/// How an export writes the weights of linear layers in few bits.
struct FewBits {
  StoredFormat format = StoredFormat::compute;           ///< --format; compute: as the others
  std::optional<models::CompressedScheme> compressed{};  ///< --quantize
  std::string calibrate{};                 ///< the dataset's prefix; empty: values are rounded to nearest
  std::int64_t sequences = 0, length = 0;  ///< of its texts; length 0: the model's

  explicit operator bool() const { return format != StoredFormat::compute || compressed; }
};

/// Declares --quantize and what goes with it.
void add_quantize_options(CommandLine& line);
/// Reads --format, unless it is gguf, --quantize and what goes with them. `dtype`: of other weights.
FewBits few_bits_of(const CommandLine& line, bool of_adapter, DType dtype);

/// Writes so while a model is exported, and keeps what it changed.
class FewBitsExport {
 public:
  /// All outlive it. Throws Error{config} for a model that has no such form, Error{io} or Error{data} for
  /// texts that cannot be read.
  FewBitsExport(const FewBits& how, models::Gpt& model, const models::HuggingFaceLayout& layout,
                nn::WeightSource& weights);
  ~FewBitsExport();

  /// Null: nothing is written so.
  models::MatrixExport* form() const { return form_.get(); }
  /// It reads all of the weights itself, too, and shows how far it is.
  bool calibrates() const { return calibration_ != nullptr; }
  /// The text of config.json, which tells of the form.
  std::string described(const std::string& config, const std::string& dtype) const;
  /// Rows of what was compressed.
  const std::vector<models::CompressedLayer>& layers() const { return layers_; }
  /// Warns of layers that calibration did not see.
  void warn() const;

 private:
  void tell(const models::CompressedLayer& layer);
  std::vector<std::string> left_whole() const;

  const FewBits& how_;
  models::Gpt& model_;
  const models::HuggingFaceLayout& layout_;
  std::shared_ptr<device::Device> device_;  ///< calibration's, with all cores
  engine::WorkBar bar_;
  std::unique_ptr<models::Calibration> calibration_;
  std::unique_ptr<models::MatrixExport> form_;
  std::vector<models::CompressedLayer> layers_;
};

/// The mean of the errors of layers' outputs that are known; negative: none is.
double mean_output_error(const std::vector<models::CompressedLayer>& layers);

}  // namespace sherd::cli
