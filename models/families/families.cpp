#include "base/error.h"
#include "models/families/family.h"

namespace sherd::models {

Family gpt2(), llama(), mistral(), mixtral(), qwen2(), qwen3(), qwen3_moe(), phi3(), gemma3(), granite(),
    smollm3(), glm4(), ministral3(), olmo2(), olmo3();

const std::vector<Family>& families() {
  static const std::vector<Family> all{gpt2(),    llama(),     mistral(),    qwen2(),   qwen3(),
                                       mixtral(), qwen3_moe(), phi3(),       granite(), smollm3(),
                                       gemma3(),  glm4(),      ministral3(), olmo2(),   olmo3()};
  return all;
}

const Family& family_of(config::ModelType type) {
  for (const Family& family : families())
    if (family.name == config::name_of(type)) return family;
  fail(ErrorKind::usage, "family ", config::name_of(type), " has no file in models/families");
}

}  // namespace sherd::models
