#include <charconv>
#include <cstdio>
#include <filesystem>

#include "base/error.h"
#include "base/files.h"
#include "base/text/excerpt.h"
#include "cli/command_line.h"
#include "cli/init/questions.h"
#include "cli/init/starting_config.h"
#include "cli/program.h"
#include "cli/weights.h"
#include "device/cuda.h"
#include "engine/report/report.h"
#include "engine/token_data.h"
#include "models/gpt_config.h"
#include "planning/fit.h"

namespace sherd::cli {
namespace {

namespace fs = std::filesystem;

/// The ids that memory is counted for where no data and no published model tell how many there are.
constexpr std::int64_t usual_vocabulary = 32'000;

/// A file that goes with the object: the configuration while it is tried.
class Draft {
 public:
  explicit Draft(const fs::path& output) : path_(output.string() + ".draft") {}
  ~Draft() {
    std::error_code ignored;
    fs::remove(path_, ignored);
  }
  Draft(const Draft&) = delete;
  Draft& operator=(const Draft&) = delete;
  ConfigFiles write(const std::string& config) const {
    write_file_atomically(path_, config + '\n', /*durable=*/false);
    return {{path_.string()}, {}};
  }

 private:
  fs::path path_;
};

std::int64_t whole_number(const std::string& option, const std::string& text, std::int64_t most) {
  std::int64_t out = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), out);
  if (error != std::errc() || end != text.data() + text.size() || out < 1 || out > most)
    throw UsageError(
        cat("--", option, " takes a whole number from 1 to ", most, ", not '", excerpt(text), "'"));
  return out;
}

/// The value whose word in `words` the text is.
template <class T>
T one_of(const std::string& option, const std::string& text,
         const std::vector<std::pair<std::string, T>>& words) {
  std::vector<std::string> names;
  for (const auto& [name, value] : words) {
    if (name == text) return value;
    names.push_back(name);
  }
  throw UsageError(cat("--", option, ": '", excerpt(text), "' is none; ", suggest(text, names)));
}

bool is_prepared(const std::string& prefix) {
  std::error_code error;
  return fs::exists(prefix + ".idx", error);
}

void take_from(const std::string& text, Wishes& wishes) {
  wishes.size = nullptr, wishes.folder = text;
  for (const ModelSize& size : new_model_sizes())
    if (size.name == text) wishes.size = &size;
  if (wishes.size || is_hugging_face(text) || holds_checkpoints(text)) return;
  throw UsageError(cat("--from: '", excerpt(text),
                       "' is no folder with a model (config.json and safetensors, or a "
                       "checkpoint), and none of the sizes ",
                       new_model_names()));
}

/// Asks for what decides the configuration.
Wishes ask_wishes(const CommandLine& line, const InitQuestions& questions) {
  constexpr std::int64_t most = 1'000'000'000;
  Wishes out;
  questions.ask("from", cat("Begin from: a new model of ", new_model_names(), ", or a folder of weights"),
                "10m", [&](const std::string& text) { take_from(text, out); });
  questions.ask("objective", "Learn: pretraining, instruction or preferences", "pretraining",
                [&](const std::string& text) {
                  out.purpose = one_of<Purpose>("objective", text,
                                                {{"pretraining", Purpose::pretraining},
                                                 {"instruction", Purpose::instruction},
                                                 {"preferences", Purpose::preferences}});
                  if (out.size && out.purpose == Purpose::preferences)
                    throw UsageError(
                        "--objective preferences needs a model that answers already: give --from a folder");
                });
  const auto take_method = [&](const std::string& text) {
    out.method = one_of<Method>(
        "method", text, {{"full", Method::full}, {"lora", Method::lora}, {"few-bit", Method::few_bit}});
    if (out.size && out.method != Method::full)
      throw UsageError(
          cat("--method ", text, " trains beside a published model's weights: give --from a folder"));
  };
  if (!out.size || line.has("method"))
    questions.ask("method", "Train: full (all weights), lora, or few-bit (LoRA, the base in 4 bits)",
                  out.size ? "full" : "lora", take_method);
  questions.ask(
      "data", "Data: what `sherd prepare --output` was given", "data/corpus", [&](const std::string& text) {
        out.data = text;
        if (questions.asks() && !is_prepared(text))
          std::fprintf(stderr, "  there is no %s.idx yet: `sherd prepare --input … --output %s` makes it\n",
                       text.c_str(), text.c_str());
      });
  questions.ask("seq-length", "Tokens of a sample", std::to_string(out.size ? out.size->seq_length : 1024),
                [&](const std::string& text) { out.seq_length = whole_number("seq-length", text, 1 << 24); });
  questions.ask("batch", "Samples of a step", "16",
                [&](const std::string& text) { out.batch = whole_number("batch", text, most); });
  out.steps = line.integer("steps", 1, most);
  out.save_dir = line.text("save-dir");
  const auto gpus = static_cast<std::int64_t>(device::cuda_status().gpus.size());
  out.ranks =
      static_cast<int>(line.has("ranks") ? line.integer("ranks", 1, 1024) : std::max<std::int64_t>(1, gpus));
  return out;
}

