#include "engine/pipeline/stage_layout.h"

#include <cxxabi.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <set>
#include <typeinfo>

#include "base/text/excerpt.h"
#include "base/text/pattern.h"
#include "nn/layers.h"
#include "sharding/parallel/embedding.h"
#include "sharding/schedule/schedules.h"

namespace sherd::engine {

using tensor::Shape;
using tensor::Tensor;

Tensor make_header(device::Device& device) {
  return Tensor::on_host(device, {2 + Shape::max_rank}, DType::i64);
}

void write_header(const Tensor& header, const Tensor& value) {
  auto* words = header.data<std::int64_t>();
  const auto dims = value.shape().dims();
  words[0] = static_cast<std::int64_t>(value.dtype());
  words[1] = static_cast<std::int64_t>(dims.size());
  std::copy(dims.begin(), dims.end(), words + 2);
}

ValueForm read_header(const Tensor& header) {
  const auto* words = header.data<std::int64_t>();
  if (words[0] < 0 || words[0] > static_cast<std::int64_t>(DType::u8) || words[1] < 0 ||
      words[1] > Shape::max_rank)
    fail(ErrorKind::comm, "another stage announces a value of dtype ", words[0], " and ", words[1],
         " dimensions: ranks run different programs");
  return {Shape(std::span(words + 2, static_cast<std::size_t>(words[1]))), static_cast<DType>(words[0])};
}

using autograd::Parameter;
using sharding::Chunk;

std::vector<Chunk> StageLayout::all_own() const {
  std::vector<Chunk> out;
  for (int chunk = 0; chunk < own_chunks(); ++chunk) out.push_back(own(chunk));
  return out;
}

int StageLayout::stage_of(std::size_t part) const {
  const auto at = std::find_if(chunks.begin(), chunks.end(),
                               [&](const Chunk& chunk) { return part >= chunk.begin && part < chunk.end; });
  require(at != chunks.end(), "the model has no part ", part);
  return static_cast<int>(at - chunks.begin()) % stages;
}

namespace {

/// "TransformerBlock": without namespaces and template arguments.
std::string class_of(const nn::Module& module) {
  int status = 0;
  const std::unique_ptr<char, decltype(&std::free)> demangled(
      abi::__cxa_demangle(typeid(module).name(), nullptr, nullptr, &status), &std::free);
  std::string name = demangled ? demangled.get() : typeid(module).name();
  name = name.substr(0, name.find('<'));
  const std::size_t scope = name.rfind("::");
  return scope == std::string::npos ? name : name.substr(scope + 2);
}

/// It only looks rows of its parameters up.
bool is_table(const nn::Module& module) {
  return dynamic_cast<const nn::Embedding*>(&module) || dynamic_cast<const nn::LearnedPositions*>(&module) ||
         dynamic_cast<const parallel::VocabEmbedding*>(&module);
}

std::int64_t parameters_of(const std::vector<std::shared_ptr<nn::Module>>& modules, bool only_computed) {
  std::set<const Parameter*> counted;
  std::int64_t out = 0;
  for (const auto& root : modules)
    root->for_each([&](nn::Module& module) {
      if (only_computed && is_table(module)) return;
      for (const auto& [name, parameter] : module.own_parameters())
        if ((only_computed || parameter->trainable) && counted.insert(parameter.get()).second)
          out += parameter->logical_slice().logical().numel();
    });
  return out;
}

std::vector<std::int64_t> matching_parts(nn::LayeredModel& model, const std::string& pattern) {
  const CaselessPattern wanted(pattern);
  std::vector<std::int64_t> out;
  std::set<std::string> classes;
  for (std::size_t part = 0; part < model.parts(); ++part) {
    const auto& modules = model.modules(part);
    out.push_back(std::any_of(modules.begin(), modules.end(), [&](const auto& module) {
      classes.insert(class_of(*module));
      return wanted.is_in(class_of(*module)) || wanted.is_in(module->path());
    }));
  }
  if (std::find(out.begin(), out.end(), 1) != out.end()) return out;
  fail(ErrorKind::config, "parallel.partition_method: no part of the model matches \"", pattern,
       "\", by class or path; classes of its parts: ", joined_text(classes));
}

}  // namespace

std::vector<std::int64_t> part_weights(nn::LayeredModel& model, const std::string& method) {
  model.assign_names();
  constexpr std::string_view type = "type:";
  if (method.starts_with(type)) return matching_parts(model, method.substr(type.size()));
  std::vector<std::int64_t> out(model.parts(), 1);
  if (method == "uniform") return out;
  require(method == "best" || method == "parameters", "no way to cut a model: ", method);
  for (std::size_t part = 0; part < out.size(); ++part)
    out[part] = parameters_of(model.modules(part), method == "best");
  return out;
}

StageLayout make_stage_layout(nn::Model& model, const config::Parallel& parallel, int stage) {
  StageLayout layout;
  layout.stages = parallel.pipeline;
  layout.stage = stage;
  auto* layered = dynamic_cast<nn::LayeredModel*>(&model);
  const std::size_t chunks =
      static_cast<std::size_t>(parallel.pipeline) * static_cast<std::size_t>(parallel.virtual_stages);
  if (chunks == 1) {
    if (layered) layout.chunks = {{0, layered->parts()}};
    return layout;
  }
  const std::string asked =
      cat("parallel.pipeline is ", parallel.pipeline,
          parallel.virtual_stages > 1 ? cat(", with ", parallel.virtual_stages, " virtual stages each") : "");
  if (!layered)
    fail(ErrorKind::config, asked,
         ", and the model offers no parts to cut it between: derive it from nn::LayeredModel "
         "(nn/layered_model.h) and declare its parts in order with append_part()");
  if (chunks > layered->parts())
    fail(ErrorKind::config, asked, ": ", chunks, " runs of parts, and the model has ", layered->parts(),
         " parts; take parallel.pipeline x parallel.virtual_stages of at most ", layered->parts());
  layout.chunks = sharding::cut(part_weights(*layered, parallel.partition_method), chunks);
  return layout;
}

const Parameter* outside_of_parts(const nn::LayeredModel& model) {
  std::set<const Parameter*> inside;
  for (std::size_t part = 0; part < model.parts(); ++part)
    for (const auto& module : model.modules(part))
      for (const auto& parameter : module->parameters()) inside.insert(parameter.get());
  for (const auto& parameter : model.parameters())
    if (!inside.contains(parameter.get())) return parameter.get();
  return nullptr;
}

std::map<const Parameter*, std::vector<int>> stages_of_parameters(nn::Model& model,
                                                                  const StageLayout& layout) {
  std::map<const Parameter*, std::vector<int>> out;
  auto* layered = dynamic_cast<nn::LayeredModel*>(&model);
  if (!layered || layout.stages == 1) {
    for (const auto& parameter : model.parameters()) out[parameter.get()] = {0};
    return out;
  }
  model.assign_names();
  if (const Parameter* outside = outside_of_parts(*layered))
    fail(ErrorKind::config, "no part of the model has parameter '", outside->name,
         "', so no stage of a pipeline would: give its module to append_part()");
  for (std::size_t part = 0; part < layered->parts(); ++part)
    for (const auto& module : layered->modules(part))
      for (const auto& parameter : module->parameters()) {
        std::vector<int>& stages = out[parameter.get()];
        const int stage = layout.stage_of(part);
        const auto at = std::lower_bound(stages.begin(), stages.end(), stage);
        if (at == stages.end() || *at != stage) stages.insert(at, stage);
      }
  return out;
}

}  // namespace sherd::engine
