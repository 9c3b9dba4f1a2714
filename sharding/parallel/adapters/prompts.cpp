#include "sharding/parallel/adapters/prompts.h"

#include "autograd/ops.h"
#include "sharding/parallel/linear.h"

namespace sherd::parallel {

Prompts::Prompts(const PromptOptions& options, const Layout& layout) : Prompts(options, layout, "prompt") {}

Prompts::Prompts(const PromptOptions& options, const Layout& layout, const char* parameter)
    : options_(options) {
  require(options.first > 0 && options.rows > 0 && options.width > 0, "a prompt of ", options.rows,
          " vectors of ", options.width, " from id ", options.first, " on");
  weight_ = declare(parameter, {options.rows, options.width}, nn::Init::normal(0, 1));
  weight_->is_table = true;
  weight_->partial_gradient = layout.cuts_stream();
}

Var Prompts::table(Tape& tape) {
  return tape.parameter(weight_);
}

Var Prompts::add_to(Tape& tape, const Var& x, const tensor::Tensor& ids) {
  return autograd::add(x, autograd::embedding(ids, table(tape), {.first = options_.first, .ids = end()}));
}

PromptEncoder::PromptEncoder(const PromptOptions& options, std::int64_t hidden, const Layout& layout)
    : Prompts(options, layout, "embedding") {
  const std::int64_t widths[] = {options.width, hidden, hidden, options.width};
  for (int i = 0; i < 3; ++i)
    mlp_.push_back(
        add(cat("mlp_", 2 * i),
            on_stream(std::make_shared<nn::Linear>(widths[i], widths[i + 1], nn::LinearOptions{.fp8 = false}),
                      layout)));
}

Var PromptEncoder::table(Tape& tape) {
  const Var first = autograd::relu((*mlp_[0])(tape, tape.parameter(weight_)));
  return (*mlp_[2])(tape, autograd::relu((*mlp_[1])(tape, first)));
}

}  // namespace sherd::parallel