/// The memory that a run takes, and the change by which it fits.
struct Fit {
  planning::MachineCapacity machine;
  std::uint64_t needed = 0, at_hand = 0;
  planning::Remedy remedy;
  std::string lacks;  ///< what there is too little of, whatever is changed; empty: it fits
};

std::uint64_t needed_of(const planning::MachineCapacity& machine, const planning::World& world,
                        const planning::StageEstimates& stages) {
  if (!machine.on_gpus)
    return planning::most_on_a_machine(planning::by_stage(stages, planning::resident_bytes), world);
  return stages[0].peaks.tiers[0].total_peak + planning::untracked_of_cuda;
}

/// Looks whether the configuration fits, and if not, what would make it. `memory`: bytes of the machine, or
/// of a GPU where the run is on GPUs; 0: those that there are.
Fit fit_of(const ConfigFiles& files, std::int64_t vocabulary, int ranks, std::uint64_t memory) {
  const config::Config config = files.parse();
  const planning::World world{ranks, ranks};
  Fit out{.machine = planning::this_machine(config)};
  if (memory > 0) (out.machine.on_gpus ? out.machine.gpu_memory : out.machine.memory) = memory;
  out.at_hand = out.machine.on_gpus ? out.machine.gpu_memory : out.machine.memory;
  const planning::StageEstimates stages = planning::estimate_stages(config, vocabulary, world);
  out.needed = needed_of(out.machine, world, stages);
  const std::vector<planning::Shortfall> missing = planning::shortfalls(config, stages, world, out.machine);
  if (missing.empty()) return out;
  const auto reparse = [&](const std::vector<std::string>& more) { return files.parse(more); };
  out.remedy = planning::cheapest_remedy(reparse, vocabulary, world, out.machine);
  if (out.remedy.keys.empty()) out.lacks = missing[0].text();
  return out;
}

/// The number of ids, by the data where they are there.
std::int64_t vocabulary_of(const config::Config& config, const std::string& prefix) {
  if (is_prepared(prefix)) return engine::open_token_data(config)->vocab_size;
  return config.model && config.model->vocab_size > 0 ? config.model->vocab_size : usual_vocabulary;
}

/// Writes the keys that make the run fit into the configuration, and tells why.
std::string settle(std::string& config, const Fit& fit, int ranks) {
  const std::string where = fit.machine.on_gpus ? "of a GPU" : "of this machine";
  const std::string room = fit.at_hand > 0 ? cat(engine::human_bytes(fit.at_hand), " ", where, " at hand")
                                           : "unknown memory at hand";
  std::string why = cat(counted(ranks, "rank"), ", ", room, ": ");
  if (fit.remedy.keys.empty()) {
    why += cat("the run takes ", engine::human_bytes(fit.needed), " and nothing has to move out of the way");
  } else {
    why += cat("as it stood the run would take ", engine::human_bytes(fit.needed), ", so ",
               joined_text(fit.remedy.reasons, "; "));
    config = with_keys(config, fit.remedy.keys);
  }
  config = with_keys(config, {{"//zero_optimization", why + "."}});
  return why;
}

}  // namespace

