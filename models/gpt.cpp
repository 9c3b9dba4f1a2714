#include "models/gpt.h"

#include "autograd/loss.h"

namespace sherd::models {
namespace {

using autograd::Init;
using tensor::Tensor;

const Tensor& entry(const tensor::Batch& batch, const char* name) {
  const auto found = batch.find(name);
  if (found != batch.end()) return found->second;
  std::string keys;
  for (const auto& [key, value] : batch) keys += (keys.empty() ? "'" : ", '") + key + "'";
  fail(ErrorKind::data, "a GPT reads '", name, "' from its batch, which holds ",
       keys.empty() ? "nothing" : keys);
}

/// Ids between the vocabulary and its padding are rows of the table, so the kernel would let them pass.
void check_ids(const Tensor& tokens, std::int64_t vocab_size) {
  const std::int32_t* ids = tokens.data<std::int32_t>();
  for (std::int64_t i = 0; i < tokens.numel(); ++i)
    if (ids[i] < 0 || ids[i] >= vocab_size)
      fail(ErrorKind::data, "token id ", ids[i], " is beyond the model's vocabulary of ", vocab_size,
           ": prepare the data with the tokenizer that the model was sized for, or raise model.vocab_size");
}

}  // namespace

Gpt::Gpt(const GptOptions& options) : options_(options.resolved()) {
  const GptOptions& o = options_;
  const Init init = Init::normal(0, o.init_std);
  tokens_ = add("tokens", std::make_shared<nn::Embedding>(o.padded_vocab(), o.hidden, init));
  if (o.positions == PositionKind::learned)
    positions_ = add("positions", std::make_shared<nn::Positions>(o.max_seq, o.hidden, init));
  embedding_dropout_ = add("embedding_dropout", std::make_shared<nn::Dropout>(o.embedding_dropout));
  blocks_ = add("blocks", std::make_shared<nn::LayerList>());
  for (std::int64_t i = 0; i < o.layers; ++i) blocks_->append(std::make_shared<TransformerBlock>(o));
  norm_ = add("norm", make_norm(o));
  head_ = add("head",
              std::make_shared<nn::Linear>(
                  o.hidden, o.padded_vocab(),
                  nn::LinearOptions{
                      .bias = false, .init = init, .tied = o.tied_embeddings ? tokens_->weight() : nullptr}));
}

Var Gpt::hidden(Tape& tape, const Tensor& tokens) {
  if (tokens.dtype() != DType::i32 || tokens.shape().rank() != 2)
    fail(ErrorKind::data, "tokens must be int32 [batch, seq], not ", name_of(tokens.dtype()), " ",
         tokens.shape().str());
  if (tokens.shape()[1] > options_.max_seq)
    fail(ErrorKind::data, "a sequence of ", tokens.shape()[1], " tokens is longer than the model's max_seq ",
         options_.max_seq);
  if (tape.device().kind() == device::Kind::cpu) check_ids(tokens, options_.vocab_size);
  Var x = (*tokens_)(tape, tokens);
  if (positions_) x = (*positions_)(tape, x);
  x = (*embedding_dropout_)(tape, x);
  return (*blocks_)(tape, x);
}

Var Gpt::logits(Tape& tape, const Tensor& tokens) {
  tape.enter(scope());
  Var out = (*head_)(tape, (*norm_)(tape, hidden(tape, tokens)));
  tape.leave(scope());
  return out;
}

Tensor Gpt::logits_at(Tape& tape, const Tensor& tokens, std::int64_t position) {
  Tape::NoGrad pause(tape);
  tape.enter(scope());
  const Var x = hidden(tape, tokens);
  const std::int64_t batch = x.shape()[0], seq = x.shape()[1], width = x.shape()[2];
  require(position >= 0 && position < seq, "position ", position, " of ", seq);
  Tensor last = tape.empty({batch, width}, x.dtype());
  for (std::int64_t b = 0; b < batch; ++b)
    tape.kernels().copy(
        x.value().reshape({batch * seq, width}).rows(b * seq + position, b * seq + position + 1),
        last.rows(b, b + 1));
  Tensor out = (*head_)(tape, (*norm_)(tape, tape.input(std::move(last)))).value();
  tape.leave(scope());
  return out;
}

Var Gpt::forward(Tape& tape, const tensor::Batch& batch) {
  const Tensor& tokens = entry(batch, "tokens");
  const Tensor& labels = entry(batch, "labels");
  if (labels.shape() != tokens.shape())
    fail(ErrorKind::data, "labels ", labels.shape().str(), " do not match tokens ", tokens.shape().str());
  Var logits = (*head_)(tape, (*norm_)(tape, hidden(tape, tokens)));
  return autograd::cross_entropy(std::move(logits), labels, options_.vocab_size);
}

}  // namespace sherd::models
