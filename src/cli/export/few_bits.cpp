#include "cli/export/few_bits.h"

#include <unistd.h>

#include <algorithm>
#include <set>

#include "base/arena.h"
#include "base/log.h"
#include "base/text/excerpt.h"
#include "data/dataset_info.h"
#include "data/indexed_dataset.h"
#include "device/device.h"
#include "tensor/formats/stored_format.h"

namespace sherd::cli {
namespace {

/// Texts for calibration are this long at most, unless the command line says otherwise (as GPTQ's authors').
constexpr std::int64_t usual_length = 2048;

StoredFormat format_of(const std::string& name) {
  const std::optional<StoredFormat> format = tensor::parse_stored_format(name);
  if (!format || *format == StoredFormat::compute || *format == StoredFormat::bf16)
    throw UsageError(cat("--format is gguf, nf4, nf4_double, fp4, fp4_double, int8, fp8 or mxfp4, not '",
                         excerpt(name), "'"));
  return *format;
}

/// The texts lie evenly over the dataset.
models::CalibrationTexts read_texts(const FewBits& how, const models::GptConfig& model) {
  const auto dataset = data::IndexedDataset::open(how.calibrate);
  if (const auto info = data::read_dataset_info(how.calibrate)) {
    if (!info->labels.empty() || info->labels_of_tokens)
      fail(ErrorKind::data, how.calibrate,
           " holds labels between its texts: prepare texts alone to calibrate");
    if (info->vocab_size > model.vocab_size)
      log_warning("the texts to calibrate on were made with '", info->tokenizer, "', which has ",
                  info->vocab_size, " ids, and the model has ", model.vocab_size,
                  ": prepare them with the model's own tokenizer");
  }
  models::CalibrationTexts out;
  out.length = how.length > 0 ? how.length : std::min(model.seq_length, usual_length);
  if (out.length > model.seq_length)
    fail(ErrorKind::config, "--calibrate-length is ", out.length, ", and the model's sequences have ",
         model.seq_length, " tokens");
  out.sequences = std::min(how.sequences, dataset->tokens() / out.length);
  if (out.sequences == 0)
    fail(ErrorKind::data, how.calibrate, " has ", dataset->tokens(), " tokens, and a sequence takes ",
         out.length, ": prepare more text, or give a smaller --calibrate-length");
  out.tokens.resize(static_cast<std::size_t>(out.sequences * out.length));
  std::int64_t sequence = 0, begin = 0;  // of the dataset, and the token that it begins with
  for (std::int64_t i = 0; i < out.sequences; ++i) {
    std::int64_t at = i * (dataset->tokens() / out.sequences);
    for (std::int64_t done = 0; done < out.length;) {
      while (at >= begin + dataset->length(sequence)) begin += dataset->length(sequence++);
      const std::int64_t n = std::min(out.length - done, begin + dataset->length(sequence) - at);
      dataset->read(
          sequence, at - begin,
          std::span(out.tokens)
              .subspan(static_cast<std::size_t>(i * out.length + done), static_cast<std::size_t>(n)));
      done += n, at += n;
    }
  }
  return out;
}

std::string percent(double share) {
  char text[32];
  std::snprintf(text, sizeof text, "%.3g %%", share * 100);
  return text;
}

}  // namespace

void add_quantize_options(CommandLine& line) {
  line.value(
          "quantize", "int8|fp8|int4",
          "linear layers in a form of compressed-tensors, which vLLM, SGLang and transformers read: int8 or "
          "fp8 weights and inputs, or weights in int4 alone")
      .value("calibrate", "PREFIX",
             "with --quantize, on these texts of `sherd prepare`: int4 by GPTQ, int8 and fp8 with one scale "
             "for a layer's inputs; not given: to nearest, and a scale for each token")
      .value("calibrate-sequences", "N", "texts to calibrate on; all, where there are fewer", "128")
      .value("calibrate-length", "N", "tokens of each; not given: the model's seq_length, 2048 at most")
      .value("group", "N", "with --quantize int4: inputs that share a scale", "128")
      .flag("activation-order",
            "with --quantize int4 --calibrate: the columns with the largest inputs first");
}

FewBits few_bits_of(const CommandLine& line, bool of_adapter, DType dtype) {
  FewBits out;
  const bool gguf = line.text("format") == "gguf";
  if (line.has("format") && !gguf) out.format = format_of(line.text("format"));
  if (out.format != StoredFormat::compute && of_adapter)
    throw UsageError("--format is of a model's weights; an adapter's are written whole");
  if (!line.has("quantize")) {
    for (const char* option :
         {"calibrate", "calibrate-sequences", "calibrate-length", "group", "activation-order"})
      if (line.has(option)) throw UsageError(cat("--", option, " goes with --quantize"));
    return out;
  }
  const std::string name = line.text("quantize");
  const auto kind = models::parse_compressed_kind(name);
  if (!kind) throw UsageError(cat("--quantize is int8, fp8 or int4, not '", excerpt(name), "'"));
  if (line.has("format"))
    throw UsageError("--quantize and --format are two forms of the same weights: give one of them");
  if (of_adapter) throw UsageError("--quantize is of a model's weights; an adapter's are written whole");
  const bool int4 = *kind == models::CompressedKind::int4, calibrates = line.has("calibrate");
  if (!int4 && line.has("group"))
    throw UsageError("--group goes with --quantize int4: int8 and fp8 have a scale for each output");
  if (!(int4 && calibrates) && line.has("activation-order"))
    throw UsageError("--activation-order goes with --quantize int4 and --calibrate");
  for (const char* option : {"calibrate-sequences", "calibrate-length"})
    if (!calibrates && line.has(option)) throw UsageError(cat("--", option, " goes with --calibrate"));
  out.compressed = {.kind = *kind,
                    .group = line.integer("group", 1),
                    .static_inputs = calibrates && !int4,
                    .activation_order = line.has("activation-order"),
                    .scale_dtype = dtype};
  out.calibrate = line.text("calibrate");
  out.sequences = line.integer("calibrate-sequences", 1);
  if (line.has("calibrate-length")) out.length = line.integer("calibrate-length", 1);
  return out;
}

FewBitsExport::FewBitsExport(const FewBits& how, models::Gpt& model, const models::HuggingFaceLayout& layout,
                             nn::WeightSource& weights)
    : how_(how), model_(model), layout_(layout), bar_(STDERR_FILENO) {
  if (!how) return;
  std::set<std::string> linear;
  for (const nn::ParameterPtr& weight : model.linear_weights()) linear.insert(weight->name);
  if (!how.compressed) {
    form_ = std::make_unique<models::LowBitExport>(how.format, model.config(), std::move(linear));
    return;
  }
  if (!how.calibrate.empty()) {
    device_ = device::make_cpu_device(available_cores());
    calibration_ = std::make_unique<models::Calibration>(
        model.config(), layout, weights, *device_, *how.compressed, read_texts(how, model.config()),
        [this](double done, double total) {
          bar_.show({.title = "calibrating", .done = done, .total = total, .unit = "passes"});
        });
  }
  form_ = std::make_unique<models::CompressedExport>(
      *how.compressed, model.config(), std::move(linear), calibration_.get(),
      [this](const models::CompressedLayer& layer) { tell(layer); });
}

FewBitsExport::~FewBitsExport() = default;

void FewBitsExport::tell(const models::CompressedLayer& layer) {
  layers_.push_back(layer);
  if (calibration_) bar_.clear();
  log_info(layer.weight, ": weights ", percent(layer.weight_error), " away",
           layer.output_error < 0 ? "" : cat(", outputs ", percent(layer.output_error)));
}

/// The published matrices that stay as they are.
std::vector<std::string> FewBitsExport::left_whole() const {
  std::vector<std::string> out;
  for (const nn::ParameterPtr& parameter : model_.parameters())
    for (const models::PublishedTensor& tensor : layout_.published(parameter->name).tensors) {
      // compressed-tensors looks at linear layers alone, of which tables are none.
      const bool table = how_.compressed && parameter->is_table;
      if (tensor.shape.rank() == 2 && tensor.stacked == 0 && !table && !form_->takes(parameter->name, tensor))
        out.push_back(tensor.name);
    }
  if (model_.config().tied()) out.push_back(layout_.head());
  return out;
}

std::string FewBitsExport::described(const std::string& config, const std::string& dtype) const {
  return form_ ? form_->described(config, left_whole(), dtype) : config;
}

void FewBitsExport::warn() const {
  if (calibration_ && calibration_->unseen() > 0)
    log_warning("no token of calibration has reached ", counted(calibration_->unseen(), "layer"),
                " of experts, which are rounded to nearest: more --calibrate-sequences reach more");
}

double mean_output_error(const std::vector<models::CompressedLayer>& layers) {
  double sum = 0;
  std::int64_t known = 0;
  for (const models::CompressedLayer& layer : layers)
    if (layer.output_error >= 0) sum += layer.output_error, ++known;
  return known > 0 ? sum / static_cast<double>(known) : -1;
}

}  // namespace sherd::cli
