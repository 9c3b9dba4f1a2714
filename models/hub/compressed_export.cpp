#include "models/hub/compressed_export.h"

#include <nlohmann/json.hpp>

#include "base/error.h"
#include "tensor/host_values.h"

namespace sherd::models {
namespace {

using tensor::SafetensorsSpec;
using Json = nlohmann::ordered_json;

/// "model.layers.0.mlp.up_proj.", of its weight's name.
std::string module_in_front(const std::string& weight) {
  return weight.substr(0, weight.rfind('.') + 1);
}

const char* format_of(CompressedKind kind) {
  return kind == CompressedKind::int8  ? "int-quantized"
         : kind == CompressedKind::fp8 ? "float-quantized"
                                       : "pack-quantized";
}

/// QuantizationArgs, as compressed-tensors writes them.
Json arguments(CompressedKind kind, const char* strategy, bool dynamic, std::int64_t group) {
  return {{"num_bits", kind == CompressedKind::int4 ? 4 : 8},
          {"type", kind == CompressedKind::fp8 ? "float" : "int"},
          {"symmetric", true},
          {"group_size", group > 0 ? Json(group) : Json()},
          {"strategy", strategy},
          {"dynamic", dynamic}};
}

}  // namespace

CompressedExport::CompressedExport(const CompressedScheme& scheme, const GptConfig& model,
                                   std::set<std::string> linear, Calibration* calibration,
                                   std::function<void(const CompressedLayer&)> told)
    : scheme_(scheme), linear_(std::move(linear)), calibration_(calibration), told_(std::move(told)) {
  const Family& family = family_of(model.type);
  if (!model.causal || model.has_encoder())
    fail(ErrorKind::config, "compressed-tensors is the form of decoders, which ", family.name,
         " is not; export it with --format nf4, fp4 or int8");
  if (family.names.transposed)
    fail(ErrorKind::config, family.name,
         " stores its matrices transposed, in layers (Conv1D) that compressed-tensors does not know; export "
         "it with --format nf4, fp4 or int8, or as GGUF");
  if (family.names.stacked_experts && model.moe.experts > 0)
    fail(ErrorKind::config, family.name,
         " stores all experts of a layer in one tensor, for which compressed-tensors has no published form; "
         "export it with --format mxfp4");
  require(!scheme.static_inputs || calibration, "scales of inputs are found by calibration");
}

bool CompressedExport::takes(const std::string& parameter, const PublishedTensor& tensor) const {
  return linear_.contains(parameter) && tensor.shape.rank() == 2 && tensor.stacked == 0;
}

std::vector<SafetensorsSpec> CompressedExport::specs(const PublishedTensor& tensor) const {
  const std::int64_t out = tensor.shape[0], in = tensor.shape[1];
  const std::string module = module_in_front(tensor.name);
  require_compressible(scheme_, tensor.name, {}, in);
  std::vector<SafetensorsSpec> specs{
      {module + "weight_scale", scheme_.scale_dtype, {out, in / scheme_.group_of(in)}}};
  if (scheme_.kind == CompressedKind::int4) {
    specs.push_back({module + "weight_packed", DType::i32, {out, (in + 7) / 8}});
    specs.push_back({module + "weight_shape", DType::i64, {2}});
  } else {
    specs.push_back(
        {tensor.name, DType::u8, {out, in}, scheme_.kind == CompressedKind::fp8 ? "F8_E4M3" : "I8"});
  }
  if (scheme_.static_inputs) specs.push_back({module + "input_scale", scheme_.scale_dtype, {1}});
  return specs;
}

void CompressedExport::write(tensor::SafetensorsFolderWriter& files, const PublishedTensor& tensor,
                             std::span<const float> values) {
  const std::int64_t out = tensor.shape[0], in = tensor.shape[1];
  const std::string module = module_in_front(tensor.name);
  CompressedLayer layer{tensor.name};
  CompressedMatrix made;
  if (calibration_) {
    Calibration::Matrix matrix = calibration_->take(tensor.name);
    made = std::move(matrix.compressed), layer.output_error = matrix.output_error;
  } else {
    made = round_to_nearest(scheme_, tensor.name, values, out, in);
  }
  std::vector<float> stand_for(values.size());
  decompress(scheme_.kind, made, stand_for);
  layer.weight_error = count(values, stand_for);
  write_scales(files, module + "weight_scale", made.scales);
  if (scheme_.kind == CompressedKind::int4) {
    const std::int64_t shape[] = {out, in};
    files.write(module + "weight_packed", 0, pack_int4(made));
    files.write(module + "weight_shape", 0, std::as_bytes(std::span(shape)));
  } else {
    files.write(tensor.name, 0, std::as_bytes(std::span(made.codes)));
  }
  if (scheme_.static_inputs) write_scales(files, module + "input_scale", {&made.input_scale, 1});
  if (told_) told_(layer);
}

void CompressedExport::write_scales(tensor::SafetensorsFolderWriter& files, const std::string& name,
                                    std::span<const float> scales) const {
  std::vector<std::byte> bytes(scales.size() * size_of(scheme_.scale_dtype));
  tensor::convert_values(std::as_bytes(scales), DType::f32, bytes, scheme_.scale_dtype);
  files.write(name, 0, bytes);
}

std::string CompressedExport::described(const std::string& config, const std::vector<std::string>& plain,
                                        const std::string&) const {
  std::vector<std::string> ignored;  // the modules of these
  for (const std::string& name : plain)
    if (name.ends_with(".weight")) ignored.push_back(name.substr(0, name.rfind('.')));
  const bool groups = scheme_.kind == CompressedKind::int4;
  Json weights = arguments(scheme_.kind, groups ? "group" : "channel", false, groups ? scheme_.group : 0);
  if (groups && scheme_.activation_order) weights["actorder"] = "weight";
  Json inputs;
  if (scheme_.rounds_inputs())
    inputs = arguments(scheme_.kind, scheme_.static_inputs ? "tensor" : "token", !scheme_.static_inputs, 0);
  Json out = Json::parse(config);
  out["quantization_config"] = {{"config_groups",
                                 {{"group_0",
                                   {{"targets", Json::array({"Linear"})},
                                    {"weights", weights},
                                    {"input_activations", inputs},
                                    {"output_activations", nullptr},
                                    {"format", format_of(scheme_.kind)}}}}},
                                {"quant_method", "compressed-tensors"},
                                {"kv_cache_scheme", nullptr},
                                {"format", format_of(scheme_.kind)},
                                {"quantization_status", "compressed"},
                                {"global_compression_ratio", nullptr},
                                {"ignore", ignored}};
  return out.dump(2) + "\n";
}

}  // namespace sherd::models
