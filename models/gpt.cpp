#include "models/gpt.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "autograd/key_cache.h"
#include "autograd/ops.h"
#include "base/text/excerpt.h"
#include "models/adapters/adapters.h"
#include "models/batch_entries.h"
#include "models/hub/adapter_tables.h"
#include "sharding/parallel/collectives.h"
#include "sharding/parallel/sequence.h"

namespace sherd::models {
namespace {

using tensor::Tensor;

/// The last row that counts of each sequence of x [sequences, rows, width].
Tensor last_rows(Tape& tape, const Tensor& x) {
  const std::int64_t rows = x.shape()[1], width = x.shape()[2];
  if (rows == 1) return x.reshape({x.shape()[0], width});
  const Tensor out = tape.empty({x.shape()[0], width}, x.dtype());
  std::int64_t b = 0;
  for (const autograd::KeyCache::Rows& of : tape.key_cache->rows()) {
    const std::int64_t row = tape.key_cache->source_rows() + of.count - 1;
    tape.kernels().copy_rows({x, (b * rows + row) * width, width}, {out, b * width, width}, 1, width);
    ++b;
  }
  return out;
}

/// Sequences of an encoder's rows and a decoder's are whole on all tensor ranks.
parallel::Layout layout_for(const GptConfig& config, parallel::Layout layout) {
  if (config.has_encoder()) layout.sequence_parallel = false;
  return layout;
}

}  // namespace

/// Says what parallel layers would say of their own sizes, in the configuration's words.
void check_layout(const GptConfig& c, const parallel::Layout& given, Problems& problems) {
  const parallel::Layout layout = layout_for(c, given);
  problems.attempt([&] { (void)parallel::rank_heads(c.attention(0), layout); });
  const int ranks = layout.tensor_size();
  const std::string over = cat(" cannot be cut over ", counted(ranks, "tensor rank"));
  if (c.norms_all_heads() && ranks > 1)
    problems.add(
        cat("one norm of all heads", over, ": leave parallel.tensor at 1 with model.qk_norm_all_heads"));
  if (c.ffn_hidden_size % ranks != 0)
    problems.add(cat("a feed-forward width of ", c.ffn_hidden_size, over,
                     ": make model.ffn_hidden_size a multiple of ", ranks));
  if (c.has_encoder() && layout.context_size() > 1)
    problems.add(
        "context ranks cannot share a sequence of an encoder's tokens and a decoder's: set parallel.context "
        "to 1; tensor and pipeline ranks do");
  if (c.any_linear() && layout.context_size() > 1)
    problems.add(
        "context ranks cannot share a sequence of which linear_attention keeps states: set parallel.context "
        "to 1; tensor and pipeline ranks do");
  if (c.any_linear() && c.linear_attention.num_key_heads % ranks != 0)
    problems.add(cat(counted(c.linear_attention.num_key_heads, "key head"), " of linear_attention", over,
                     ": make parallel.tensor a divisor of them"));
  // Padded sequences must fit too.
  if (const std::int64_t multiple = layout.sequence_multiple(); c.seq_length % multiple != 0)
    problems.add(cat("sequences of ", c.seq_length, " tokens cannot be cut over ", ranks, " tensor and ",
                     counted(layout.context_size(), "context rank"), ": make model.seq_length a multiple of ",
                     multiple));
  if (c.padded_vocab() % ranks != 0)
    problems.add(cat("a vocabulary padded to ", c.padded_vocab(), " ids", over,
                     ": make model.pad_vocab_to_multiple_of a multiple of ", ranks));
  if (c.pairs_texts() && padded_sentence_scores % ranks != 0)
    problems.add(cat("the scores of pairs of texts, padded to ", padded_sentence_scores, ",", over,
                     ": make parallel.tensor 1, 2, 4 or 8"));
  if (c.scores_texts() && c.padded_scores() % ranks != 0)
    problems.add(cat("the scores of ", c.gives_rewards() ? "rewards" : counted(c.scores(), "label"),
                     ", padded to ", c.padded_scores(), ",", over, ": make parallel.tensor 1, 2, 4 or 8"));
}

Gpt::Gpt(const GptConfig& config, const parallel::Layout& given)
    : config_(config.resolved()), layout_(layout_for(config_, given)) {
  const GptConfig& c = config_;
  const parallel::Layout& layout = layout_;
  Problems problems;
  check_layout(c, layout, problems);
  problems.raise();
  const autograd::Init init = c.init();
  tokens_ = add("tokens", std::make_shared<parallel::VocabEmbedding>(c.padded_vocab(), c.hidden_size, layout,
                                                                     init, c.vocab_size));
  if (c.scale_embeddings) tokens_->set_scale([c](DType dtype) { return c.embedding_root(dtype); });
  if (auto prompts = make_prompts(c, layout)) tokens_->set_adapter(std::move(prompts));
  const TrainedTokens trained = make_token_rows(c, layout);
  if (trained.of_table) tokens_->set_adapter(trained.of_table);
  const auto table = [&](const char* name, std::int64_t rows) {
    return add(
        name, parallel::on_stream(std::make_shared<nn::LearnedPositions>(rows, c.hidden_size, init), layout));
  };
  if (c.token_types > 0) token_types_ = table("token_types", c.token_types);
  if (c.position == config::PositionType::learned) positions_ = table("positions", c.max_positions);
  const auto relative = [&](const char* name, bool encodes) {
    return c.has_encoder() ? add(name, std::make_shared<RelativePositions>(c, encodes, layout)) : nullptr;
  };
  // No part has these, but blocks that share what they have: else ranks without such a block would have it
  // too.
  encoder_positions_ = relative("encoder_positions", true);
  decoder_positions_ = relative("decoder_positions", false);
  if (c.embedding_norm) embedding_norm_ = add("embedding_norm", make_norm(c, layout));
  embedding_dropout_ =
      add("embedding_dropout", std::make_shared<nn::Dropout>(static_cast<float>(c.embedding_dropout)));
  blocks_ = add("blocks", std::make_shared<nn::LayerList>());
  const auto pooled =
      c.moe.aux_loss_type == BalanceLoss::pooled ? std::make_shared<parallel::PooledChoices>() : nullptr;
  for (std::int64_t i = 0; i < c.num_layers; ++i)
    blocks_->append(std::make_shared<TransformerBlock>(
        c, i, layout, pooled, c.encodes(i) ? encoder_positions_ : decoder_positions_));
  if (c.final_norm()) norm_ = add("norm", make_norm(c, layout));
  if (c.has_head_dense()) {
    head_dense_ =
        add("head_dense",
            parallel::on_stream(
                std::make_shared<nn::Linear>(
                    c.hidden_size, c.hidden_size,
                    nn::LinearOptions{
                        .bias = c.bias, .activation = c.head_activation(), .init = init, .fp8 = false}),
                layout));
    if (!c.pools()) head_norm_ = add("head_norm", make_norm(c, layout));
  }
  if (c.pairs_texts()) {
    pooler_ =
        add("pooler", parallel::on_stream(std::make_shared<nn::Linear>(
                                              c.hidden_size, c.hidden_size,
                                              nn::LinearOptions{.bias = c.bias, .init = init, .fp8 = false}),
                                          layout));
    sentence_head_ = add("sentence_head", std::make_shared<parallel::ColumnLinear>(
                                              c.hidden_size, padded_sentence_scores, layout,
                                              nn::LinearOptions{.init = init, .fp8 = false}));
  }
  if (c.classifies() || c.has_encoder())
    head_dropout_ = add(
        "head_dropout",
        std::make_shared<nn::Dropout>(static_cast<float>(c.classifies() ? c.dropout : c.embedding_dropout)));
  head_ = add("head", std::make_shared<parallel::ColumnLinear>(
                          c.hidden_size, c.padded_scores(), layout,
                          nn::LinearOptions{
                              .bias = c.has_head_bias(),
                              .init = c.init_of(c.hidden_size),
                              .packing = c.scores_texts() ? autograd::Packing() : tokens_->weight()->packing,
                              .tied = c.tied() ? tokens_->weight() : nullptr,
                              .fp8 = false}));
  head_->set_adapter(trained.of_head);
  using Modules = std::vector<std::shared_ptr<nn::Module>>;
  const auto append = [&](Modules modules) {
    std::erase(modules, nullptr);
    append_part(std::move(modules));
  };
  append({tokens_, token_types_, positions_, embedding_norm_, embedding_dropout_});
  for (const auto& [index, block] : blocks_->children()) append_part({block});
  append({norm_, head_dense_, head_norm_, head_dropout_, pooler_, sentence_head_, head_});
  if (c.adapter.type == config::AdapterType::none) return;
  freeze();
  for_each([](nn::Module& module) {
    if (dynamic_cast<parallel::LinearAdapter*>(&module) || dynamic_cast<parallel::Prompts*>(&module) ||
        dynamic_cast<parallel::Bottlenecks*>(&module))
      for (const nn::ParameterPtr& parameter : module.parameters()) parameter->trainable = true;
  });
  for (const std::string& name : saved_parameters(c))
    (name == "tokens.weight" ? tokens_->weight() : head_->weight())->trainable = true;
  for (const nn::ParameterPtr& weight : linear_weights()) weight->stored_as = c.adapter.stored_base();
}

std::vector<nn::ParameterPtr> Gpt::linear_weights() {
  std::vector<nn::ParameterPtr> out;
  blocks_->for_each([&out](nn::Module& module) {
    if (auto* layer = dynamic_cast<parallel::ColumnLinear*>(&module))
      if (layer->weight()->in_linear) out.push_back(layer->weight());  // not steps of linear attention
    if (auto* layer = dynamic_cast<parallel::RowLinear*>(&module)) out.push_back(layer->weight());
  });
  return out;
}

void Gpt::check_tokens(const Tensor& tokens) const {
  if (tokens.dtype() != DType::i32 || tokens.shape().rank() != 2)
    fail(ErrorKind::data, "tokens must be int32 [batch, seq], not ", name_of(tokens.dtype()), " ",
         tokens.shape().str());
  if (tokens.shape()[1] > config_.seq_length)
    fail(ErrorKind::data, "a sequence of ", tokens.shape()[1],
         " tokens is longer than the model's seq_length ", config_.seq_length);
}

Var Gpt::scored(Tape& tape, const Var& x) const {
  const std::int64_t first = source_rows(tape, config_.encoder.seq_length), rows = x.shape()[1];
  return first == 0 ? x : autograd::slice(x, 1, first, rows);
}

Var Gpt::embed(Tape& tape, const tensor::Batch& batch) {
  const Tensor& tokens = entry(batch, "tokens");
  check_tokens(tokens);
  if (const std::int64_t rows = tokens.shape()[1], first = source_rows(tape, config_.encoder.seq_length);
      first >= rows)
    fail(ErrorKind::data, "a sequence of ", rows, " tokens has none behind the encoder's ", first,
         " (model.encoder.seq_length): give the decoder's behind them");
  Var x = (*tokens_)(tape, parallel::inner_part(tape.kernels(), tokens, layout_));
  if (config_.embedding_multiplier != 1) x = autograd::scale(x, config_.embedding_multiplier);
  const auto add_rows = [&](nn::LearnedPositions& table, const Tensor& ids) {
    tensor::Kernels& kernels = tape.kernels();
    x = table.add_rows(tape, x,
                       parallel::stream_part(kernels, parallel::inner_part(kernels, ids, layout_), layout_));
  };
  if (token_types_) add_rows(*token_types_, token_types_of(tape, batch, config_.token_types));
  if (positions_ && tape.documents)
    add_rows(*positions_, entry(batch, "positions"));
  else if (positions_)
    x = positions_->add_to(tape, x, layout_.stream_positions(x.shape()[1]));
  if (embedding_norm_) x = (*embedding_norm_)(tape, x);
  return embedding_dropout_->apply(tape, x, layout_.stream_slice(x.shape()));
}

Var Gpt::normed(Tape& tape, const Var& x) {
  Var out = norm_ ? (*norm_)(tape, x) : x;
  if (head_dense_) out = (*head_dense_)(tape, out);
  if (config_.pools()) out = autograd::tanh(out);
  if (head_norm_) out = (*head_norm_)(tape, out);
  return config_.logits_scaling == 1 ? out : autograd::scale(out, 1 / config_.logits_scaling);
}

parallel::VocabHead Gpt::vocabulary(Tape& tape) {
  const auto* rows = dynamic_cast<parallel::TokenRows*>(head_->adapter());
  return {tape.parameter(head_->weight()), head_->bias() ? tape.parameter(head_->bias()) : Var(),
          config_.scores(), config_.final_logit_softcapping,
          rows ? rows->rows(tape) : parallel::TrainedRows()};
}

Var Gpt::scores(Tape& tape, const tensor::Batch& batch, const std::function<Var(const Var& x)>& head) {
  const std::size_t last = parts() - 1;
  const Var x = run_to(tape, last, batch);
  const auto run_head = [&] { return run_part(tape, last, [&] { return head(x); }); };
  if (!stages()) return run_head();
  return tape.input(stages()->from_last(tape, stages()->has(last) ? run_head().value() : Tensor()));
}

Var Gpt::logits(Tape& tape, const Tensor& tokens) {
  return scores(tape, {{"tokens", tokens}}, [&](const Var& x) {
    const Var own =
        parallel::capped((*head_)(tape, normed(tape, scored(tape, x))), config_.final_logit_softcapping);
    return parallel::gather_sequence(parallel::gather(own, 2, layout_.tensor), layout_);
  });
}

void Gpt::require_whole_texts() const {
  require(
      !layout_.cuts_stream() && layout_.context_size() == 1,
      "texts grow by single tokens, which ranks cannot cut: generate and score without context ranks, and "
      "with parallel.sequence_parallel off");
}

Tensor Gpt::next_logits(Tape& tape, const Tensor& tokens) {
  Tape::NoGrad pause(tape);
  require(tape.key_cache, "texts are continued on a tape with a key cache");
  require(!config_.scores_texts(), "the model's head scores texts, and no next tokens");
  require(config_.causal, "an encoder, whose tokens see those behind them, does not continue texts");
  require_whole_texts();
  const auto head = [&](const Var& x) {
    const Var rows = normed(tape, tape.input(last_rows(tape, x.value())));
    const parallel::VocabHead table = vocabulary(tape);
    const Var own = autograd::linear(rows, table.weight, table.bias);
    parallel::put_columns(tape, rows.value(), table.trained,
                          table.bias.defined() ? table.bias.value() : Tensor(), own.value());
    return parallel::gather(parallel::capped(own, table.cap), 1, layout_.tensor);
  };
  return scores(tape, {{"tokens", tokens}}, head).value();
}

Tensor Gpt::hidden(Tape& tape, const tensor::Batch& batch) {
  Tape::NoGrad pause(tape);
  require_whole_texts();
  require(!config_.has_encoder(), "what stands behind an encoder and a decoder is not given out");
  return scores(tape, batch, [&](const Var& x) { return norm_ ? (*norm_)(tape, x) : x; }).value();
}

Tensor Gpt::class_scores(Tape& tape, const tensor::Batch& batch) {
  Tape::NoGrad pause(tape);
  require(config_.classifies(), "the model has no head for labels");
  require_whole_texts();
  const auto head = [&](const Var& x) {
    const Tensor& all = x.value();
    const std::int64_t sequences = all.shape()[0], rows = all.shape()[1], width = all.shape()[2];
    std::vector<std::int32_t> seen(
        static_cast<std::size_t>(config_.labels_tokens() ? sequences * rows : sequences));
    for (std::size_t i = 0; i < seen.size(); ++i)
      seen[i] = static_cast<std::int32_t>(config_.labels_tokens() ? i : i * static_cast<std::size_t>(rows));
    const Var picked = autograd::take_rows(tape.input(all.reshape({sequences * rows, width})),
                                           Tensor::of<std::int32_t>(tape.device(), {std::ssize(seen)}, seen));
    const parallel::VocabHead table = vocabulary(tape);
    return parallel::gather(autograd::linear(normed(tape, picked), table.weight, table.bias), 1,
                            layout_.tensor);
  };
  return scores(tape, batch, head).value();
}

Tensor Gpt::label_scores(Tape& tape, const Tensor& tokens, const Tensor& rows, const Tensor& labels) {
  Tape::NoGrad pause(tape);
  require_whole_texts();
  const KeepDtypes keep(tape);
  const auto head = [&](const Var& x) {
    const Tensor& all = x.value();
    const std::int64_t width = all.shape().back(), n = rows.numel();
    const Var picked = autograd::take_rows(tape.input(all.reshape({all.numel() / width, width})), rows);
    const Var sequence = tape.input(normed(tape, picked).value().reshape({1, n, width}));
    return tape.input(parallel::vocab_scores(sequence, vocabulary(tape), labels.reshape({1, n}), layout_));
  };
  return scores(tape, {{"tokens", tokens}}, head).value();
}

Var Gpt::forward_part(Tape& tape, std::size_t part, const Var& x, const tensor::Batch& batch) {
  tape.documents = documents_of(tape, batch);
  tape.filling = filling_of(tape, batch);
  tape.source_lengths = tape.key_cache ? tape.key_cache->source_lengths()
                                       : source_lengths_of(tape, batch, config_.encoder.seq_length);
  require(!tape.documents || !config_.has_encoder(),
          "sequences of an encoder's tokens and a decoder's hold one document each");
  if (part == 0) return embed(tape, batch);
  if (part + 1 == parts()) return loss(tape, x, batch);
  return (*blocks_)[part - 1](tape, x);
}

/// The rows with labels, where the head may look at these alone: a processor's, which has whole texts, and
/// whose masks of dropout are not those of a text's rows.
Tensor Gpt::few_targets(Tape& tape, const tensor::Batch& batch) const {
  const auto found = batch.find("targets");
  const bool whole = !layout_.cuts_stream() && layout_.context_size() == 1;
  if (found == batch.end() || found->second.numel() == 0 || head_dropout_ || !whole ||
      tape.device().has_own_memory())
    return {};
  return found->second;
}

Var Gpt::loss(Tape& tape, const Var& x, const tensor::Batch& batch) {
  if (batch.contains("sides")) return text_loss(tape, x, batch);
  const Var tokens = token_loss(tape, x, batch);
  return sentence_head_ ? autograd::add(tokens, sentence_loss(tape, x, batch)) : tokens;
}

/// By what stands behind the blocks at the first token of each sequence: ranks that have whole ones look at
/// these rows alone.
Var Gpt::sentence_loss(Tape& tape, const Var& x, const tensor::Batch& batch) {
  const Tensor& labels = entry(batch, "sentence_labels");
  if (labels.shape() != entry(batch, "tokens").shape())
    fail(ErrorKind::data, "sentence_labels ", labels.shape().str(), " do not match tokens ",
         entry(batch, "tokens").shape().str());
  Var rows = x;
  Tensor own = parallel::inner_part(tape.kernels(), labels, layout_);
  if (!layout_.cuts_stream() && layout_.context_size() == 1) {
    rows = autograd::slice(x, 1, 0, 1);
    own = tape.empty({labels.shape()[0], 1}, labels.dtype());
    tape.kernels().copy_rows({labels, 0, labels.shape()[1]}, {own, 0, 1}, labels.shape()[0], 1);
  }
  const parallel::VocabHead head{tape.parameter(sentence_head_->weight()),
                                 tape.parameter(sentence_head_->bias()), sentence_scores};
  return parallel::vocab_cross_entropy(autograd::tanh((*pooler_)(tape, rows)), head, own, layout_);
}

Var Gpt::token_loss(Tape& tape, const Var& x, const tensor::Batch& batch) {
  const Tensor& tokens = entry(batch, "tokens");
  const Tensor& labels = entry(batch, "labels");
  if (labels.shape() != tokens.shape())
    fail(ErrorKind::data, "labels ", labels.shape().str(), " do not match tokens ", tokens.shape().str());
  if (const Tensor targets = few_targets(tape, batch)) {
    const std::int64_t width = x.shape().back(), n = targets.numel();
    const Var rows = autograd::take_rows(autograd::reshape(x, {labels.numel(), width}), targets);
    return parallel::vocab_cross_entropy(normed(tape, autograd::reshape(rows, {1, n, width})),
                                         vocabulary(tape), labels_at(tape, labels, targets), layout_);
  }
  Var behind = normed(tape, scored(tape, x));
  if (head_dropout_) behind = head_dropout_->apply(tape, behind, layout_.stream_slice(behind.shape()));
  const Tensor own = config_.has_encoder() ? columns_from(tape, labels, config_.encoder.seq_length)
                                           : parallel::inner_part(tape.kernels(), labels, layout_);
  return parallel::vocab_cross_entropy(behind, vocabulary(tape), own, layout_);
}

}  // namespace sherd::models
