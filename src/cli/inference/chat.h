#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "cli/inference/generate_request.h"
#include "data/templates/chat_template.h"

// `sherd generate --chat`: questions to a model that was trained on conversations.

namespace sherd::cli {

/// How a conversation is put to the model.
struct ChatStyle {
  data::ChatTemplate written;
  /// Begins conversations that have no system message of their own; empty: nothing does.
  std::string system;
  std::int64_t positions;  ///< ids that the model reads: a conversation and its answer
  std::int64_t room;       ///< ids of a conversation at most, so that the answer has its place behind
};

/// The ids of a prompt, up to where the answer begins; a text is the user's only message. Tells of turns that
/// had no place. Throws Error{data} naming the place of the prompt.
std::vector<std::int32_t> question_of(const ChatStyle& style, const Prompt& prompt);

/// The turns that the reading rank hands to the others. All are threads of this process, and wait for as long
/// as a person thinks.
class QuestionQueue {
 public:
  /// nullopt: no more follow.
  void put(std::optional<std::vector<std::int32_t>> question);
  /// The one of this number, from 0 on.
  std::optional<std::vector<std::int32_t>> take(std::size_t number);

 private:
  std::mutex mutex_;
  std::condition_variable come_;
  std::vector<std::vector<std::int32_t>> questions_;  // guarded by mutex_
  bool over_ = false;                                 // guarded by mutex_
};

/// One rank's part of a conversation: rank 0 reads a line of standard input for each turn and prints the
/// answers, until the input ends or a line says /exit; /reset begins anew. `like`: a request without prompts.
void converse(const Request& like, const ChatStyle& style, QuestionQueue& questions,
              const DistributedPtr& dist);

}  // namespace sherd::cli