CommandLine init_line() {
  CommandLine line(
      "init",
      "Writes a first configuration that fits this machine, with notes: by questions in a terminal, else "
      "by options alone.",
      "[--output config.json] [--from SIZE|DIR] [--data PREFIX] [--objective O] [--method M] [--yes]");
  line.value("output", "F.json", "the file to write; one that is there is left alone", "config.json")
      .value(
          "from", "SIZE|DIR",
          cat("a new model of ", new_model_names(), ", or a folder of weights: Hugging Face's, or a run's"))
      .value("data", "PREFIX", "what `sherd prepare --output` was given, or will be")
      .value("objective", "O", "pretraining, instruction or preferences")
      .value("method", "M", "full, lora, or few-bit: LoRA beside a base in 4 bits")
      .value("seq-length", "N", "tokens of a sample")
      .value("batch", "N", "samples of a step, over all ranks")
      .value("memory", "SIZE",
             "memory that the run may take, of this machine, or of each GPU; by default what is free")
      .value("ranks", "N", "ranks on this machine; by default one, or one for each GPU")
      .value("steps", "N", "optimizer steps", "1000")
      .value("save-dir", "DIR", "where checkpoints go", "runs/first")
      .flag("yes", "ask nothing: what no option gives is as the questions propose it");
  return line;
}

void init_command(const CommandLine& line) {
  const fs::path output = line.required("output");
  if (std::error_code error; fs::exists(output, error))
    fail(ErrorKind::usage, "'", output.string(),
         "' is there already: give --output another name, or move it away");
  const InitQuestions questions(line);
  Wishes wishes = ask_wishes(line, questions);
  std::uint64_t memory = 0;
  questions.ask("memory", "Memory at hand, as 8GB or 500MiB; all: what is free", "all",
                [&](const std::string& text) {
                  const auto bytes = text == "all" ? std::uint64_t{0} : config::bytes_of(text).value_or(0);
                  if (text != "all" && bytes == 0)
                    throw UsageError(cat("--memory takes a size as 8GB, not '", excerpt(text), "'"));
                  memory = bytes;
                });
  if (wishes.size && !is_prepared(wishes.data)) wishes.vocabulary = usual_vocabulary;
  const PrecisionChoice precision = precision_of_this_machine();
  std::string config = starting_config(wishes, precision);
  const Draft draft(output);
  const ConfigFiles files = draft.write(config);
  const config::Config parsed = files.parse();
  const std::int64_t vocabulary = vocabulary_of(parsed, wishes.data);
  const Fit fit = fit_of(files, vocabulary, wishes.ranks, memory);
  if (!fit.lacks.empty())
    fail(ErrorKind::memory, fit.lacks,
         ", and no offload and no ZeRO stage makes it fit: choose a smaller model, "
         "--seq-length or --batch, --method few-bit, or more --ranks on a larger machine");
  const std::string why = settle(config, fit, wishes.ranks);
  (void)draft.write(config).parse();  // what was chosen is read as it is meant
  write_file_atomically(output, config + '\n');
  const double parameters = static_cast<double>(models::gpt_config(parsed, vocabulary).num_parameters());
  std::printf("wrote %s: a model of %s parameters\n", output.c_str(),
              engine::human_count(parameters).c_str());
  std::printf("precision: %s, as %s\n", precision.name.c_str(), precision.reason.c_str());
  std::printf("memory: %s\n", why.c_str());
  for (const auto& [key, value] : fit.remedy.keys) std::printf("  %s = %s\n", key.c_str(), value.c_str());
  if (!is_prepared(wishes.data))
    std::printf("next: sherd prepare --input YOUR_TEXTS --tokenizer %s --output %s\n",
                wishes.size ? "spm-train:32000" : cat("hf:", wishes.folder).c_str(), wishes.data.c_str());
  std::printf(
      "next: sherd train --config %s%s --metrics metrics.jsonl, and beside it: sherd watch metrics.jsonl\n",
      output.c_str(), wishes.ranks > 1 ? cat(" --ranks ", wishes.ranks).c_str() : "");
}

}  // namespace sherd::cli
