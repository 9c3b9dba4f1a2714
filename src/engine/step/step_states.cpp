#include "engine/step/step_states.h"

#include "comm/gather.h"

namespace sherd::engine {
namespace {

/// The step states of a model, by path.
std::map<std::string, nn::StepState*> states_of(nn::Module& model) {
  std::map<std::string, nn::StepState*> out;
  model.for_each([&](nn::Module& module) {
    if (auto* state = dynamic_cast<nn::StepState*>(&module)) out.emplace(module.path(), state);
  });
  return out;
}

std::string named(const std::vector<std::string>& paths) {
  return cat("'", paths[0], "'", paths.size() > 1 ? cat(" (and of ", paths.size() - 1, " more)") : "");
}

}  // namespace

StepStates::StepStates(nn::Module& model, comm::Communicator& ranks, bool first, device::Device& device)
    : ranks_(ranks), first_(first), device_(device) {
  for (const auto& [path, state] : states_of(model)) modules_.push_back(state);
}

void StepStates::end_step(bool applied) {
  if (modules_.empty()) return;
  std::vector<double> sums;
  std::vector<std::size_t> sizes;
  for (const nn::StepState* module : modules_) {
    const std::vector<double> own = module->counted();
    sizes.push_back(own.size());
    sums.insert(sums.end(), own.begin(), own.end());
  }
  if (!first_ && ranks_.size() > 1) sums.assign(sums.size(), 0.0);
  comm::reduce_values(ranks_, device_, std::span(sums), "states of the step");
  std::size_t at = 0;
  for (std::size_t i = 0; i < modules_.size(); at += sizes[i], ++i)
    modules_[i]->end_step(std::span(sums).subspan(at, sizes[i]), applied);
}

void StepStates::drop_step() {
  for (nn::StepState* module : modules_) module->drop_step();
}

SavedStepStates save_step_states(nn::Module& model) {
  SavedStepStates out;
  for (const auto& [path, state] : states_of(model))
    if (std::vector<float> values = state->saved(); !values.empty()) out[path] = std::move(values);
  return out;
}

void require_step_states(nn::Module& model, const SavedStepStates& saved) {
  for (const auto& [path, state] : states_of(model)) {
    const auto found = saved.find(path);
    const std::size_t here = state->saved().size();
    if (found != saved.end() && here > 0 && found->second.size() != here)
      fail(ErrorKind::data, "'", path, "' has ", found->second.size(),
           " values beside its parameters in the checkpoint, and ", here, " here");
  }
}

std::vector<std::string> restore_step_states(nn::Module& model, const SavedStepStates& saved) {
  std::vector<std::string> anew, dropped, lines;
  const std::map<std::string, nn::StepState*> states = states_of(model);
  for (const auto& [path, state] : states) {
    if (state->saved().empty()) continue;
    if (const auto found = saved.find(path); found != saved.end())
      state->restore(found->second);
    else
      anew.push_back(path);
  }
  for (const auto& [path, values] : saved)
    if (const auto found = states.find(path); found == states.end() || found->second->saved().empty())
      dropped.push_back(path);
  if (!anew.empty())
    lines.push_back(cat("the checkpoint has nothing of what ", named(anew),
                        " learned beside its parameters (model.moe.correction_bias): it begins anew"));
  if (!dropped.empty())
    lines.push_back(cat("what ", named(dropped),
                        " had learned beside its parameters is dropped: nothing "
                        "uses it here (model.moe.correction_bias)"));
  return lines;
}

}  // namespace sherd::engine
