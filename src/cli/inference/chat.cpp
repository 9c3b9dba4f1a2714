#include "cli/inference/chat.h"

#include <unistd.h>

#include <cstdio>
#include <iostream>

#include "base/log.h"
#include "base/text/excerpt.h"

namespace sherd::cli {
namespace {

std::vector<data::ChatMessage> begun(const ChatStyle& style) {
  if (style.system.empty()) return {};
  return {{"system", style.system}};
}

std::vector<std::int32_t> ids_of(const ChatStyle& style, const data::Conversation& conversation,
                                 const std::string& place) {
  data::Question question = data::encode_question(style.written, conversation, style.room);
  if (question.left_out > 0)
    log_info(place, "the conversation is too long for model.seq_length: its first ",
             counted(static_cast<std::int64_t>(question.left_out), "message"), " are left out");
  if (std::ssize(question.ids) >= style.positions)
    fail(ErrorKind::data, "the question has ", question.ids.size(), " tokens, and the model reads ",
         style.positions, " (model.seq_length), with the answer: ask shorter");
  if (std::ssize(question.ids) > style.room)
    log_warning(place, "a question of ", question.ids.size(),
                " tokens has place for few behind it: the model "
                "reads ",
                style.positions, " (model.seq_length), and may forget its beginning");
  return std::move(question.ids);
}

/// Standard input, turn by turn, on the rank that reads it.
class Reader {
 public:
  explicit Reader(const ChatStyle& style)
      : style_(style), terminal_(::isatty(STDIN_FILENO) == 1), messages_(begun(style)) {
    if (terminal_)
      std::fputs("a line is a question; /reset forgets what was said, /exit ends the conversation\n", stderr);
  }

  std::optional<std::vector<std::int32_t>> next() {
    std::string line;
    for (;;) {
      if (terminal_) std::fputs("> ", stderr);
      if (!std::getline(std::cin, line)) return std::nullopt;
      if (line.ends_with('\r')) line.pop_back();
      if (line == "/exit") return std::nullopt;
      if (line == "/reset") messages_ = begun(style_);
      if (line == "/reset" || line.find_first_not_of(" \t") == std::string::npos) continue;
      messages_.push_back({"user", line});
      try {
        return ids_of(style_, {messages_}, "");
      } catch (const Error& error) {
        if (!terminal_ || error.kind() != ErrorKind::data) throw;
        std::fprintf(stderr, "%s\n", error.what());  // the person types another
        messages_.pop_back();
      }
    }
  }

  void answered(const std::string& answer) { messages_.push_back({"assistant", answer}); }

 private:
  const ChatStyle& style_;
  bool terminal_;
  std::vector<data::ChatMessage> messages_;
};

}  // namespace

std::vector<std::int32_t> question_of(const ChatStyle& style, const Prompt& prompt) {
  data::Conversation conversation = prompt.conversation;
  std::vector<data::ChatMessage>& messages = conversation.messages;
  if (messages.empty()) messages.push_back({"user", prompt.text});
  if (messages.front().role != "system") {
    const std::vector<data::ChatMessage> first = begun(style);
    messages.insert(messages.begin(), first.begin(), first.end());
  }
  const std::string place = prompt.place.empty() ? "" : prompt.place + ": ";
  try {
    return ids_of(style, conversation, place);
  } catch (const Error& error) {
    fail(error.kind(), place, error.what());
  }
}

void QuestionQueue::put(std::optional<std::vector<std::int32_t>> question) {
  const std::lock_guard lock(mutex_);
  if (question)
    questions_.push_back(std::move(*question));
  else
    over_ = true;
  come_.notify_all();
}

std::optional<std::vector<std::int32_t>> QuestionQueue::take(std::size_t number) {
  std::unique_lock lock(mutex_);
  come_.wait(lock, [&] { return over_ || number < questions_.size(); });
  if (number < questions_.size()) return questions_[number];
  return std::nullopt;
}

void converse(const Request& like, const ChatStyle& style, QuestionQueue& questions,
              const DistributedPtr& dist) {
  struct Ends {  // whatever happens to the rank that reads, nobody waits for it
    QuestionQueue* questions;
    ~Ends() {
      if (questions) questions->put(std::nullopt);
    }
  };
  InferenceModel from(like.from.reader(), like.from.config(), dist);
  const Ends ends{dist->rank() == 0 ? &questions : nullptr};
  std::optional<Reader> reader;
  if (dist->rank() == 0) reader.emplace(style);
  for (std::size_t number = 0;; ++number) {
    if (reader) questions.put(reader->next());
    std::optional<std::vector<std::int32_t>> question = questions.take(number);
    if (!question) return;
    Request request = like;
    request.prompts = {std::move(*question)};
    if (number > 0) request.sampling.key = like.sampling.key.at(number);
    const std::string answer = generate_one(request, from, dist);
    if (reader) reader->answered(answer);
  }
}

}  // namespace sherd::cli
