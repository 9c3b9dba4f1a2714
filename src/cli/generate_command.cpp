#include <algorithm>
#include <limits>
#include <optional>

#include "base/log.h"
#include "base/text/excerpt.h"
#include "cli/command_line.h"
#include "cli/inference/chat.h"
#include "cli/inference/embed_request.h"
#include "cli/inference/generate_request.h"
#include "cli/inference/prompts_file.h"
#include "cli/program.h"
#include "cli/weights.h"
#include "data/packing/packing.h"
#include "data/templates/published_template.h"

namespace sherd::cli {
namespace {

/// The prompts that the options name; there are none for a conversation.
std::vector<Prompt> prompts_of(const CommandLine& line) {
  const bool chat = line.has("chat");
  if (line.has("prompts") && line.has("prompt")) throw UsageError("give --prompt or --prompts, not both");
  if (!chat && !line.has("prompts") && !line.has("prompt"))
    throw UsageError(
        "give --prompt T or --prompts FILE: what is to be continued; or --chat for a conversation");
  for (const char* name : {"system", "chat-template"})
    if (line.has(name) && !chat) throw UsageError(cat("--", name, " goes with --chat"));
  if (chat + line.has("embed") + line.has("classify") > 1)
    throw UsageError("give one of --chat, --embed and --classify");
  for (const char* name :
       {"temperature", "top-k", "top-p", "repetition-penalty", "stop", "max-tokens", "seed"})
    if (line.has(name) && (line.has("embed") || line.has("classify")))
      throw UsageError(cat("--", name, " is for texts that are continued, not for --embed and --classify"));
  if (line.has("pooling") && !line.has("embed")) throw UsageError("--pooling goes with --embed");
  for (const char* name : {"output", "batch-size"})
    if (line.has(name) && !line.has("prompts") && !line.has("embed") && !line.has("classify"))
      throw UsageError(cat("--", name, " goes with --prompts FILE"));
  if (line.has("json") && !line.has("prompts") && !line.has("prompt"))
    throw UsageError("--json is of --prompt and --prompts, not of a conversation");
  if (line.has("prompt")) return {{line.text("prompt"), {}, ""}};
  if (!line.has("prompts")) return {};
  std::vector<Prompt> prompts = read_prompts(line.text("prompts"), line.has("embed") || line.has("classify"));
  line.require_apart("output", "prompts", line.text("prompts"));
  for (const Prompt& prompt : prompts)
    if (!chat && !prompt.conversation.messages.empty())
      throw UsageError(cat(prompt.place, " is a conversation: give --chat to have it answered"));
  return prompts;
}

/// The template that --chat-template names, else that of the data of the adapter or of the run.
data::ChatTemplate template_of(const CommandLine& line, const Inference& inference) {
  const data::Tokenizer& tokenizer = inference.tokenizer();
  if (line.has("chat-template"))
    return data::chosen_template(line.text("chat-template"), companions_of(inference.reader()), tokenizer);
  const std::string adapter = line.text("adapter");
  if (!adapter.empty() && holds_checkpoints(adapter)) {
    const engine::CheckpointReader reader(engine::checkpoint_folder(adapter));
    if (const std::string& spec = reader.manifest().data.chat_template; !spec.empty())
      return data::ChatTemplate::of_spec(spec, tokenizer);
  }
  return chat_template_of(inference.reader(), tokenizer);
}

ChatStyle style_of(const CommandLine& line, const Inference& inference, std::int64_t max_tokens) {
  const config::Adapter& adapter = inference.config().training.adapter;
  const std::int64_t positions =
      inference.config().model->seq_length - (adapter.has_prompt() ? adapter.prompt.virtual_tokens : 0);
  const ChatStyle style{template_of(line, inference), line.text("system"), positions,
                        std::max(positions - max_tokens, positions / 2)};
  log_info("conversations are written by ", style.written.name());
  return style;
}

/// transformers takes the settings that a model came with by itself; here what is given alone counts.
void tell_of_settings_beside(const CommandLine& line, const Inference& inference) {
  std::string given, unknown;
  for (const auto& [key, value] : sampling_beside(inference.reader())) {
    std::string option = key;
    std::replace(option.begin(), option.end(), '_', '-');
    const bool known = key != "min_p" && key != "no_repeat_ngram_size";
    if (!known)
      unknown += cat(unknown.empty() ? "" : ", ", key, " ", value);
    else if (!line.has(option))
      given += cat(" --", option, " ", value);
  }
  if (!given.empty())
    log_info("the model's generation_config.json suggests", given, "; give them to have them");
  if (!unknown.empty())
    log_info("the model's generation_config.json suggests ", unknown, ", which Sherd does not have");
}

models::Sampling sampling_of(const CommandLine& line, const data::Tokenizer& tokenizer) {
  models::Sampling sampling;
  sampling.temperature = line.number("temperature");
  sampling.top_k = static_cast<int>(line.integer("top-k", 0, std::numeric_limits<int>::max()));
  sampling.top_p = line.number("top-p");
  sampling.repetition_penalty = line.number("repetition-penalty");
  sampling.ids = tokenizer.vocab_size();  // published models have rows for more
  sampling.key = RandomKey{static_cast<std::uint64_t>(line.integer("seed", 0)), stable_hash("generate")};
  models::check_sampling(sampling);
  return sampling;
}

models::Pooling pooling_of(const CommandLine& line) {
  const std::string name = line.has("pooling") ? line.text("pooling") : "mean";
  if (name == "mean") return models::Pooling::mean;
  if (name == "cls") return models::Pooling::cls;
  if (name == "last") return models::Pooling::last;
  throw UsageError(cat("--pooling '", excerpt(name), "' is not mean, cls or last"));
}

/// A prompt as an encoder in front of a decoder reads it.
std::vector<std::int32_t> source_of(const Inference& inference, const Prompt& prompt) {
  const data::Tokenizer& tokenizer = inference.tokenizer();
  std::vector<std::int32_t> ids = prompt_of(tokenizer, prompt.text);
  data::end_text(ids, tokenizer.end_of_document());
  const std::int64_t most = inference.config().model->encoder.seq_length;
  if (std::ssize(ids) > most)
    log_info(prompt.place, prompt.place.empty() ? "" : ": ", "the prompt has ", ids.size(),
             " tokens, and the encoder reads its first ", most, " (model.encoder.seq_length)");
  data::cut_text(ids, most, tokenizer.end_of_document());
  return ids;
}

void embed_prompts(const CommandLine& line, const Inference& inference, const std::vector<Prompt>& prompts) {
  CompletionsFile out(line.text("output"), prompts);
  EmbedRequest request{inference, {}, {}, line.integer("batch-size", 1), {}, out};
  const config::Model& model = *inference.config().model;
  if (line.has("embed")) request.pooling = pooling_of(line);
  if (!request.pooling && !model.classifies())
    fail(ErrorKind::config,
         "the model has no labels (model.head is not sequence_classification or token_classification): train "
         "one that has, from these weights (training.init_from), or give --embed for embeddings");
  for (const Prompt& prompt : prompts)
    if (!request.pooling && model.labels_tokens())
      add_words(request, prompt);
    else
      request.texts.push_back(text_to_embed(inference, prompt, !request.pooling));
  inference.run(
      "Of embeddings: give --base-format nf4, --offload nvme --nvme-path DIR (or --offload cpu), a smaller "
      "--batch-size, or --ranks that share the weights",
      [&](const DistributedPtr& dist) { embed(request, dist); });
}

}  // namespace

CommandLine generate_line() {
  CommandLine line(
      "generate", "Continues texts with a trained model.",
      cat("--checkpoint D (--prompt T | --prompts FILE [--output FILE] [--batch-size N] | --chat) "
          "[--chat [--system TEXT] [--chat-template NAME]] [--embed [--pooling mean|cls|last] | --classify] "
          "[--max-tokens N] "
          "[--temperature X] [--top-k K] [--top-p P] [--repetition-penalty X] [--stop TEXT]... [--seed S] "
          "[--json] ",
          inference_synopsis));
  line.value("prompt", "T", "the text to continue; empty: from the beginning of a document")
      .value("prompts", "FILE",
             "texts to continue: a line each, or of a .jsonl the \"prompt\" of each line; with --chat also "
             "\"messages\"")
      .flag("chat",
            "answer: prompts are questions, written as the conversations of training were; without any, a "
            "conversation, whose turns are lines of standard input (/reset, /exit)")
      .value("system", "TEXT", "of --chat: what a conversation begins with")
      .value("chat-template", "chatml|llama3|mistral|plain|FILE",
             "of --chat: how messages are written; not given: that of the run's data, else "
             "of the "
             "model's files")
      .flag("embed",
            "in the place of continuations give the texts' embeddings, of what stands behind the last block")
      .flag("classify",
            "give the labels of the texts or of their words, by a model that was trained for them")
      .value(
          "pooling", "mean|cls|last",
          "of --embed: the mean of a text's tokens, the first one's (cls) or the last one's; not given: mean")
      .value("output", "FILE",
             "lines of JSON with prompt, completion, tokens and finish, or embedding; not given: stdout")
      .value("batch-size", "N", "texts that are under way at once", "8")
      .value("max-tokens", "N", "at most this many tokens; not given: 100, of an answer 512")
      .value("temperature", "X", "0 takes the likeliest token, 1 samples the model's distribution", "0.8")
      .value("top-k", "K", "sample among the K likeliest tokens; 0: all", "40")
      .value("top-p", "P", "and among the likeliest that together have probability P", "1")
      .value("repetition-penalty", "X", "divide the logits of tokens that the text has by this; 1: none", "1")
      .list("stop", "TEXT", "end before this text; may be repeated")
      .value("seed", "S", "of the sampling", "0");
  add_inference_options(line);
  line.json();
  return line;
}

void generate_command(const CommandLine& line) {
  const std::vector<Prompt> prompts = prompts_of(line);
  const bool chat = line.has("chat");
  for (const std::string& stop : line.all("stop"))
    if (stop.empty()) throw UsageError("--stop is empty; give the text in front of which to end");
  const std::int64_t max_tokens = line.has("max-tokens") ? line.integer("max-tokens", 1) : chat ? 512 : 100;
  const Inference inference(line);
  if (line.has("embed") && inference.config().model->has_encoder())
    fail(
        ErrorKind::config,
        "--embed is not there for a model with an encoder in front of a decoder (model.encoder): its answers "
        "are, without --embed");
  if (line.has("embed") || line.has("classify")) return embed_prompts(line, inference, prompts);
  if (!inference.config().model->causal)
    fail(ErrorKind::config,
         "the model is an encoder (model.causal is false), which does not continue texts: give --embed for "
         "their embeddings",
         inference.config().model->classifies() ? ", or --classify for their labels" : "");
  const config::Model& model = *inference.config().model;
  if (model.gives_rewards())
    fail(ErrorKind::config,
         "the model gives texts rewards, and does not continue them: `sherd evaluate --data` scores answers "
         "by it");
  if (chat && model.has_encoder())
    fail(ErrorKind::config,
         "--chat is for models that continue a text; this one has an encoder (model.encoder), which reads a "
         "prompt: give --prompt or --prompts");
  const data::Tokenizer& tokenizer = inference.tokenizer();
  tell_of_settings_beside(line, inference);
  Request request{inference,
                  {},
                  end_ids_of(inference.reader(), tokenizer),
                  line.all("stop"),
                  max_tokens,
                  line.integer("batch-size", 1),
                  sampling_of(line, tokenizer),
                  model.has_encoder(),
                  !model.has_encoder()};
  std::optional<ChatStyle> style;
  if (chat) {
    style = style_of(line, inference, max_tokens);
    const data::AnswerEnd& end = style->written.answer_end();
    request.end_ids.insert(request.end_ids.end(), end.ids.begin(), end.ids.end());
    request.stops.insert(request.stops.end(), end.texts.begin(), end.texts.end());
    request.drop = style->written.before_answer();
    request.echo = false;
  }
  for (const Prompt& prompt : prompts) {
    request.prompts.push_back(chat                  ? question_of(*style, prompt)
                              : model.has_encoder() ? source_of(inference, prompt)
                                                    : prompt_of(tokenizer, prompt.text));
    require_rows(request.prompts.back(), tokenizer, model.vocab_size, prompt.place);
  }
  std::optional<CompletionsFile> completions;
  if (line.has("prompts") || line.has("json"))
    request.completions = &completions.emplace(line.text("output"), prompts);
  QuestionQueue questions;
  inference.run(
      "Of generation: give --base-format nf4, --offload nvme --nvme-path DIR (or --offload cpu), a smaller "
      "--batch-size, fewer --max-tokens, or --ranks that share the weights",
      [&](const DistributedPtr& dist) {
        prompts.empty() ? converse(request, *style, questions, dist) : generate(request, dist);
      });
}

}  // namespace sherd::cli
