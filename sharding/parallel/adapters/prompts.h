#pragma once

#include <memory>

#include "nn/layers.h"
#include "sharding/parallel/layout.h"

// Prompts: vectors of tokens that no text has, trained in front of a model whose own weights stay as they
// are.
namespace sherd::parallel {

using autograd::Tape;
using autograd::Var;

/// Ids [first, first + rows) that are looked up in a table of their own; `width`: of the stream.
struct PromptOptions {
  std::int64_t first = 0, rows = 0, width = 0;
};

/// The vectors of virtual tokens (Lester et al. 2021, "The power of scale for parameter-efficient prompt
/// tuning"). Parameter: "prompt" [rows, width], normal(0, 1) at first. All ranks of a layout have all of it.
class Prompts : public nn::Module {
 public:
  Prompts(const PromptOptions& options, const Layout& layout);
  /// x, a rank's part of the stream, plus the vectors of its virtual tokens. ids: int32, one of each row of
  /// x. Runs under the embedding's lease.
  Var add_to(Tape& tape, const Var& x, const tensor::Tensor& ids);
  /// Behind the last id.
  std::int64_t end() const { return options_.first + options_.rows; }

 protected:
  Prompts(const PromptOptions& options, const Layout& layout, const char* parameter);
  /// The vectors, [rows, width].
  virtual Var table(Tape& tape);

  nn::ParameterPtr weight_;

 private:
  PromptOptions options_;
};

/// Vectors that a network makes of others (Liu et al. 2021, "GPT understands, too", as PEFT has it):
/// W_4·relu(W_2·relu(W_0·e + b_0) + b_2) + b_4. Parameters: "embedding" [rows, width], normal(0, 1) at first;
/// "mlp_0", "mlp_2" and "mlp_4", with "weight" and "bias" as nn::Linear draws them, `hidden` features within.
class PromptEncoder : public Prompts {
 public:
  PromptEncoder(const PromptOptions& options, std::int64_t hidden, const Layout& layout);

 protected:
  Var table(Tape& tape) override;

 private:
  std::vector<std::shared_ptr<nn::Linear>> mlp_;
};

}  // namespace sherd::parallel
