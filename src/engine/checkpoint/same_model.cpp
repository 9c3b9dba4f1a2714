#include "engine/checkpoint/same_model.h"

#include <algorithm>
#include <map>

namespace sherd::engine {
namespace {

using Keys = std::map<std::string, std::string>;

std::string text_of(const std::vector<std::int64_t>& shape) {
  return tensor::Shape{std::span<const std::int64_t>(shape)}.str();
}
const std::string& text_of(const std::string& value) {
  return value;
}

/// What two maps do not have in common, an entry each, in the order of names.
template <class Map>
std::vector<std::string> differences(const Map& there, const Map& here) {
  std::vector<std::string> out;
  for (const auto& [name, value] : there) {
    const auto found = here.find(name);
    if (found == here.end())
      out.push_back(cat(name, " is only there (", text_of(value), ")"));
    else if (found->second != value)
      out.push_back(cat(name, " is ", text_of(value), " there and ", text_of(found->second), " here"));
  }
  for (const auto& [name, value] : here)
    if (!there.contains(name)) out.push_back(cat(name, " is only here (", text_of(value), ")"));
  return out;
}

/// The first few, and how many more.
std::string listed(const std::vector<std::string>& all) {
  constexpr std::size_t most = 4;
  std::string out;
  for (std::size_t i = 0; i < std::min(most, all.size()); ++i) out += (i > 0 ? ", " : "") + all[i];
  return all.size() > most ? cat(out, ", and ", all.size() - most, " more") : out;
}

}  // namespace

ParameterShapes shapes_of(const std::vector<nn::ParameterPtr>& parameters) {
  ParameterShapes out;
  for (const nn::ParameterPtr& parameter : parameters) {
    const tensor::Slice slice = parameter->logical_slice();
    const auto dims = slice.logical().dims();
    out[parameter->name] = {dims.begin(), dims.end()};
  }
  return out;
}

namespace {

/// The keys that decide which parameters there are.
Keys model_keys(const config::Config& config) {
  Keys out;
  for (const config::Setting& setting : config::settings(config))
    if (setting.decides_parameters) out[setting.key] = setting.value;
  return out;
}

/// None where one of the two configurations has none, or the saved one cannot be
/// read.
std::vector<std::string> differing_keys(const Manifest& manifest, const config::Config* config) {
  if (!config || !config->model) return {};
  try {
    const config::Config saved = config::parse_text(manifest.config, "the checkpoint's configuration");
    return saved.model ? differences(model_keys(saved), model_keys(*config)) : std::vector<std::string>();
  } catch (const Error&) {
    return {};  // of another version; the shapes tell
  }
}

}  // namespace

void require_same_model(const CheckpointReader& reader, const ParameterShapes& shapes,
                        const config::Config* config, const std::function<bool(const std::string&)>& part) {
  ParameterShapes there = reader.manifest().shapes;
  if (part) std::erase_if(there, [&](const auto& shape) { return !part(shape.first); });
  const std::vector<std::string> parameters = differences(there, shapes);
  if (parameters.empty()) return;
  const std::vector<std::string> keys = differing_keys(reader.manifest(), config);
  fail(ErrorKind::data, "checkpoint ", reader.folder().string(),
       " holds another model: ", keys.empty() ? "" : cat(listed(keys), "; "), "of the parameters ",
       listed(parameters),
       config
           ? cat(". Go on with the model that was saved (", reader.folder().string(),
                 "/manifest.json has its configuration), or train the new one into another folder")
           : std::string(". Take weights of this model, or leave out the keys of `model` that say otherwise: "
                         "they are the weights' own"));
}

}  // namespace sherd::engine
