#pragma once

// This room has transformers: blocks, decoders and encoders, the published families, adapters, generation and
// scoring.
//
// To change, look at:
// - a model and its blocks: gpt.cpp, transformer_block.cpp
// - add a family: docs/recipes.md, "A model family"
// - families: families/, relatives in one file; files of Hugging Face, PEFT and AdapterHub: hub/
// - adapters as modules: adapters/adapters.cpp; which modules have one: hub/adapter_targets.cpp; names in
//   files: hub/adapter_names.cpp; merging: adapters/merged_weights.cpp; prompts, and what they begin as:
//   adapters/prompt_weights.h; the layers: sharding/parallel/adapters/
// - exports in few bits: hub/low_bit_export.cpp; compressed-tensors' forms: hub/compressed_export.cpp, and
// how
//   layers are rounded and calibrated for them: compressed/
// - generation: inference/generate.cpp; the next token, stop strings: inference/sampling.cpp; how likely
//   texts are: inference/score.cpp

#include "base/error.h"
#include "models/transformer_block.h"
#include "nn/layered_model.h"
#include "nn/text_loss.h"
#include "sharding/parallel/embedding.h"
#include "sharding/parallel/loss.h"

namespace sherd::models {

/// Adds to `problems` whatever the ranks of a layout cannot share evenly: heads, the feed-forward width,
/// sequences, the vocabulary. `config` must be resolved.
void check_layout(const GptConfig& config, const parallel::Layout& layout, Problems& problems);

/// A decoder-only language model, GPT-2's or Llama's style by its configuration, or an encoder, BERT's style;
/// or an encoder in front of a decoder, T5's style, whose tokens stand before the decoder's in each sequence.
/// Parts: "tokens", "token_types", "positions" (learned ones), "encoder_positions" and "decoder_positions"
/// (relative ones), "embedding_norm", "embedding_dropout", "blocks", "norm", "head_dense", "head_norm" and
/// "head_dropout" (as config::Head says), "pooler" and "sentence_head" (of models that learn pairs of texts),
/// "head" (whose weight is the token table when tied). As a layered
/// model its parts are the embeddings, each block, norm and head. Each is a unit of sharding, a block one of
/// recompute too. With an adapter (GptConfig::adapter) its parameters alone are trainable; a prompt's virtual
/// tokens are ids behind the padded vocabulary, which callers put in front of texts.
class Gpt : public nn::LayeredModel, public nn::TextModel {
 public:
  /// `layout`: the ranks with which this one computes the model; by default it is alone. Throws Error{config}
  /// where the keys do not fit each other, or cannot be shared by the ranks.
  explicit Gpt(const GptConfig& config, const parallel::Layout& layout = {});

  /// The weights of linear layers in blocks, experts' among them, that a base in few bits keeps so
  /// (training.base_format): those of no table, head, router, or step of linear attention.
  std::vector<nn::ParameterPtr> linear_weights();
  /// The configuration that the model was built from, resolved.
  const GptConfig& config() const { return config_; }
  /// Scores of the next token after every position; for an encoder those of the token at every position, and
  /// for an encoder with a decoder those after the decoder's positions. tokens: int32 [batch, seq]; the
  /// result: [batch, seq, padded_vocab], of which columns from vocab_size on mean nothing. Every rank of the
  /// layout, with the stages of a pipeline on tapes that do not record, gives all tokens and gets all scores,
  /// and must do the same with them. Throws Error{data} where seq is not a multiple of the layout's
  /// sequence_multiple().
  Var logits(Tape& tape, const tensor::Tensor& tokens);
  /// Scores of the token that follows each text, whose next rows `tokens`, int32 [sequences, rows], are as
  /// the tape's key cache was told (autograd/key_cache.h): [sequences, padded_vocab], behind the last row
  /// that counts. Every rank calls it alike, with a cache of its own, and gets all scores. Not recorded. No
  /// token is dropped by an expert's capacity. Throws Error{usage} without a key cache, for encoders, and for
  /// layouts that cut sequences: context ranks, and parallel.sequence_parallel over tensor ranks.
  tensor::Tensor next_logits(Tape& tape, const tensor::Tensor& tokens);
  /// The hidden states behind the last block and its norm, [batch, seq, hidden], of every token of the batch
  /// (as forward_part() takes it, without labels). Every rank calls it alike, and all get the result. Not
  /// recorded. Layouts as of next_logits().
  tensor::Tensor hidden(Tape& tape, const tensor::Batch& batch);
  /// Scores of the model's labels, [sequences, padded scores], by the first token of each sequence of a batch
  /// as of hidden(), or of labels of tokens by each token, [sequences·rows, padded scores], with the columns
  /// behind the labels meaning nothing. Every rank calls it alike, and all get the result. Throws
  /// Error{usage} for a model without such a head.
  tensor::Tensor class_scores(Tape& tape, const tensor::Batch& batch);
  /// The parts of the scores of `labels`, as parallel::vocab_scores() says: labels[i] follows row rows[i]
  /// of the batch's batch·seq rows; both int32 [n]. Every rank calls it alike, and all get the result. Not
  /// recorded. Layouts as of next_logits(); with a key cache the batch's rows continue its texts.
  tensor::Tensor label_scores(Tape& tape, const tensor::Tensor& tokens, const tensor::Tensor& rows,
                              const tensor::Tensor& labels);

