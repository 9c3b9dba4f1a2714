#include <cmath>

#include "models/families/family.h"

// Granite 3 without experts: Llama with four multipliers.
namespace sherd::models {

using M = config::Model;

Family granite() {
  const auto of_scores = [](const Published& p) {
    const double m = p.model.attention_multiplier;
    return config::node_of(m == 0 ? 1 / std::sqrt(static_cast<double>(p.model.head_dim)) : m);
  };
  const auto any = [](const char* name, double M::*member) {
    return in_file(config::real(name, member, ""));
  };
  return {
      .name = "granite",
      .architecture = "GraniteForCausalLM",
      .class_defaults =
          [](Published& p) {
            set_sizes(p.model, {32000, 4096, 11008, 32, 32, 0, 2048});
            p.model.attention_multiplier = 1;
          },
      .keys = joined(decoder_sizes(), no_biases(true, true), rope_keys(),
                     JsonKeys{any("embedding_multiplier", &M::embedding_multiplier),
                              any("residual_multiplier", &M::residual_multiplier),
                              positive("attention_multiplier", &M::attention_multiplier).written(of_scores),
                              positive("logits_scaling", &M::logits_scaling)}),
      .has = {"attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling"},
      .gguf = {.architecture = "granite", .pairs = true, .rope_factors = true}};
}

}  // namespace sherd::models