  // ---- nn::TextModel: texts are the documents of a batch as of forward_part(), else its rows ----
  void set_text_loss(std::shared_ptr<nn::TextLoss> loss) override { text_loss_ = std::move(loss); }
  nn::TextScores text_scores(Tape& tape, const tensor::Batch& batch, bool without_adapter) override;

 protected:
  /// batch: "tokens" and "labels", int32 [batch, seq]; labels[b, s] is the token that follows tokens[b, s]
  /// (an encoder's: the one that was masked there, or the class of the text that begins there, or of the
  /// token), or -100 where none is to be learned. "token_types", int32 [batch, seq], may tell rows of that
  /// table, else the first. "targets", int32 [n] that the processor reads, may name the rows among batch·seq
  /// that have a label: the head of a model for masked tokens then looks at no others. Where there are
  /// "documents", int32 [n + 1] that the processor reads, the bounds among all rows of documents that do not
  /// see each other, "positions", int32 [batch, seq], counts each one's tokens. "filling", int32 [batch] that
  /// the processor reads, tells how many places at each row's end hold no token: routers leave them out.
  /// "source_lengths", int32 [batch] that the processor reads, tells how many of the encoder's places in
  /// front of a decoder's hold tokens, the first ones. "sentence_labels", int32 [batch, seq], which models
  /// with a head for pairs of texts read, has at each pair's first token 0 where the second text goes on with
  /// the first, 1 where it does not, and -100 elsewhere; the loss is the sum of both means. Throws
  /// Error{data} for what is missing or does not fit.
  Var forward_part(Tape& tape, std::size_t part, const Var& x, const tensor::Batch& batch) override;

 private:
  void check_tokens(const tensor::Tensor& tokens) const;
  /// Every rank has whole sequences, or Error{usage}.
  void require_whole_texts() const;
  /// This rank's part of the stream before the blocks.
  Var embed(Tape& tape, const tensor::Batch& batch);
  /// The input of the vocabulary's table: x behind the last norm and the head's own layers, divided as scores
  /// are (logits_scaling).
  Var normed(Tape& tape, const Var& x);
  /// The table of the vocabulary's scores, with its bias.
  parallel::VocabHead vocabulary(Tape& tape);
  tensor::Tensor few_targets(Tape& tape, const tensor::Batch& batch) const;
  /// The rows of the stream that a head looks at: a decoder's behind an encoder, else all.
  Var scored(Tape& tape, const Var& x) const;
  Var loss(Tape& tape, const Var& x, const tensor::Batch& batch);
  Var token_loss(Tape& tape, const Var& x, const tensor::Batch& batch);
  Var sentence_loss(Tape& tape, const Var& x, const tensor::Batch& batch);
  /// The head's rows, their labels, and whose they are (gpt_texts.cpp).
  struct Texts;
  Texts texts_of(Tape& tape, const Var& x, const tensor::Batch& batch);
  Var text_loss(Tape& tape, const Var& x, const tensor::Batch& batch);
  /// Each text's reward, [texts, padded scores] of which the first counts; zeros of one without a target. On
  /// all ranks that share the layout.
  Var rewards(Tape& tape, const Var& x, const tensor::Batch& batch);
  /// The result of `head` for the stream behind the blocks, on all ranks.
  Var scores(Tape& tape, const tensor::Batch& batch, const std::function<Var(const Var& x)>& head);

  GptConfig config_;
  parallel::Layout layout_;
  std::shared_ptr<parallel::VocabEmbedding> tokens_;
  std::shared_ptr<nn::LearnedPositions> token_types_, positions_;             ///< null: none
  std::shared_ptr<RelativePositions> encoder_positions_, decoder_positions_;  ///< null: none
  std::shared_ptr<nn::Layer> embedding_norm_;                                 ///< null: none
  std::shared_ptr<nn::Dropout> embedding_dropout_;
  std::shared_ptr<nn::LayerList> blocks_;
  std::shared_ptr<nn::Layer> norm_, head_dense_, head_norm_;  ///< null: none
  std::shared_ptr<nn::Dropout> head_dropout_;                 ///< null: none
  std::shared_ptr<nn::Layer> pooler_;                         ///< null: texts do not come in pairs
  std::shared_ptr<parallel::ColumnLinear> sentence_head_;     ///< likewise
  std::shared_ptr<parallel::ColumnLinear> head_;
  std::shared_ptr<nn::TextLoss> text_loss_;
};

}  // namespace sherd::models
